"""Structured output: texts that match a JSON schema or a grammar, with any drafter, on chains and trees.

Target and draft logits receive the same masks, so candidates match the grammar too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
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

_MAX_MATCHERS = 1024
"""Maximum number of cached matchers per text, more than one round requires."""


class Matcher(ABC):
    """A grammar after one prefix of a text.

    Args:
        matcher: matcher of a grammar library.
        ends: end-of-text token ids. They are allowed where the grammar is complete.
    """

    def __init__(self, matcher: Any, ends: Collection[int]) -> None:
        self._matcher, self.ends = matcher, frozenset(ends)

    @cached_property
    def words(self) -> Array:
        """[W] uint32 with one bit per token, set if the token is allowed next."""
        return self._words()

    def allowed(self, vocabulary: int) -> Array:
        """Return [V] bool, whether each token is allowed next."""
        bits = np.unpackbits(self.words.view(np.uint8), bitorder="little")[:vocabulary]
        return np.pad(bits, (0, vocabulary - len(bits))).astype(bool)  # padding of the vocabulary is not allowed

    @abstractmethod
    def after(self, token: int) -> Matcher | None:
        """Return the matcher after one more token; None if the grammar does not allow it."""

    @abstractmethod
    def _words(self) -> Array: ...


class _LLGuidance(Matcher):
    def after(self, token: int) -> Matcher | None:
        if token in self.ends:
            return None
        matcher = self._matcher.deep_copy()  # 2 us
        return _LLGuidance(matcher, self.ends) if matcher.try_consume_tokens([token]) else None

    def _words(self) -> Array:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():
            raise InputError(
                f"grammar: llguidance failed: {_one_line(self._matcher.get_error())}; simplify the grammar"
            )
        if not self._matcher.is_accepting():
            words = words.copy()
            for end in self.ends:  # an end token may also be an ordinary token that the grammar allows as text
                words[end >> 5] &= ~np.uint32(1 << (end & 31))
        return words


class _XGrammar(Matcher):
    """
    Args:
        matcher: of xgrammar; its stop tokens end a text.
        possible: [V] bool, tokens that may be allowed.
    """

    def __init__(self, matcher: Any, possible: Array) -> None:
        super().__init__(matcher, matcher.stop_token_ids)
        self._possible = possible

    def after(self, token: int) -> Matcher | None:
        if token in self.ends or token >= len(self._possible) or not self._possible[token]:
            return None
        matcher = self._matcher.fork()
        return _XGrammar(matcher, self._possible) if matcher.accept_token(token) else None

    def _words(self) -> Array:
        import xgrammar

        bits = xgrammar.allocate_token_bitmask(1, len(self._possible))
        self._matcher.fill_next_token_bitmask(bits)
        possible = np.zeros(4 * bits.shape[1], dtype=np.uint8)  # xgrammar also sets bits beyond the vocabulary
        possible[: -(-len(self._possible) // 8)] = np.packbits(self._possible, bitorder="little")
        words: Array = bits[0].numpy().view(np.uint32) & possible.view(np.uint32)
        return words


Compile = Callable[[Sequence[int]], Matcher]
"""Returns the matcher at the start of a text for end-of-text token ids."""


class Grammar(PerText):
    """A constraint for `SamplingParams(processors=(grammar,))` or `generate(logits_processor=[grammar])`.

    A text may end where the grammar is complete. The length limit may truncate it earlier; `matches` checks a text.

    Args:
        name: used in headers.
        compile: see `Compile`.
    """

    def __init__(self, name: str, compile: Compile) -> None:
        self.name, self._compile = name, compile
        self._compiled: dict[tuple[int, ...], Matcher] = {}

    @classmethod
    def from_json_schema(
        cls, schema: str | Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, backend: str = "auto"
    ) -> Grammar:
        """Return the grammar of a JSON schema, with at most one space or line break between JSON tokens.

        Args:
            schema: JSON text or the parsed object.
            tokenizer: tokenizer of the target.
            backend: `llguidance`, `xgrammar`, or `auto`, which selects the first of these that is installed.

        Raises:
            InputError: the schema is invalid or has features that the backend does not support, or no backend is installed.
        """
        source = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            parsed = strict_loads(source)
        except (ValueError, RecursionError) as error:
            raise InputError(f"json-schema: expected JSON; {_one_line(str(error))}") from None
        if not isinstance(parsed, dict):
            raise InputError(f"json-schema: expected an object, got {_one_line(json.dumps(parsed))}")
        return cls._of("json-schema", source, tokenizer, backend)

    @classmethod
    def from_text(cls, text: str, tokenizer: PreTrainedTokenizerBase, backend: str = "auto") -> Grammar:
        """Return a context-free grammar.

        Args:
            text: grammar in the EBNF format of llama.cpp (rules with `::=`, start symbol `root`) or in Lark format.
            tokenizer, backend: see `from_json_schema`.

        Raises:
            InputError: see `from_json_schema`.
        """
        return cls._of("grammar", text, tokenizer, backend)

    @classmethod
    def _of(cls, kind: str, source: str, tokenizer: PreTrainedTokenizerBase, backend: str) -> Grammar:
        selected = _installed_backend(backend)
        compile_grammar = _compile_llguidance if selected == "llguidance" else _compile_xgrammar
        digest = hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
        return cls(f"{kind} {digest} ({selected})", compile_grammar(kind, source, tokenizer))

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """Return the matcher at the start of a text.

        Raises:
            InputError: there is no end-of-text token.
        """
        ends = tuple(sorted(eos))
        if not ends:
            raise InputError(f"{self.name}: expected at least one end-of-text token, got none; set eos_token_id")
        if ends not in self._compiled:
            self._compiled[ends] = self._compile(ends)
        return self._compiled[ends]

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
        return matcher is not None and bool(matcher.allowed(max(matcher.ends) + 1)[min(matcher.ends)])


class XGrammarProcessor(PerText):
    """Constraint with the compiled grammar of an `xgrammar.contrib.hf.LogitsProcessor`.

    Args:
        processor: xgrammar's processor; it is not modified.
        row: batch index.
    """

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
        self._matchers: dict[tuple[int, ...], Matcher | None] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return masked scores [R, V]."""
        return self.masked(input_ids.tolist(), scores)

    def masked(self, prefixes: Sequence[Sequence[int] | None], scores: Tensor) -> Tensor:
        """Return masked scores [R, V] after prefixes of any lengths. Rows with a prefix of None are not changed."""
        banned = np.zeros(scores.shape, dtype=bool)
        for row, prefix in enumerate(prefixes):
            if prefix is not None and (matcher := self._after(tuple(prefix[self._prompt :]))) is not None:
                banned[row] = ~matcher.allowed(scores.shape[-1])
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


