"""`Sampler`: applies logits processors to rows of logits, each with its prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as library

from ...policies.errors import InputError
from .grammar import GrammarMask
from .sampling import WARPERS

_WARPERS = tuple(WARPERS.values())
"""Processors that remove tokens, not the same ones for draft and target."""

Prefixes = Callable[[], Sequence[Sequence[int] | None]]
"""Returns the token ids before each row; None for rows after an end of text, which are not processed."""


class Sampler:
    """Processes raw logits of one text; the result is the logits of the sampling distribution (or of the greedy choice).

    Args:
        processors: from `SamplingParams.build`; if empty, the logits are divided by the temperature.
        temperature: of the text.
        padding: tokens left of every prefix.

    Attributes:
        reads_prefix: whether there are processors.
        reads_tokens: whether a processor reads the tokens of prefixes.
        has_grammar: whether there is a grammar, so that no token may remain.
        untruncated: [R, V] the latest logits before truncation, if there is a truncating processor.
    """

    def __init__(self, processors: LogitsProcessorList, temperature: float, padding: Sequence[int] = ()) -> None:
        self.padding = list(padding)
        self.reads_prefix = len(processors) > 0
        self.has_grammar = any(isinstance(processor, GrammarMask) for processor in processors)
        self.untruncated: Tensor | None = None
        # A grammar that comes first masks rows of any length in one call.
        self._grammar = processors[0] if processors and isinstance(processors[0], GrammarMask) else None
        self._processors = LogitsProcessorList(processors[1:] if self._grammar is not None else processors)
        self._temperature = temperature
        truncating = (at for at, processor in enumerate(self._processors) if isinstance(processor, _WARPERS))
        self._first_truncating = next(truncating, len(self._processors))
        self._by_length = not all(type(one) in (*_WARPERS, library.TemperatureLogitsWarper) for one in self._processors)
        self.reads_tokens = self._by_length or self._grammar is not None

    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """Return [R, V] processed logits. The raw logits [R, V] are not modified."""
        if not self.reads_prefix:
            return logits if self._temperature in (0.0, 1.0) else logits / self._temperature
        texts: list[list[int] | None] = []
        if self.reads_tokens:
            texts = [None if prefix is None else [*self.padding, *prefix] for prefix in prefixes()]
        if self._grammar is not None:
            logits = self._grammar.masked(texts, logits)
        if self._first_truncating < len(self._processors):
            self.untruncated = torch.empty_like(logits)  # filled by `_process`
        if not self._by_length:
            empty = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
            return self._process(empty, logits, list(range(len(logits))))
        out = logits.clone()
        # Processors take a rectangle of ids: rows of one length are processed together.
        for length in sorted({len(text) for text in texts if text is not None}):
            rows = [row for row, text in enumerate(texts) if text is not None and len(text) == length]
            ids = torch.tensor([texts[row] for row in rows], device=logits.device)
            out[rows] = self._process(ids, logits[rows], rows)
        return out

    def _process(self, ids: Tensor, logits: Tensor, rows: Sequence[int]) -> Tensor:
        for at, processor in enumerate(self._processors):
            if at == self._first_truncating and self.untruncated is not None:
                self.untruncated[rows] = logits
            if isinstance(processor, library.PrefixConstrainedLogitsProcessor):  # for it, each row is another text
                logits = torch.cat([processor(i[None], row[None]) for i, row in zip(ids, logits, strict=True)])
            else:
                logits = processor(ids, logits)
        return logits


def require_token(scores: Tensor) -> None:
    """Check that processed logits [..., V] allow a token, which a grammar with other options may not.

    Raises:
        InputError: all logits of a row are -inf.
    """
    if not bool((scores.amax(-1) > -torch.inf).all()):
        raise InputError(
            "the grammar and the other sampling options leave no token after a text: expected at least one; loosen the "
            "grammar, min_new_tokens, no_repeat_ngram or the logits processors"
        )
