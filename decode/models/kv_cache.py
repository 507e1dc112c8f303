"""Where a model keeps the keys and values of what it has read: slots in preallocated buffers, a row of them for each stream.

One stream is written and read in slices, and needs no mask. Several streams are read in one *packed* call: their tokens
follow one another as if they were one text, so that all but attention works on no more rows than there are tokens. Attention
takes a rectangle of queries, a row for each stream up to the last that takes part, against the buffers as they lie: nothing
that is cached is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ...policies.errors import InputError
from .cuda.transfer import upload

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Largest RMS difference of logits due to rounding, relative to their standard deviation; 0.1 in half precision."""


def token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that a token takes in the cache of a model."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


def scored_tokens(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model scores."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    return int(size if isinstance(size, int) else model.get_output_embeddings().weight.shape[0])


@dataclass(slots=True)
class Packing:
    """Where T tokens of several streams lie in the buffers, and in the rectangle [S, n] of queries.

    Attributes:
        stream, slot: [T] int64, of each token.
        place: [T] int64, in the rectangle, row by row; None where the tokens fill it in their order.
        rows, count: S, of the buffers that attention reads, from the first on; and n.
        seen: slots of each that it reads.
    """

    stream: Tensor
    slot: Tensor
    place: Tensor | None
    rows: int
    count: int
    seen: int

    def on(self, device: torch.device) -> Packing:
        """Return the same for buffers on a device."""
        if self.stream.device == device:
            return self
        place = None if self.place is None else self.place.to(device)
        return replace(self, stream=self.stream.to(device), slot=self.slot.to(device), place=place)

    def write(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Write states [1, heads, T, width] into buffers, and return what attention reads of them."""
        # Indices with a slice between them put their own dimension first: [T, heads, width].
        keys[self.stream, :, self.slot] = new_keys[0].transpose(0, 1)
        values[self.stream, :, self.slot] = new_values[0].transpose(0, 1)
        return keys[: self.rows, :, : self.seen], values[: self.rows, :, : self.seen]

    def spread(self, queries: Tensor) -> Tensor:
        """Return queries [1, heads, T, width] as the rectangle [S, heads, n, width]; places of no token hold zeros."""
        rows = queries[0].transpose(0, 1)  # [T, heads, width]
        if self.place is not None:
            rows = rows.new_zeros(self.rows * self.count, *rows.shape[1:]).index_copy_(0, self.place, rows)
        return rows.reshape(self.rows, self.count, *rows.shape[1:]).transpose(1, 2)

    def gather(self, out: Tensor) -> Tensor:
        """Return [1, T, heads, width] of a rectangle [S, n, heads, width]."""
        rows = out.reshape(1, self.rows * self.count, *out.shape[2:])  # [1, S n, heads, width]
        return rows if self.place is None else rows.index_select(1, self.place)


@dataclass(frozen=True)
class ReadPrompt:
    """The prompt of one text after the model has read it as its own `generate` does (`hf.prefill`).

    Attributes:
        ids: token ids that drafters read.
        logits: [1, V] after the last token.
        states: [len(ids), layers x H] hidden states of `ids`, if they are kept. Without states of a cached prefix, `ids` are
            the tokens after it.
        layers: keys and values [1, heads, n, width] of each layer, of the last n slots; None of a layer without its own. They
            are removed once they are copied to the buffers.
        slots: number of slots in use.
        hidden: [slots] bool, slots that no later token sees.
        offset: [D] int64, position minus slot of later tokens (`masks.SlotLayouts`).
        next: a token, and the model's own logits [V] after it.
        arguments: names of what makes the prompt more than token ids, for messages.
    """

    ids: list[int]
    logits: Tensor
    states: Tensor | None
    layers: list[tuple[Tensor, Tensor] | None]
    slots: int
    hidden: Tensor
    offset: Tensor
    next: tuple[int, Tensor]
    arguments: tuple[str, ...]

    def check(self, logits: Tensor, model: PreTrainedModel) -> None:
        """Compare the logits [V] that the loop computes after the next token with the model's own.

        Raises:
            InputError: they differ by more than rounding.
        """
        expected = self.next[1]
        finite = torch.isfinite(expected) & torch.isfinite(logits)
        spread = expected[finite].std().clamp_min(torch.finfo(expected.dtype).tiny)
        distance = float((logits[finite] - expected[finite]).square().mean().sqrt() / spread)
        if not distance <= _TOLERANCE.get(model.dtype, 0.1):  # true for NaN as well
            raise self.refusal(model)

    @property
    def is_shifted(self) -> bool:
        """Whether slots are hidden, or positions are not the slots' numbers."""
        return bool(self.hidden.any()) or bool(self.offset.any())

    def refusal(self, model: PreTrainedModel) -> InputError:
        """Return the error of a prompt after which the loop cannot go on."""
        return InputError(
            f"specstop_generate: {', '.join(self.arguments)}: {type(model).__name__} continues such a prompt in a form "
            "that the loop does not support; leave it out, or call generate without custom_generate"
        )


class KVCache:
    """Buffers of `capacity` slots a stream, keys and values of many layers side by side: a move is two operations for all.

    Args:
        capacity: slots of a stream.
        together: layers that share memory.
        streams: S.

    Attributes:
        lengths: slots in use, by stream.
        stream: whose text is read.
        packing: of the call that reads several; None = it reads `stream`'s.
    """

    def __init__(self, capacity: int, together: int, streams: int = 1) -> None:
        self.capacity, self._together, self.streams = capacity, together, streams
        self.lengths = [0] * streams
        self.stream = 0
        self.packing: Packing | None = None
        self._shared: list[Tensor] = []  # each [buffers, S, heads, capacity, width]
        self._free: dict[Any, list[Tensor]] = {}

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return two buffers [S, heads, capacity, width] for states [1, heads, n, width] of a layer."""
        if keys.shape == values.shape and keys.dtype == values.dtype:
            return self._buffer("both", keys, 2), self._buffer("both", values, 2)
        return self._buffer("keys", keys, 1), self._buffer("values", values, 1)

    def _buffer(self, what: str, states: Tensor, each: int) -> Tensor:
        """Return a buffer beside others that hold `what`, of which a layer has `each`."""
        _, heads, _, width = states.shape
        free = self._free.setdefault((what, heads, width, states.dtype, states.device), [])
        if not free:
            # One allocation for all layers of a kind, handed out as each of them is first written.
            shared = states.new_zeros(each * self._together, self.streams, heads, self.capacity, width)
            self._shared.append(shared)
            free.extend(shared[layer] for layer in range(len(shared)))
        return free.pop()

    def clear(self, stream: int) -> None:
        """Overwrite a stream's states: behind a mask they count nothing, but nothing times a NaN is one."""
        for shared in self._shared:
            shared[:, stream].zero_()

    def move(self, stream: int, slots: Sequence[int], to: int) -> None:
        """Copy the states in a stream's `slots`, rising and none below `to`, to `to`, `to` + 1, ..., in all buffers."""
        for shared in self._shared:
            own = shared[:, stream]
            if len(slots) == 1:
                own[:, :, to] = own[:, :, slots[0]]
            else:
                # Copied out first: where the states go may overlap where they lie.
                at = upload(list(slots), shared.device)
                own.narrow(2, to, len(slots)).copy_(own.index_select(2, at))


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, written in place; its buffers are taken from `kv`, which says where to write."""

    is_sliding = False  # all keys are kept; a window is part of the mask

    def __init__(self, kv: KVCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kv = kv

    @property
    def packing(self) -> Packing | None:
        """Of the call that is being made."""
        return self._kv.packing

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for the shape, dtype and device of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._kv.take(key_states, value_states)
        self.is_initialized = True

    def fill(self, stream: int, end: int, key_states: Tensor, value_states: Tensor) -> None:
        """Write states [1, heads, n, width] into the n slots of a stream before `end`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys[stream, :, end - key_states.shape[2] : end] = key_states[0]
        self.values[stream, :, end - value_states.shape[2] : end] = value_states[0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states after what is there and return views of all that attention reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        kv = self._kv
        if kv.packing is not None:
            return kv.packing.on(key_states.device).write(self.keys, self.values, key_states, value_states)
        keys, values, start, count = self.keys, self.values, kv.lengths[kv.stream], key_states.shape[-2]
        if kv.streams > 1:  # a view of one row: [1, heads, capacity, width]
            keys, values = keys.narrow(0, kv.stream, 1), values.narrow(0, kv.stream, 1)
        # The length stays until all layers have written (`CachedModel.read`).
        keys.narrow(2, start, count).copy_(key_states)
        values.narrow(2, start, count).copy_(value_states)
        return keys.narrow(2, 0, start + count), values.narrow(2, 0, start + count)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys' length with `query_length` more tokens, and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the slots in use."""
        return self._kv.lengths[self._kv.stream]

    def get_max_length(self) -> int:
        """Return the slots there are."""
        return self._kv.capacity