def _compile_llguidance(kind: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Compile:
    """Parse a JSON schema or a grammar (Lark, or EBNF with `::=`) with llguidance."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark
    from llguidance.hf import from_tokenizer

    try:
        if kind == "json-schema":
            grammar = LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": "[ \\n]?"})
        else:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(source) if "::=" in source else source)
    except Exception as error:  # the EBNF converter raises `Exception`
        raise _invalid(kind, str(error)) from None
    if fault := LLMatcher.validate_grammar(grammar):
        raise _invalid(kind, fault)

    def compile_for(ends: Sequence[int]) -> Matcher:
        ends = [end for end in ends if end < len(tokenizer)]  # ids in the padding of the vocabulary are not tokens
        try:
            ll_tokenizer = from_tokenizer(tokenizer, eos_token=list(ends))  # type: ignore[arg-type]
        except ValueError as error:
            raise InputError(
                f"structured output: llguidance cannot read this tokenizer ({_one_line(str(error))})"
            ) from None
        if fault := LLMatcher.validate_grammar(grammar, ll_tokenizer):
            raise _invalid(kind, fault)
        return _LLGuidance(LLMatcher(ll_tokenizer, grammar, log_level=0), ends)

    return compile_for


def _compile_xgrammar(kind: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Compile:
    """Parse a JSON schema or a grammar with xgrammar."""
    import xgrammar

    try:
        if kind == "json-schema":
            grammar = xgrammar.Grammar.from_json_schema(source, max_whitespace_cnt=1)
        else:
            grammar = xgrammar.Grammar.from_ebnf(source) if "::=" in source else xgrammar.Grammar.from_lark(source)
    except RuntimeError as error:
        raise _invalid(kind, str(error)) from None

    def compile_for(ends: Sequence[int]) -> Matcher:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=list(ends))
        compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(grammar)
        # xgrammar 0.2.8 allows raw control characters in JSON strings with `maxLength`. JSON does not.
        return _xgrammar_matcher(compiled, 32 if kind == "json-schema" else 0)

    return compile_for


def _xgrammar_matcher(compiled: Any, min_byte: int = 0) -> Matcher:
    """Return the matcher of a compiled grammar, without tokens that contain bytes below `min_byte`."""
    import xgrammar

    vocabulary = compiled.tokenizer_info.decoded_vocab
    possible = (
        np.array([all(byte >= min_byte for byte in token) for token in vocabulary])
        if min_byte
        else (np.ones(compiled.tokenizer_info.vocab_size, dtype=bool))
    )
    return _XGrammar(xgrammar.GrammarMatcher(compiled), possible)


def _invalid(kind: str, fault: str) -> InputError:
    return InputError(f"{kind}: expected a valid and supported {kind}; {_one_line(fault)}")


def _one_line(text: str) -> str:
    """Return a library's error message as one line of at most 200 characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:200]
