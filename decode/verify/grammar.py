"""Structured output: texts that match a JSON schema or a grammar, with any drafter, on chains and trees.

Target and draft logits receive the same masks, so candidates match the grammar too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from ...policies.contract import Array
from ...policies.errors import InputError
from ...policies.safe_loading import strict_loads
from .processors import PerText

BACKENDS = ("llguidance", "xgrammar")
"""Supported backends, in the order of preference of `auto`."""

_MAX_MATCHERS = 256
"""Maximum number of cached matchers per text, more than one round requires."""


class Matcher:
    """A grammar after one prefix of a text.

    Args:
        matcher: `llguidance.LLMatcher` or `xgrammar.GrammarMatcher`.
        ends: end-of-text token ids. They are allowed where the grammar is complete.
        possible: [V] bool, tokens that may be allowed.
    """

    def __init__(self, matcher: Any, ends: Collection[int], possible: Array) -> None:
        self.ends, self._matcher, self._possible = frozenset(ends), matcher, possible
        self._is_xgrammar = hasattr(matcher, "accept_token")

    def after(self, token: int) -> Matcher | None:
        """Return the matcher after one more token; None if the grammar does not allow it or the text ends."""
        if token in self.ends or token >= len(self._possible) or not self._possible[token]:
            return None
        if self._is_xgrammar:
            matcher = self._matcher.fork()
            accepted = matcher.accept_token(token)
        else:
            matcher = self._matcher.deep_copy()  # 2 us, less than a rollback
            accepted = matcher.try_consume_tokens([token])
        return Matcher(matcher, self.ends, self._possible) if accepted else None

    @cached_property
    def allowed(self) -> Array:
        """[V] bool, tokens allowed next."""
        size = len(self._possible)
        if self._is_xgrammar:
            words = np.full((1, -(-size // 32)), -1, dtype=np.int32)
            self._matcher.fill_next_token_bitmask(torch.from_numpy(words))
            packed = words.view(np.uint8)[0]
        else:
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            if self._matcher.is_error():
                fault = _one_line(self._matcher.get_error())
                raise InputError(f"grammar: llguidance failed: {fault}; simplify the grammar")
        allowed: Array = np.unpackbits(packed, bitorder="little")[:size].astype(bool) & self._possible
        if not self._is_xgrammar and not self._matcher.is_accepting():
            allowed[list(self.ends)] = (
                False  # an end token may also be an ordinary token that the grammar allows as text
            )
        return allowed


class Grammar(PerText):
    """A constraint for `SamplingParams(processors=(grammar,))` or `generate(logits_processor=[grammar])`.

    A text may end where the grammar is complete. The length limit may truncate it earlier; `matches` checks a text.

    Args:
        kind: `json-schema` or `grammar`.
        source: see `from_json_schema` and `from_text`.
        tokenizer: tokenizer of the target.
        backend: `llguidance`, `xgrammar`, or `auto`, which selects the first of these that is installed.

    Raises:
        InputError: the source is invalid or has features that the backend does not support, or no backend is installed.
    """

    def __init__(self, kind: str, source: str, tokenizer: PreTrainedTokenizerBase, backend: str = "auto") -> None:
        backend = _installed_backend(backend)
        digest = hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
        self.name, self._kind, self._tokenizer = f"{kind} {digest} ({backend})", kind, tokenizer
        self._is_xgrammar = backend == "xgrammar"
        self._grammar = (_parse_xgrammar if self._is_xgrammar else _parse_llguidance)(kind, source)
        self._matchers: dict[tuple[int, ...], Matcher] = {}

    @classmethod
    def from_json_schema(
        cls, schema: str | Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, backend: str = "auto"
    ) -> Grammar:
        """Return the grammar of a JSON schema (text or parsed), with at most one space or line break between JSON tokens."""
        source = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            parsed = strict_loads(source)
        except (ValueError, RecursionError) as error:
            raise InputError(f"json-schema: expected JSON; {_one_line(str(error))}") from None
        if not isinstance(parsed, dict):
            raise InputError(f"json-schema: expected an object, got {_one_line(json.dumps(parsed))}")
        return cls("json-schema", source, tokenizer, backend)

    @classmethod
    def from_text(cls, text: str, tokenizer: PreTrainedTokenizerBase, backend: str = "auto") -> Grammar:
        """Return a context-free grammar, in Lark or the EBNF of llama.cpp (rules with `::=`, start symbol `root`)."""
        return cls("grammar", text, tokenizer, backend)

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """Return the matcher at the start of a text.

        Raises:
            InputError: there is no end-of-text token, or the backend does not support the tokenizer.
        """
        ends = tuple(sorted(eos))
        if not ends:
            raise InputError(f"{self.name}: expected at least one end-of-text token, got none; set eos_token_id")
        if ends not in self._matchers:
            self._matchers[ends] = self._compile_xgrammar(ends) if self._is_xgrammar else self._compile_llguidance(ends)
        return self._matchers[ends]

    def _compile_llguidance(self, ends: Sequence[int]) -> Matcher:
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        ends = [
            end for end in ends if end < len(self._tokenizer)
        ]  # ids in the padding of the vocabulary are not tokens
        try:
            tokenizer = from_tokenizer(self._tokenizer, eos_token=ends)  # type: ignore[arg-type]
        except ValueError as error:
            fault = _one_line(str(error))
            raise InputError(f"structured output: llguidance cannot read this tokenizer ({fault})") from None
        if fault := LLMatcher.validate_grammar(self._grammar, tokenizer):
            raise _invalid(self._kind, fault)
        matcher = LLMatcher(tokenizer, self._grammar, log_level=0)
        return Matcher(matcher, ends, np.ones(tokenizer.vocab_size, dtype=bool))

    def _compile_xgrammar(self, ends: Sequence[int]) -> Matcher:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, stop_token_ids=list(ends))
        compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(self._grammar)
        # xgrammar 0.2.8 allows raw control characters in JSON strings with `maxLength`. JSON does not.
        min_byte = 32 if self._kind == "json-schema" else 0
        return _xgrammar_matcher(compiled, [all(b >= min_byte for b in token) for token in info.decoded_vocab])

    def for_text(self, prompt: int, eos: Sequence[int]) -> GrammarMask:
        """See `PerText.for_text`."""
        return GrammarMask(self.matcher(eos), prompt)

    def matches(self, tokens: Sequence[int], eos: Sequence[int]) -> bool:
        """Return whether generated tokens form a complete text of the grammar; the end-of-text token is optional."""
        matcher: Matcher | None = self.matcher(eos)
        for index, token in enumerate(tokens):
            if matcher is None or (token in matcher.ends and index + 1 == len(tokens)):
                break
            matcher = matcher.after(token)
        return matcher is not None and bool(matcher.allowed[min(matcher.ends)])


class XGrammarProcessor(PerText):
    """Constraint with the compiled grammar of an `xgrammar.contrib.hf.LogitsProcessor`, for one row of a batch."""

    def __init__(self, processor: Any, row: int = 0) -> None:
        compiled = processor.compiled_grammars
        self.name, self._compiled = type(processor).__name__, compiled[row if len(compiled) > 1 else 0]

    def for_text(self, prompt: int, eos: Sequence[int]) -> GrammarMask:
        """See `PerText.for_text`. The stop tokens of the compiled grammar end a text; `eos` is ignored."""
        return GrammarMask(_xgrammar_matcher(self._compiled), prompt)


def is_xgrammar(processor: LogitsProcessor) -> bool:
    """Return whether a processor is an `xgrammar.contrib.hf.LogitsProcessor`."""
    cls = type(processor)
    return cls.__module__ == "xgrammar.contrib.hf" and cls.__name__ == "LogitsProcessor"


class GrammarMask(LogitsProcessor):
    """Sets the scores of tokens that a grammar does not allow to -inf. A prefix that does not match is not constrained.

    Args:
        matcher: at the start of a text.
        prompt: number of tokens before the constrained text.
    """

    def __init__(self, matcher: Matcher, prompt: int) -> None:
        self._prompt, self._start = prompt, matcher
        self._matchers: dict[tuple[int, ...], Matcher | None] = {}  # by generated tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return masked scores [R, V]."""
        return self.masked(input_ids.tolist(), scores)

    def masked(self, prefixes: Sequence[Sequence[int] | None], scores: Tensor) -> Tensor:
        """Return masked scores [R, V] after prefixes of any lengths. Rows with a prefix of None are not changed."""
        banned = np.zeros(scores.shape, dtype=bool)
        for row, prefix in enumerate(prefixes):
            if prefix is not None and (matcher := self._after(tuple(prefix[self._prompt :]))) is not None:
                allowed = matcher.allowed[: scores.shape[-1]]
                banned[row, : len(allowed)], banned[row, len(allowed) :] = (
                    ~allowed,
                    True,
                )  # the vocabulary may be padded
        return scores.masked_fill(torch.from_numpy(banned).to(scores.device), -torch.inf)

    def _after(self, generated: tuple[int, ...]) -> Matcher | None:
        cached = len(generated)
        while cached and generated[:cached] not in self._matchers:
            cached -= 1
        matcher = self._matchers[generated[:cached]] if cached else self._start
        for length in range(cached + 1, len(generated) + 1):
            matcher = None if matcher is None else matcher.after(generated[length - 1])
            self._matchers[generated[:length]] = matcher
        while len(self._matchers) > _MAX_MATCHERS:
            del self._matchers[next(iter(self._matchers))]
        return matcher


