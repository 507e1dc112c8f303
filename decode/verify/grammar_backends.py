"""Common interface to the matchers of xgrammar and llguidance: accept a token, roll back, compute the token mask."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...policies.contract import Array
from ...policies.errors import InputError
from ...policies.text import strict_loads

BACKENDS = ("llguidance", "xgrammar")
"""Supported backends, in the order of preference of `auto`."""


class Matcher(Protocol):
    """Incremental matcher of one text against a grammar.

    Attributes:
        ends: end-of-text token ids. They are allowed where the grammar is complete and are never accepted.
    """

    ends: frozenset[int]

    def accept(self, token: int) -> bool:
        """Append a token. Return False without a change of state if the grammar does not allow it."""

    def rollback(self, tokens: int) -> None:
        """Remove the last `tokens` tokens."""

    def mask(self) -> Array:
        """Return [W] uint32 with one bit per token, set if the token is allowed next."""


class LLGuidanceMatcher:
    """Matcher based on `llguidance.LLMatcher`."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self.ends, self._matcher = frozenset(ends), matcher

    def accept(self, token: int) -> bool:
        """See `Matcher.accept`."""
        return bool(self._matcher.try_consume_tokens([token]))

    def rollback(self, tokens: int) -> None:
        """See `Matcher.rollback`."""
        if tokens:
            self._matcher.rollback(tokens)

    def mask(self) -> Array:
        """See `Matcher.mask`."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():
            raise InputError(f"grammar: llguidance failed: {one_line(self._matcher.get_error())}; simplify the grammar")
        if not self._matcher.is_accepting():
            words = words.copy()
            for end in self.ends:  # an end token may also be an ordinary token that the grammar allows as text
                words[end >> 5] &= ~np.uint32(1 << (end & 31))
        return words


class XGrammarMatcher:
    """Matcher based on `xgrammar.GrammarMatcher`.

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
        """See `Matcher.accept`."""
        return token < len(self._possible) and bool(self._possible[token] and self._matcher.accept_token(token))

    def rollback(self, tokens: int) -> None:
        """See `Matcher.rollback`."""
        if tokens:
            self._matcher.rollback(tokens)

    def mask(self) -> Array:
        """See `Matcher.mask`."""
        self._matcher.fill_next_token_bitmask(self._bits)
        allowed: Array = self._bits[0].numpy().view(np.uint32) & self._words
        return allowed


def is_installed(name: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def choose_backend(name: str) -> str:
    """Return the name of an installed backend.

    Args:
        name: a name of `BACKENDS`, or `auto` for the first one that is installed.

    Raises:
        InputError: the name is unknown or the backend is not installed.
    """
    if name not in ("auto", *BACKENDS):
        raise InputError(f"backend: expected auto, {' or '.join(BACKENDS)}, got {name!r}")
    installed = [backend for backend in BACKENDS if name in ("auto", backend) and is_installed(backend)]
    if not installed:
        requirement = "specstop[grammar]" if name == "auto" else name
        raise InputError(
            f"structured output: expected {'llguidance or xgrammar' if name == 'auto' else name} to be installed; "
            f"python -m pip install '{requirement}'"
        )
    return installed[0]


Compile = Callable[[Sequence[int]], Callable[[], Matcher]]
"""Maps the end-of-text token ids to a factory of matchers."""


def compile_llguidance(kind: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Compile:
    """Parse a grammar with llguidance and return a function that compiles it.

    Args:
        kind: `json-schema` or `grammar` (Lark, or EBNF with `::=`).
        source: text of the schema or grammar.
        tokenizer: a fast tokenizer.

    Raises:
        InputError: the grammar is invalid or has unsupported features, or the tokenizer is not a fast tokenizer.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark
    from llguidance.hf import from_tokenizer

    try:
        if kind == "json-schema":
            grammar = LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": "[ \\n]?"})
        else:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(source) if "::=" in source else source)
    except Exception as error:  # the EBNF converter raises `Exception`
        raise invalid(kind, str(error)) from None
    if fault := LLMatcher.validate_grammar(grammar):
        raise invalid(kind, fault)

    def compile_for(ends: Sequence[int]) -> Callable[[], Matcher]:
        ends = [end for end in ends if end < len(tokenizer)]  # ids in the padding of the vocabulary are not tokens
        try:
            ll_tokenizer = from_tokenizer(tokenizer, eos_token=list(ends))  # type: ignore[arg-type]
        except ValueError as error:
            raise InputError(
                f"structured output: llguidance cannot read this tokenizer ({one_line(str(error))})"
            ) from None
        if fault := LLMatcher.validate_grammar(grammar, ll_tokenizer):
            raise invalid(kind, fault)
        template = LLMatcher(ll_tokenizer, grammar, log_level=0)
        return lambda: LLGuidanceMatcher(template.deep_copy(), ends)

    return compile_for


def compile_xgrammar(kind: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Compile:
    """Parse a grammar with xgrammar and return a function that compiles it; see `compile_llguidance`."""
    import xgrammar

    try:
        if kind == "json-schema":
            grammar = xgrammar.Grammar.from_json_schema(source, max_whitespace_cnt=1)
        elif "::=" in source:
            grammar = xgrammar.Grammar.from_ebnf(source)
        else:
            grammar = xgrammar.Grammar.from_lark(source)
    except RuntimeError as error:
        raise invalid(kind, str(error)) from None

    def compile_for(ends: Sequence[int]) -> Callable[[], Matcher]:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=list(ends))
        compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(grammar)
        banned = None
        if kind == "json-schema":
            # xgrammar 0.2.8 allows raw control characters in strings with `maxLength`. JSON does not.
            banned = np.array([any(byte < 32 for byte in token) for token in info.decoded_vocab])
        return lambda: XGrammarMatcher(compiled, banned)

    return compile_for


def check_json(schema: str) -> str:
    """Validate the text of a JSON schema and return it; `true` becomes an empty object.

    Raises:
        InputError: the text is not JSON, or neither an object nor `true`.
    """
    try:
        parsed = strict_loads(schema)
    except (ValueError, RecursionError) as error:
        raise InputError(f"json-schema: expected JSON; {one_line(str(error))}") from None
    if parsed is True:
        return "{}"
    if not isinstance(parsed, dict):
        raise InputError(f"json-schema: expected an object, got {one_line(json.dumps(parsed))}")
    return schema


def invalid(kind: str, fault: str) -> InputError:
    """Return the error for a grammar that cannot be compiled."""
    return InputError(f"{kind}: expected a valid and supported {kind}; {one_line(fault)}")


def one_line(text: str) -> str:
    """Return a library's error message as one line of at most 200 characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:200]
