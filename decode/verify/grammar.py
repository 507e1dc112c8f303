"""Structured output: texts that match a JSON schema or a grammar, with any drafter, on chains and trees.

Target and draft logits receive the same masks, so candidates match the grammar too. A matcher moves from one prefix to the
next by rolling back and accepting tokens. It never parses a text from the start again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
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

_MOST_MASKS = 1024
"""Maximum number of cached masks per text, more than one round requires."""


class LLGuidanceMatcher:
    """Incremental matcher of one text, based on `llguidance.LLMatcher`.

    Attributes:
        ends: end-of-text token ids. They are allowed where the grammar is complete and are never accepted.
    """

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self.ends, self._matcher = frozenset(ends), matcher

    def accept(self, token: int) -> bool:
        """Append a token. Return False without a change of state if the grammar does not allow it."""
        return bool(self._matcher.try_consume_tokens([token]))

    def rollback(self, tokens: int) -> None:
        """Remove the last `tokens` tokens."""
        if tokens:
            self._matcher.rollback(tokens)

    def mask(self) -> Array:
        """Return [W] uint32 with one bit per token, set if the token is allowed next."""
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


class XGrammarMatcher:
    """Like `LLGuidanceMatcher`, based on `xgrammar.GrammarMatcher`.

    Args:
        compiled: compiled grammar.
        banned: [V] bool, tokens that xgrammar allows incorrectly.
    """

    def __init__(self, compiled: Any, banned: Array | None = None) -> None:
        import xgrammar

        size = compiled.tokenizer_info.vocab_size
        self._possible = np.ones(size, dtype=bool) if banned is None else ~banned
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, size)
        # xgrammar sets the bits beyond the vocabulary. They are cleared here, otherwise padding would be allowed.
        packed = np.zeros(4 * self._bits.shape[1], dtype=np.uint8)
        packed[: -(-size // 8)] = np.packbits(self._possible, bitorder="little")
        self._words = packed.view(np.uint32)
        self.ends = frozenset(self._matcher.stop_token_ids)

    def accept(self, token: int) -> bool:
        """See `LLGuidanceMatcher.accept`."""
        return token < len(self._possible) and bool(self._possible[token] and self._matcher.accept_token(token))

    def rollback(self, tokens: int) -> None:
        """See `LLGuidanceMatcher.rollback`."""
        if tokens:
            self._matcher.rollback(tokens)

    def mask(self) -> Array:
        """See `LLGuidanceMatcher.mask`."""
        self._matcher.fill_next_token_bitmask(self._bits)
        allowed: Array = self._bits[0].numpy().view(np.uint32) & self._words
        return allowed


Matcher = LLGuidanceMatcher | XGrammarMatcher


class Grammar(PerText):
    """A constraint for `Shaping(processors=(grammar,))` or `generate(logits_processor=[grammar])`.

    A text may end where the grammar is complete. The length limit may truncate it earlier; `matches` checks a text.

    Args:
        name: used in headers.
        compile: maps the end-of-text token ids to a factory of matchers.
    """

    def __init__(self, name: str, compile: Compile) -> None:
        self.name, self._compile = name, compile
        self._compiled: dict[tuple[int, ...], Callable[[], Matcher]] = {}

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
        return cls._of("json-schema", _check_json(source), tokenizer, backend)

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
        """Return a matcher at the start of a text.

        Args:
            eos: end-of-text token ids.

        Raises:
            InputError: `eos` is empty.
        """
        ends = tuple(sorted(eos))
        if not ends:
            raise InputError(f"{self.name}: expected at least one end-of-text token, got none; set eos_token_id")
        if ends not in self._compiled:
            self._compiled[ends] = self._compile(ends)
        return self._compiled[ends]()

    def for_text(self, prompt: int, eos: Sequence[int]) -> GrammarMask:
        """See `PerText.for_text`."""
        return GrammarMask(lambda: self.matcher(eos), prompt)

    def matches(self, tokens: Sequence[int], eos: Sequence[int]) -> bool:
        """Return whether generated tokens form a complete text of the grammar; the end-of-text token is optional."""
        matcher = self.matcher(eos)
        text = list(tokens[:-1] if tokens and tokens[-1] in matcher.ends else tokens)
        return all(map(matcher.accept, text)) and bool(
            allowed(matcher.mask(), max(matcher.ends) + 1)[min(matcher.ends)]
        )


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
        return GrammarMask(lambda: XGrammarMatcher(self._compiled), prompt)


def is_xgrammar(processor: LogitsProcessor) -> bool:
    """Return whether a processor is an `xgrammar.contrib.hf.LogitsProcessor`."""
    cls = type(processor)
    return cls.__module__ == "xgrammar.contrib.hf" and cls.__name__ == "LogitsProcessor"


class _Follower:
    """A matcher at the current prefix of a text, with a cache of the masks of earlier prefixes."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._accepted: tuple[int, ...] = ()
        self._masks: dict[tuple[int, ...], Array | None] = {}

    def mask(self, generated: tuple[int, ...]) -> Array | None:
        """Return the mask of allowed next tokens, or None if the prefix does not match the grammar."""
        if generated not in self._masks:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            self._masks[generated] = self._matcher.mask() if self._follow(generated) else None
        return self._masks[generated]

    def _follow(self, generated: tuple[int, ...]) -> bool:
        """Move the matcher to a prefix, at most to the first end-of-text token; return whether the prefix matches."""
        accepted = self._accepted
        common = len(accepted)
        if generated[:common] != accepted:
            pairs = zip(accepted, generated, strict=False)
            common = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(accepted), len(generated)))
        self._matcher.rollback(len(accepted) - common)
        end, matches = common, True
        while end < len(generated) and generated[end] not in self._matcher.ends:
            if not (matches := self._matcher.accept(generated[end])):
                break
            end += 1
        self._accepted = generated[:end]
        return matches