def _installed_backend(name: str) -> str:
    """Return the name of an installed backend; `auto` is the first one."""
    if name not in ("auto", *BACKENDS):
        raise InputError(f"backend: expected auto, {' or '.join(BACKENDS)}, got {name!r}")
    for backend in BACKENDS:
        if name in ("auto", backend) and importlib.util.find_spec(backend):
            return backend
    names, requirement = (" or ".join(BACKENDS), "specstop[grammar]") if name == "auto" else (name, name)
    raise InputError(f"structured output: expected {names} to be installed; python -m pip install '{requirement}'")


def _parse_llguidance(kind: str, source: str) -> Any:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if kind == "json-schema":
            grammar = LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": "[ \\n]?"})
        else:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(source) if "::=" in source else source)
    except Exception as error:  # the EBNF converter raises `Exception`
        raise _invalid(kind, str(error)) from None
    if fault := LLMatcher.validate_grammar(grammar):
        raise _invalid(kind, fault)
    return grammar


def _parse_xgrammar(kind: str, source: str) -> Any:
    import xgrammar

    try:
        if kind == "json-schema":
            return xgrammar.Grammar.from_json_schema(source, max_whitespace_cnt=1)
        return xgrammar.Grammar.from_ebnf(source) if "::=" in source else xgrammar.Grammar.from_lark(source)
    except RuntimeError as error:
        raise _invalid(kind, str(error)) from None


def _xgrammar_matcher(compiled: Any, possible: Sequence[bool] | None = None) -> Matcher:
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    possible = possible or [True] * compiled.tokenizer_info.vocab_size
    return Matcher(matcher, matcher.stop_token_ids, np.array(possible))


def _invalid(kind: str, fault: str) -> InputError:
    return InputError(f"{kind}: expected a valid and supported {kind}; {_one_line(fault)}")


def _one_line(text: str) -> str:
    """Return a library's error message as one line of at most 200 characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:200]
