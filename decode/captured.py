"""A cached model whose shapes never change, so that CUDA can record a call once and play it again.

Attention reads every slot of the cache under a mask as wide as the capacity; tokens, positions, slots and mask lie in fixed
buffers, one set for each number of tokens. Recording takes a GPU; without one the same buffers run step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .cache import CachedModel, backend_mask, window_layers
from .slots import SlotLayer, Slots

MOST_TOKENS = 64
"""Longest call that is recorded; prompts run as they are."""


@dataclass
class _Where:
    """The slots that the next states go to: shared by all layers, [n] int64."""

    slots: Tensor | None = None


class FixedLayer(SlotLayer):
    """Keys and values of one layer, written where `where` says; all slots are returned, used or not."""

    def __init__(self, slots: Slots, where: _Where) -> None:
        super().__init__(slots)
        self._where = where

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the states and return the whole buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None and self._where.slots is not None
        self.keys.index_copy_(2, self._where.slots, key_states)
        self.values.index_copy_(2, self._where.slots, value_states)
        return self.keys, self.values


@dataclass
class _Call:
    """The fixed buffers of calls with n tokens, and how to run them."""

    tokens: Tensor  # [1, n]
    positions: Tensor  # [1, n]
    slots: Tensor  # [n]
    mask: Tensor  # [1, 1, n, capacity] in the backend's form
    run: Callable[[], tuple[Tensor, Tensor | None]]


class CapturedModel(CachedModel):
    """A `CachedModel` for one stream with fixed shapes.

    Args:
        model, capacity, vocabulary, hidden: as of `CachedModel`; no sliding windows.
        record: record calls as CUDA graphs.
    """

    def __init__(
        self, model: PreTrainedModel, capacity: int, vocabulary: int, hidden: bool = False, record: bool = True
    ) -> None:
        super().__init__(model, capacity, vocabulary, hidden)
        self._maskless, self._record = False, record
        self._where = _Where()
        self._layers = [FixedLayer(self._slots, self._where) for _ in self._layers]
        self._cache = Cache(layers=list(self._layers))
        self._calls: dict[tuple[int, int], _Call] = {}
        self._hidden_value = backend_mask(torch.zeros((), dtype=torch.bool, device=model.device), model)

    def read(
        self, tokens: Tensor, rows: int = 0, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Append `tokens` [1, n] and return logits; see `CachedModel.read`."""
        start, count = self.length, tokens.shape[1]
        end = start + count
        if mask is None:
            at = torch.arange(end, device=self.model.device)
            mask = backend_mask((at <= at[start:, None])[None, None], self.model)
        call = self._calls.get((count, rows)) or self._buffers(count, rows)
        call.tokens.copy_(self._known(tokens))
        call.positions.copy_(self._positions[:, start:end] if positions is None else positions)
        call.slots.copy_(self._positions[0, start:end])
        call.mask[..., :end] = mask
        call.mask[..., end:] = self._hidden_value
        logits, states = call.run()
        for layer in self._layers:
            layer.length = end
        if states is not None:
            self.states = states.clone()
        return logits.clone()  # the buffers are written again by the next call of this size

    def _buffers(self, count: int, rows: int) -> _Call:
        """Return the buffers of calls with `count` tokens; short ones are kept, and recorded on CUDA."""
        device = self.model.device
        ids = torch.zeros(2, count, dtype=torch.int64, device=device)
        mask = self._hidden_value.expand(1, 1, count, self.capacity).clone()
        call = _Call(ids[:1], ids[1:], torch.arange(count, device=device), mask, lambda: self._forward(call, rows))
        if count <= MOST_TOKENS:
            self._calls[count, rows] = call
            if self._record and device.type == "cuda":
                self._recorded(call, rows)
        return call

    def _forward(self, call: _Call, rows: int) -> tuple[Tensor, Tensor | None]:
        self._where.slots = call.slots
        out = self.model(
            input_ids=call.tokens,
            attention_mask=call.mask,
            position_ids=call.positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=rows,
            output_hidden_states=self._hidden,
        )
        logits = self._scores(out.logits, rows or call.tokens.shape[1])
        return logits, out.hidden_states[-1] if self._hidden else None

    def _recorded(self, call: _Call, rows: int) -> None:
        """Record the call as a CUDA graph, on first use after its warm-up."""
        graph: torch.cuda.CUDAGraph | None = None
        out: tuple[Tensor, Tensor | None]
        warm_up = 2

        def run() -> tuple[Tensor, Tensor | None]:
            nonlocal graph, out, warm_up
            if warm_up:  # kernels are chosen and buffers allocated outside the record
                warm_up -= 1
                return self._forward(call, rows)
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = self._forward(call, rows)
            graph.replay()
            return out

        call.run = run


def open_cache(model: PreTrainedModel, capacity: int, vocabulary: int, hidden: bool = False) -> CachedModel:
    """Return the cached model for one stream: with fixed shapes on CUDA, where its calls are recorded."""
    if model.device.type == "cuda" and window_layers(model) is None:
        return CapturedModel(model, capacity, vocabulary, hidden)
    return CachedModel(model, capacity, vocabulary, hidden)