class GrammarMask(LogitsProcessor):
    """Logits processor that sets the scores of tokens that a grammar does not allow to -inf.

    The result is a function of (input_ids, scores).

    Args:
        matcher: factory of matchers at the start of a text.
        prompt: number of tokens before the constrained text.
    """

    def __init__(self, matcher: Callable[[], Matcher], prompt: int) -> None:
        self._matcher, self._prompt = matcher, prompt
        self._followers = [_Follower(matcher())]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return masked scores [R, V]. As in transformers, each row is a separate text."""
        while len(self._followers) < len(input_ids):
            self._followers.append(_Follower(self._matcher()))
        return self._masked(input_ids.tolist(), scores, self._followers)

    def masked(self, prefixes: Sequence[Sequence[int] | None], scores: Tensor) -> Tensor:
        """Return masked scores [R, V] of prefixes of one text. Rows with a prefix of None are not changed."""
        return self._masked(prefixes, scores, self._followers[:1] * len(prefixes))

    def _masked(
        self, prefixes: Sequence[Sequence[int] | None], scores: Tensor, followers: Sequence[_Follower]
    ) -> Tensor:
        banned = np.zeros(scores.shape, dtype=bool)
        for row, (prefix, follower) in enumerate(zip(prefixes, followers, strict=False)):
            if prefix is not None and (words := follower.mask(tuple(prefix[self._prompt :]))) is not None:
                banned[row] = ~allowed(words, scores.shape[-1])
        return scores.masked_fill(torch.from_numpy(banned).to(scores.device), -torch.inf)


def allowed(words: Array, vocabulary: int) -> Array:
    """Return a mask as bool [V]. Tokens beyond the last bit, such as padding of the vocabulary, are not allowed."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocabulary]
    return np.pad(bits, (0, vocabulary - len(bits))).astype(bool)


def _installed_backend(name: str) -> str:
    """Return the name of an installed backend; `auto` is the first one."""
    if name not in ("auto", *BACKENDS):
        raise InputError(f"backend: expected auto, {' or '.join(BACKENDS)}, got {name!r}")
    installed = [backend for backend in BACKENDS if name in ("auto", backend) and importlib.util.find_spec(backend)]
    if not installed:
        requirement = "specstop[grammar]" if name == "auto" else name
        raise InputError(
            f"structured output: expected {'llguidance or xgrammar' if name == 'auto' else name} to be installed; "
            f"python -m pip install '{requirement}'"
        )
    return installed[0]


Compile = Callable[[Sequence[int]], Callable[[], Matcher]]
"""Maps the end-of-text token ids to a factory of matchers."""


def _compile_llguidance(kind: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Compile:
    """Parse a JSON schema or a grammar (Lark, or EBNF with `::=`) with llguidance; return a function that compiles it."""
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

    def compile_for(ends: Sequence[int]) -> Callable[[], Matcher]:
        ends = [end for end in ends if end < len(tokenizer)]  # ids in the padding of the vocabulary are not tokens
        try:
            ll_tokenizer = from_tokenizer(tokenizer, eos_token=list(ends))  # type: ignore[arg-type]
        except ValueError as error:
            raise InputError(
                f"structured output: llguidance cannot read this tokenizer ({_one_line(str(error))})"
            ) from None
        if fault := LLMatcher.validate_grammar(grammar, ll_tokenizer):
            raise _invalid(kind, fault)
        template = LLMatcher(ll_tokenizer, grammar, log_level=0)
        return lambda: LLGuidanceMatcher(template.deep_copy(), ends)

    return compile_for


def _compile_xgrammar(kind: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Compile:
    """Parse a grammar with xgrammar and return a function that compiles it; see `_compile_llguidance`."""
    import xgrammar

    try:
        if kind == "json-schema":
            grammar = xgrammar.Grammar.from_json_schema(source, max_whitespace_cnt=1)
        elif "::=" in source:
            grammar = xgrammar.Grammar.from_ebnf(source)
        else:
            grammar = xgrammar.Grammar.from_lark(source)
    except RuntimeError as error:
        raise _invalid(kind, str(error)) from None

    def compile_for(ends: Sequence[int]) -> Callable[[], Matcher]:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=list(ends))
        compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(grammar)
        banned = None
        if kind == "json-schema":
            # xgrammar 0.2.8 allows raw control characters in strings with `maxLength`. JSON does not.
            banned = np.array([any(byte < 32 for byte in token) for token in info.decoded_vocab])
        return lambda: XGrammarMatcher(compiled, banned)

    return compile_for


def _check_json(schema: str) -> str:
    """Return the validated text of a JSON schema; `true` becomes an empty object."""
    try:
        parsed = strict_loads(schema)
    except (ValueError, RecursionError) as error:
        raise InputError(f"json-schema: expected JSON; {_one_line(str(error))}") from None
    if parsed is True:
        return "{}"
    if not isinstance(parsed, dict):
        raise InputError(f"json-schema: expected an object, got {_one_line(json.dumps(parsed))}")
    return schema


def _invalid(kind: str, fault: str) -> InputError:
    """Return the error for a grammar that cannot be compiled."""
    return InputError(f"{kind}: expected a valid and supported {kind}; {_one_line(fault)}")


def _one_line(text: str) -> str:
    """Return a library's error message as one line of at most 200 characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:200]
