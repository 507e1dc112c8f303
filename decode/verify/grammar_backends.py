"""Matchers of xgrammar and llguidance in one form: accept a token, roll back, say which tokens may come next."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...policies.contract import Array
from ...policies.errors import InputError
from ...policies.files.json_text import strict_loads

BACKENDS = ("llguidance", "xgrammar")
"""In the order in which `auto` tries them."""


class Matcher(Protocol):
    """Follows one text.

    Attributes:
        ends: ids that end a text; they are never accepted, and allowed where the grammar is complete.
    """

    ends: frozenset[int]

    def accept(self, token: int) -> bool:
        """Append a token; False, with nothing changed, if the grammar does not allow it."""

    def rollback(self, tokens: int) -> None:
        """Remove so many of the last tokens."""

    def mask(self) -> Array:
        """Return [W] uint32, a bit for each token: whether it may come next."""


class LLGuidanceMatcher:
    """llguidance's `LLMatcher`."""

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
            raise InputError(
                f"grammar: llguidance gave up: {one_line(self._matcher.get_error())}; simplify the grammar"
            )
        if not self._matcher.is_accepting():
            words = words.copy()
            for end in self.ends:  # one may be an ordinary token, which the grammar allows as text
                words[end >> 5] &= ~np.uint32(1 << (end & 31))
        return words


class XGrammarMatcher:
    """xgrammar's `GrammarMatcher`.

    Args:
        compiled: its grammar.
        banned: [V] bool, tokens that the grammar allows by mistake.
    """

    def __init__(self, compiled: Any, banned: Array | None = None) -> None:
        import xgrammar

        size = compiled.tokenizer_info.vocab_size
        self._possible = np.ones(size, dtype=bool) if banned is None else ~banned
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, size)
        # Bits beyond the vocabulary are set, so padding would be allowed.
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
        return self._bits[0].numpy().view(np.uint32) & self._words


def is_installed(name: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def choose_backend(name: str) -> str:
    """Return the backend that is used.

    Raises:
        InputError: an unknown one, or it is not installed.
    """
    if name not in ("auto", *BACKENDS):
        raise InputError(f"backend: expected auto, {' or '.join(BACKENDS)}, got {name!r}")
    installed = [one for one in BACKENDS if name in ("auto", one) and is_installed(one)]
    if not installed:
        wanted = "specstop[grammar]" if name == "auto" else name
        raise InputError(
            f"structured output: expected {'llguidance or xgrammar' if name == 'auto' else name} to be installed; "
            f"python -m pip install '{wanted}'"
        )
    return installed[0]


Compile = Callable[[Sequence[int]], Callable[[], Matcher]]
"""From the ids that end a text to what makes matchers."""


def compile_llguidance(kind: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Compile:
    """Return what compiles a grammar with llguidance.

    Args:
        kind: `json-schema` or `grammar` (Lark, or EBNF with `::=`).
        source: its text.
        tokenizer: a fast one.

    Raises:
        InputError: the grammar is invalid or has features that are not supported, or the tokenizer is not a fast one.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark
    from llguidance.hf import from_tokenizer

    try:
        if kind == "json-schema":
            grammar = LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": "[ \\n]?"})
        else:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(source) if "::=" in source else source)
    except Exception as error:  # the converter of EBNF raises bare ones
        raise invalid(kind, str(error)) from None
    if fault := LLMatcher.validate_grammar(grammar):
        raise invalid(kind, fault)

    def compiled(ends: Sequence[int]) -> Callable[[], Matcher]:
        ends = [end for end in ends if end < len(tokenizer)]  # padding ends no text
        try:
            known = from_tokenizer(tokenizer, eos_token=list(ends))  # type: ignore[arg-type]
        except ValueError as error:
            raise InputError(
                f"structured output: llguidance cannot read this tokenizer ({one_line(str(error))})"
            ) from None
        if fault := LLMatcher.validate_grammar(grammar, known):
            raise invalid(kind, fault)
        first = LLMatcher(known, grammar, log_level=0)
        return lambda: LLGuidanceMatcher(first.deep_copy(), ends)

    return compiled


def compile_xgrammar(kind: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Compile:
    """Return what compiles a grammar with xgrammar; see `compile_llguidance`."""
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

    def compiled(ends: Sequence[int]) -> Callable[[], Matcher]:
        known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=list(ends))
        made = xgrammar.GrammarCompiler(known, max_threads=1).compile_grammar(grammar)
        banned = None
        if kind == "json-schema":
            # Strings with `maxLength` may hold raw control characters, which JSON does not allow (xgrammar 0.2.8).
            banned = np.array([any(byte < 32 for byte in token) for token in known.decoded_vocab])
        return lambda: XGrammarMatcher(made, banned)

    return compiled


def check_json(schema: str) -> str:
    """Return the text of a JSON schema, which is an object.

    Raises:
        InputError: it is not JSON, or neither an object nor `true`.
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
    """Return the error of a grammar that cannot be used."""
    return InputError(f"{kind}: expected one that the library can compile; {one_line(fault)}")


def one_line(text: str) -> str:
    """Return a message of a library on one line, cut where it is long."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:200]
