"""Where a model keeps the keys and values of what it has read: slots in preallocated buffers, which can be moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .transfer import upload


class Slots:
    """Buffers of `capacity` slots, keys and values of many layers side by side: a move is two operations for all of them.

    Args:
        capacity: slots of a buffer.
        together: layers that share memory.
    """

    def __init__(self, capacity: int, together: int) -> None:
        self.capacity, self._together = capacity, together
        self._shared: list[Tensor] = []  # each [buffers, B, heads, capacity, width]
        self._free: dict[Any, list[Tensor]] = {}

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return two buffers [B, heads, capacity, width] for states [B, heads, n, width] of a layer."""
        if keys.shape == values.shape and keys.dtype == values.dtype:
            return self._buffer("both", keys, 2), self._buffer("both", values, 2)
        return self._buffer("keys", keys, 1), self._buffer("values", values, 1)

    def _buffer(self, what: str, states: Tensor, each: int) -> Tensor:
        """Return a buffer beside others that hold `what`, of which a layer has `each`."""
        batch, heads, _, width = states.shape
        free = self._free.setdefault((what, batch, heads, width, states.dtype, states.device), [])
        if not free:
            shared = states.new_zeros(each * self._together, batch, heads, self.capacity, width)
            self._shared.append(shared)
            free.extend(shared[layer] for layer in range(len(shared)))
        return free.pop()

    def move(self, slots: Sequence[int], to: int) -> None:
        """Copy the states in `slots`, rising and none below `to`, to `to`, `to` + 1, ..., in all buffers."""
        for shared in self._shared:
            if len(slots) == 1:
                shared[:, :, :, to] = shared[:, :, :, slots[0]]
            else:
                at = upload(list(slots), shared.device)
                shared.narrow(3, to, len(slots)).copy_(shared.index_select(3, at))


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, written in place; its buffers are taken from `slots`."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for the shape, dtype and device of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._slots.take(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states and return views of all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        count = key_states.shape[-2]
        self.keys.narrow(2, self.length, count).copy_(key_states)
        self.values.narrow(2, self.length, count).copy_(value_states)
        self.length += count
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys' length with `query_length` more tokens, and their offset."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the slots in use."""
        return self.length

    def get_max_length(self) -> int:
        """Return the slots there are."""
        return self._slots.capacity
