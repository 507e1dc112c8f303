"""The draft model of an engine: loaded by itself, its target being the engine's, with a cache row for each request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...policies.errors import PairError
from ..models.cuda.graph import open_cache
from ..models.engine import choose_engine, speed_up
from ..models.loading import load_model, open_checkpoint
from ..models.packed import Part
from ..models.self_check import check_model
from ..models.view import READS_ALL, Reading

_LEAST = 512
"""Tokens of a row to begin with."""


def load_draft(name: str, device: torch.device, dtype: torch.dtype, vocabulary: int) -> tuple[PreTrainedModel, Reading]:
    """Return a draft model by itself, under the fastest engine that can run it, and how it can be read.

    Args:
        name: folder or hub name.
        device, dtype: of the model.
        vocabulary: tokens that the target scores.

    Raises:
        PairError: it cannot be loaded, or scores another vocabulary than the target.
    """
    checkpoint = open_checkpoint(name, "draft")
    own = int(checkpoint.config.get_text_config().vocab_size)
    if abs(own - vocabulary) >= 512:  # the same tokens, filled up to sizes of their own, differ by less
        raise PairError(
            f"draft: {name} scores {own} tokens, but the target {vocabulary}; choose a draft of the target's family"
        )
    model = load_model(checkpoint, device, dtype).eval()
    reading = check_model("draft", model)
    return speed_up(model, choose_engine(model), reading), reading


class ModelRows:
    """See `source.DraftRows`: a model and the texts it has read, a row of its cache for each.

    The cache grows with the longest text. What it held is read again then: that happens as often as a text doubles.

    Args:
        model: the draft.
        rows: of its cache.
        vocabulary: tokens that the target scores.
        reading: how the draft can be read.
    """

    def __init__(self, model: PreTrainedModel, rows: int, vocabulary: int, reading: Reading = READS_ALL) -> None:
        self._model, self._vocabulary, self._reading = model, vocabulary, reading
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._cache = open_cache(model, _LEAST, vocabulary, streams=rows, reading=reading)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], depth: int) -> Tensor:
        """See `DraftRows.read`."""
        for row, more in zip(rows, tokens, strict=True):
            self._texts[row].extend(more)
        longest = max(len(self._texts[row]) for row in rows)
        if self._cache.capacity < longest:
            # The new cache is empty: each row is read again when it is next asked for.
            size = 2 ** (longest - 1).bit_length()
            streams = len(self._texts)
            self._cache = open_cache(self._model, size, self._vocabulary, streams=streams, reading=self._reading)
        return self._cache.read_parts([Part(row, self._texts[row][self._cache.lengths[row] :], 1) for row in rows])

    def roll_back(self, row: int, length: int) -> None:
        """See `DraftRows.roll_back`."""
        del self._texts[row][length:]
        if self._cache.lengths[row] > length:
            self._cache.roll_back(length, row)
