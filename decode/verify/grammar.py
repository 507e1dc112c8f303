"""Structured output: a JSON schema or a grammar that every text obeys, with any drafter, on chains and trees.

Target and draft rows get the same masks, so candidates obey the grammar too. A matcher follows the text by rolling back
and accepting tokens from one prefix to the next; it never parses a text from its start again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from ...policies.contract import Array
from ...policies.errors import InputError
from .grammar_backends import (
    Compile,
    Matcher,
    XGrammarMatcher,
    check_json,
    choose_backend,
    compile_llguidance,
    compile_xgrammar,
)
from .processors import PerText

_MOST_MASKS = 1024
"""Masks that are kept of one text: those of a round and some more."""


class Grammar(PerText):
    """A constraint for `Shaping(processors=(grammar,))` or `generate(logits_processor=[grammar])`.

    A text may end where the grammar is complete. The length limit may cut it before; `matches` tells.

    Args:
        name: as in headers.
        compile: from the ids that end a text to what makes matchers.
    """

    def __init__(self, name: str, compile: Compile) -> None:
        self.name, self._compile = name, compile
        self._compiled: dict[tuple[int, ...], Callable[[], Matcher]] = {}

    @classmethod
    def from_json_schema(
        cls, schema: str | Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, backend: str = "auto"
    ) -> Grammar:
        """Return the grammar of the JSON values that a schema allows, with at most one space or line break between tokens.

        Args:
            schema: its text, or the parsed object.
            tokenizer: of the target.
            backend: `llguidance`, `xgrammar`, or `auto`, the first of them that is installed.

        Raises:
            InputError: the schema is invalid or has features that the backend does not support, or no backend is installed.
        """
        source = schema if isinstance(schema, str) else json.dumps(schema)
        return cls._of("json-schema", check_json(source), tokenizer, backend)

    @classmethod
    def from_text(cls, text: str, tokenizer: PreTrainedTokenizerBase, backend: str = "auto") -> Grammar:
        """Return a context-free grammar: EBNF as of llama.cpp, whose rules have `::=` and begin at `root`, or Lark.

        Args:
            text: of the grammar.
            tokenizer, backend: see `from_json_schema`.

        Raises:
            InputError: see `from_json_schema`.
        """
        return cls._of("grammar", text, tokenizer, backend)

    @classmethod
    def _of(cls, kind: str, source: str, tokenizer: PreTrainedTokenizerBase, backend: str) -> Grammar:
        chosen = choose_backend(backend)
        compiling = compile_llguidance if chosen == "llguidance" else compile_xgrammar
        digest = hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
        return cls(f"{kind} {digest} ({chosen})", compiling(kind, source, tokenizer))

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """Return a fresh matcher.

        Args:
            eos: ids that end a text.

        Raises:
            InputError: there are none, so that no text could end.
        """
        ends = tuple(sorted(eos))
        if not ends:
            raise InputError(f"{self.name}: expected an end-of-text token, which ends the text; set eos_token_id")
        if ends not in self._compiled:
            self._compiled[ends] = self._compile(ends)
        return self._compiled[ends]()

    def for_text(self, prompt: int, eos: Sequence[int]) -> GrammarMask:
        """See `PerText.for_text`."""
        return GrammarMask(lambda: self.matcher(eos), prompt)

    def matches(self, tokens: Sequence[int], eos: Sequence[int]) -> bool:
        """Return whether generated tokens are a complete text of the grammar, with or without the end-of-text token."""
        matcher = self.matcher(eos)
        text = list(tokens[:-1] if tokens and tokens[-1] in matcher.ends else tokens)
        return all(map(matcher.accept, text)) and bool(
            allowed(matcher.mask(), max(matcher.ends) + 1)[min(matcher.ends)]
        )


class XGrammarProcessor(PerText):
    """xgrammar's own processor for transformers, re-created from its compiled grammar.

    Args:
        processor: xgrammar's; it is not changed.
        row: of the batch.
    """

    def __init__(self, processor: Any, row: int = 0) -> None:
        compiled = processor.compiled_grammars
        self.name, self._compiled = type(processor).__name__, compiled[row if len(compiled) > 1 else 0]

    def for_text(self, prompt: int, eos: Sequence[int]) -> GrammarMask:
        """See `PerText.for_text`. A text ends with the grammar's own stop tokens."""
        return GrammarMask(lambda: XGrammarMatcher(self._compiled), prompt)


def is_xgrammar(processor: LogitsProcessor) -> bool:
    """Whether it is xgrammar's own processor for transformers."""
    kind = type(processor)
    return kind.__module__ == "xgrammar.contrib.hf" and kind.__name__ == "LogitsProcessor"


class _Follower:
    """A matcher at some prefix of a text, and the masks of the prefixes that it has been at."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._accepted: tuple[int, ...] = ()
        self._masks: dict[tuple[int, ...], Array | None] = {}

    def mask(self, generated: tuple[int, ...]) -> Array | None:
        """Return which tokens may come next; None after a text that does not obey, which no accepted token follows."""
        if generated not in self._masks:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            self._masks[generated] = self._matcher.mask() if self._follow(generated) else None
        return self._masks[generated]

    def _follow(self, generated: tuple[int, ...]) -> bool:
        """Bring the matcher to a prefix, up to the end of the text if it has one; return whether it obeys."""
        accepted = self._accepted
        common = len(accepted)
        if generated[:common] != accepted:
            pairs = zip(accepted, generated, strict=False)
            common = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(accepted), len(generated)))
        self._matcher.rollback(len(accepted) - common)
        end, obeys = common, True
        while end < len(generated) and generated[end] not in self._matcher.ends:
            if not (obeys := self._matcher.accept(generated[end])):
                break
            end += 1
        self._accepted = generated[:end]
        return obeys


class GrammarMask(LogitsProcessor):
    """Sets the scores of tokens that a grammar does not allow to -inf; a function of (input_ids, scores).

    Args:
        matcher: makes fresh matchers.
        prompt: length of what stands before the constrained text.
    """

    def __init__(self, matcher: Callable[[], Matcher], prompt: int) -> None:
        self._matcher, self._prompt = matcher, prompt
        self._followers = [_Follower(matcher())]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return [R, V], as transformers calls it: each row is a text of its own."""
        while len(self._followers) < len(input_ids):
            self._followers.append(_Follower(self._matcher()))
        return self._masked(input_ids.tolist(), scores, self._followers)

    def masked(self, prefixes: Sequence[Sequence[int] | None], scores: Tensor) -> Tensor:
        """Return [R, V], rows after prefixes of one text; those of None stay as they are."""
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
    """Return [V] bool from the bits of a mask; tokens beyond them, as padded vocabularies have them, are not allowed."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocabulary]
    return np.pad(bits, (0, vocabulary - len(bits))).astype(bool)
