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
from ...policies.files import strict_loads
from .processors import PerText

_MAX_MATCHERS = 256
"""Maximum number of cached matchers per text, more than one round requires."""


class Matcher:
    """A grammar after one prefix of a text.

    Args:
        matcher: `llguidance.LLMatcher`.
        ends: end-of-text token ids. They are allowed where the grammar is complete.
    """

    def __init__(self, matcher: Any, ends: Collection[int]) -> None:
        self.ends, self._matcher = frozenset(ends), matcher

    def after(self, token: int) -> Matcher | None:
        """Return the matcher after one more token; None if the grammar does not allow it or the text ends."""
        if token in self.ends:
            return None
        matcher = self._matcher.deep_copy()  # 2 us, less than a rollback
        return Matcher(matcher, self.ends) if matcher.try_consume_tokens([token]) else None

    @cached_property
    def allowed(self) -> Array:
        """[V or more] bool, tokens allowed next."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            fault = _one_line(self._matcher.get_error())
            raise InputError(f"grammar: llguidance failed: {fault}; simplify the grammar")
        allowed: Array = np.unpackbits(packed, bitorder="little").astype(bool)
        if not self._matcher.is_accepting():
            # An end token may also be an ordinary token that the grammar allows as text.
            allowed[list(self.ends)] = False
        return allowed


class Grammar(PerText):
    """A constraint for `SamplingParams(processors=(grammar,))` or `generate(logits_processor=[grammar])`.

    A text may end where the grammar is complete. The length limit may truncate it earlier; `matches` checks a text.

    Args:
        kind: `json-schema` or `grammar`.
        source: see `from_json_schema` and `from_text`.
        tokenizer: tokenizer of the target.

    Raises:
        InputError: the source is invalid or has features that llguidance does not support, or llguidance is not installed.
    """

    def __init__(self, kind: str, source: str, tokenizer: PreTrainedTokenizerBase) -> None:
        if not importlib.util.find_spec("llguidance"):
            raise InputError(
                "structured output: expected llguidance to be installed; python -m pip install 'specstop[grammar]'"
            )
        digest = hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
        self.name, self._kind, self._tokenizer = f"{kind} {digest}", kind, tokenizer
        self._grammar = _parse(kind, source)
        self._matchers: dict[tuple[int, ...], Matcher] = {}

    @classmethod
    def from_json_schema(cls, schema: str | Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Grammar:
        """Return the grammar of a JSON schema (text or parsed), with at most one space or line break between JSON tokens."""
        source = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            parsed = strict_loads(source)
        except (ValueError, RecursionError) as error:
            raise InputError(f"json-schema: expected JSON; {_one_line(str(error))}") from None
        if not isinstance(parsed, dict):
            raise InputError(f"json-schema: expected an object, got {_one_line(json.dumps(parsed))}")
        return cls("json-schema", source, tokenizer)

    @classmethod
    def from_text(cls, text: str, tokenizer: PreTrainedTokenizerBase) -> Grammar:
        """Return a context-free grammar, in Lark or the EBNF of llama.cpp (rules with `::=`, start symbol `root`)."""
        return cls("grammar", text, tokenizer)

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """Return the matcher at the start of a text.

        Raises:
            InputError: there is no end-of-text token, or llguidance does not support the tokenizer.
        """
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        # Ids in the padding of the vocabulary are not tokens.
        ends = tuple(sorted(end for end in eos if end < len(self._tokenizer)))
        if not ends:
            raise InputError(f"{self.name}: expected at least one end-of-text token, got none; set eos_token_id")
        if ends not in self._matchers:
            try:
                tokenizer = from_tokenizer(self._tokenizer, eos_token=list(ends))  # type: ignore[arg-type]
            except ValueError as error:
                fault = _one_line(str(error))
                raise InputError(f"structured output: llguidance cannot read this tokenizer ({fault})") from None
            if fault := LLMatcher.validate_grammar(self._grammar, tokenizer):
                raise _invalid(self._kind, fault)
            self._matchers[ends] = Matcher(LLMatcher(tokenizer, self._grammar, log_level=0), ends)
        return self._matchers[ends]

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
        allowed = np.ones(scores.shape, dtype=bool)
        for row, prefix in enumerate(prefixes):
            if prefix is not None and (matcher := self._after(tuple(prefix[self._prompt :]))) is not None:
                tokens = matcher.allowed[: scores.shape[-1]]
                allowed[row, : len(tokens)] = tokens
                allowed[row, len(tokens) :] = False  # the vocabulary may be padded
        return scores.masked_fill(torch.from_numpy(~allowed).to(scores.device), -torch.inf)

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


def _parse(kind: str, source: str) -> Any:
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


def _invalid(kind: str, fault: str) -> InputError:
    return InputError(f"{kind}: expected a valid and supported {kind}; {_one_line(fault)}")


def _one_line(text: str) -> str:
    """Return a library's error message as one line of at most 200 characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:200]
