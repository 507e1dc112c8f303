"""The draft model of an engine: loaded by itself, its target being the engine's, with a cache row for each request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...policies.errors import PairError
from ..models.cache import CachedModel
from ..models.cuda_graph import open_cache
from ..models.engine import choose_engine, speed_up
from ..models.loading import load_model, open_checkpoint
from ..models.transfer import upload

_LEAST = 256
"""Tokens of a row to begin with; each next size is twice the last."""


def load_draft(name: str, device: torch.device, dtype: torch.dtype, vocabulary: int) -> PreTrainedModel:
    """Return a draft model by itself, under the fastest engine that can run it.

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
    return speed_up(model, choose_engine(model))


class ModelRows:
    """See `source.DraftRows`: a model and the texts it has read.

    Args:
        model: the draft.
        rows: of its cache.
        vocabulary: tokens that the target scores.
    """

    def __init__(self, model: PreTrainedModel, rows: int, vocabulary: int) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._caches: list[CachedModel | None] = [None] * rows
        self._read: list[list[int]] = [[] for _ in range(rows)]

    @torch.inference_mode()
    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See `DraftRows.read`."""
        return torch.cat([self._one(row, list(more)) for row, more in zip(rows, tokens, strict=True)])

    def _one(self, row: int, more: list[int]) -> Tensor:
        read, cache = self._read[row], self._caches[row]
        read += more
        if cache is None or cache.capacity < len(read):
            size = max(_LEAST, 2 ** (len(read) - 1).bit_length())
            self._caches[row] = cache = open_cache(self._model, size, self._vocabulary)
            more = read
        return cache.read(upload([more], torch.device(self._model.device)), rows=1)[0]

    def roll_back(self, row: int, length: int) -> None:
        """See `DraftRows.roll_back`."""
        cache = self._caches[row]
        if cache is not None and cache.length > length:
            cache.roll_back(length)
            del self._read[row][length:]
