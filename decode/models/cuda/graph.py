"""A cached model whose calls are recorded: of a forward of hundreds of launches, CUDA plays one.

A recording repeats what was done, at the same addresses and in the same shapes. So tokens and their place lie in fixed
buffers, one set for each number of tokens; positions and causal mask are made of them on the device; and attention reads not
the slots in use but the next power of two of them. Recording takes a GPU: without one the model is a plain `CachedModel`.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..attention import attending_grouped
from ..cache import CachedModel, token_bytes
from ..kv_cache import KVCache, KVLayer
from ..packed import PackedCall, Part
from ..placement import is_placed
from .recorder import Recorder

MOST_TOKENS = 64
"""Longest call that is recorded. Longer ones, and prompts, come in all lengths and gain little."""

LEAST_SEEN = 256
"""Slots that attention reads at least; each next size is twice the last, so that a long text takes few recordings."""

Answer = tuple[Tensor, Tensor | None]
"""Logits and, if asked for, the last hidden states."""


@dataclass
class _Now:
    """Of the call that is being made: the slots [n] that its states go to, and how many slots attention reads."""

    slots: Tensor | None = None
    seen: int = 0


class FixedLayer(KVLayer):
    """Keys and values of one layer, written where `now` says; as many slots are returned as it says, used or not."""

    def __init__(self, kv: KVCache, now: _Now) -> None:
        super().__init__(kv)
        self._now = now

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states and return the first slots of the buffers; append them where nothing is said."""
        slots, seen = self._now.slots, self._now.seen
        if slots is None:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        # By an index on the device, and views of one size: a recording repeats addresses and shapes.
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys.narrow(2, 0, seen), self.values.narrow(2, 0, seen)


@dataclass(kw_only=True)
class _Recorded:
    """Calls of one shape: the first is made as it is, which warms up; the next is recorded, and played from then on."""

    used: bool = False
    play: Callable[[], Answer] | None = None
    inherited: bool = False  # recorded for an earlier `CudaGraphModel`

    def answer(self, recorder: Recorder, forward: Callable[[], Answer]) -> Answer:
        """Make a call, whose tensors the next one of this shape writes to again."""
        if self.play is None and self.used:
            self.play = recorder.record(forward)
        self.used = True
        return forward() if self.play is None else self.play()


@dataclass
class _Call(_Recorded):
    """What calls of one shape read; `mask` and `positions` where they are not those of a text.

    `mask` is [B, 1, n, seen] boolean, `positions` [B, n].
    """

    tokens: Tensor  # [B, n]
    start: Tensor  # []
    rows: int
    seen: int
    mask: Tensor | None = None
    positions: Tensor | None = None


@dataclass
class _Packed(_Recorded):
    """What packed calls of one shape read."""

    call: PackedCall
    mask: Tensor  # [S, 1, n, seen] boolean

    def take(self, call: PackedCall, mask: Tensor) -> None:
        """Take over the numbers of a call of this shape."""
        own, seen = self.call, mask.shape[-1]
        self.mask[..., :seen] = mask if mask.dtype == torch.bool else mask == 0
        self.mask[..., seen:] = False  # where an earlier call saw more
        for mine, new in zip(_numbers(own), _numbers(call), strict=True):
            if isinstance(mine, Tensor) and isinstance(new, Tensor):
                mine.copy_(new)

    @staticmethod
    def like(call: PackedCall, mask: Tensor, seen: int) -> _Packed:
        """Return buffers for calls of the shape of this one, whose attention reads `seen` slots."""
        packing = call.packing
        place = None if packing.place is None else packing.place.clone()
        own = replace(packing, stream=packing.stream.clone(), slot=packing.slot.clone(), place=place, seen=seen)
        copies = {name: getattr(call, name).clone() for name in ("tokens", "positions", "query_positions")}
        wanted = call.wanted.clone() if isinstance(call.wanted, Tensor) else call.wanted
        wide = torch.zeros(*mask.shape[:-1], seen, dtype=torch.bool, device=mask.device)
        return _Packed(replace(call, packing=own, wanted=wanted, **copies), wide)


def _numbers(call: PackedCall) -> tuple[Tensor | int | None, ...]:
    """Return what a packed call brings anew."""
    packing = call.packing
    return call.tokens, call.positions, call.wanted, call.query_positions, packing.stream, packing.slot, packing.place


@dataclass
class _Memory:
    """Buffers and recordings. They outlive a `CudaGraphModel`, for the next one of the same model; they refer to neither.

    Attributes:
        kind: what else they depend on.
        positions, position_at: see `CachedModel`.
        unchecked: the model may have changed since they were recorded.
    """

    capacity: int
    kind: tuple[object, ...]
    recorder: Recorder
    kv: KVCache
    positions: Tensor
    position_at: Tensor
    now: _Now = field(default_factory=_Now)
    layers: list[FixedLayer] = field(default_factory=list)
    calls: dict[tuple[int | bool, ...], _Call] = field(default_factory=dict)
    packed: dict[tuple[int, ...], _Packed] = field(default_factory=dict)
    unchecked: bool = False

    @property
    def slots(self) -> int:
        """Tokens that it has room for."""
        return self.capacity * self.kv.streams

    def serves(self, kind: tuple[object, ...], capacity: int, streams: int) -> bool:
        """Whether it can be used for so many streams; a batch can be smaller than the one it was made for."""
        enough = self.kv.streams == 1 if streams == 1 else self.kv.streams >= streams
        return self.kind == kind and self.capacity >= capacity and enough


_KEPT: weakref.WeakKeyDictionary[PreTrainedModel, list[_Memory]] = weakref.WeakKeyDictionary()
"""By model the last memories that nobody uses any more, the latest last: `generate`, called again, need not record again."""

MOST_KEPT, SHARE_KEPT = 4, 0.125
"""Memories of a model that are kept, and the share of the device that those beside the latest may take: runs that take turns,
alone and in a batch, with hidden states and without, would each throw away what the other recorded."""


class CudaGraphModel(CachedModel):
    """A `CachedModel` that records calls of up to `MOST_TOKENS` tokens after others when they come for the second time.

    Args:
        model, capacity, vocabulary, hidden, device: as of `CachedModel`; the capacity is rounded up.
        streams: as of `CachedModel`; of several the packed calls are recorded, not those of one of them.
        recorder: of the calls; CUDA graphs by default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        vocabulary: int,
        hidden: bool | Sequence[int] = False,
        streams: int = 1,
        recorder: Callable[[torch.device], Recorder] = Recorder,
        device: torch.device | None = None,
    ) -> None:
        # Buffers made in inference mode cannot be written to outside of it; weights that lie elsewhere were not recorded.
        kind = (vocabulary, hidden, recorder, torch.is_inference_mode_enabled(), _addresses(model))
        memory = _taken(model, kind, capacity, streams)
        # In coarse steps, so that the next text of about this length finds the memory large enough.
        step = max(LEAST_SEEN, _seen(capacity) // 4)
        capacity = memory.capacity if memory else -(-capacity // step) * step
        super().__init__(model, capacity, vocabulary, hidden, memory.kv.streams if memory else streams, device)
        self._asked = streams  # a memory may have room for more
        self._fewest = 1 if streams > 1 else 2  # the last text of a batch is read by recordings, too
        if memory is None:
            at = self._position_at
            memory = _Memory(self.capacity, kind, recorder(model.device), self._kv, self._positions, at)
            memory.layers = [FixedLayer(self._kv, memory.now) for _ in self._layers]
        # In the place of what the base class has made, where no layer has allocated anything yet.
        self._memory, self._layers, self._kv = memory, list(memory.layers), memory.kv
        self._positions, self._position_at = memory.positions, memory.position_at
        self._cache = Cache(layers=list(memory.layers))
        self._kv.lengths[:] = [0] * self._kv.streams
        # Not at the end of the process, when nobody comes for it.
        weakref.finalize(self, _keep, weakref.ref(model), memory).atexit = False

    @property
    def streams(self) -> int:
        """See `CachedModel`."""
        return self._asked

    @property
    def lengths(self) -> Sequence[int]:
        """See `CachedModel`."""
        return self._kv.lengths[: self._asked]

    def read(
        self,
        tokens: Tensor,
        rows: int = 0,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        stream: int = 0,
    ) -> Tensor:
        """Append `tokens` to a stream and return logits; see `CachedModel.read`."""
        start, count = self.lengths[stream], tokens.shape[1]
        if start == 0 or count > MOST_TOKENS or self.streams > 1 or not self._memory.recorder.works:
            return super().read(tokens, rows, mask, positions, stream)
        end = start + count
        # Trees come in all sizes: what fills one up is written behind it, where nothing is seen.
        wide = self._sized(count) if mask is not None and rows == 0 else count
        wide = wide if start + wide <= self.capacity else count
        call = self._call(wide, rows, min(_seen(start + wide), self.capacity), mask is not None)
        call.tokens[:, :count] = self._known(tokens)
        call.start.fill_(start)
        if call.mask is not None and call.positions is not None:
            assert mask is not None
            call.mask.zero_()  # an earlier call saw more
            call.mask[..., 0] = True
            call.mask[:, :, :count, :end] = mask if mask.dtype == torch.bool else mask == 0
            call.positions[:, :count] = self._positions[:, start:end] if positions is None else positions
        logits, states = self._answer(call, lambda: self._forward(call))
        self._kv.lengths[0] = end
        self.states = None if states is None else states[:, :count].clone()
        return logits[:, : rows or count].clone()  # the next call of this shape writes there again

    def prepare(self, calls: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Record calls of (tokens, rows) in texts of these lengths; see `CachedModel.prepare`."""
        if not self._memory.recorder.works or self.streams > 1:
            return
        longest = {min(_seen(length), self.capacity): min(length, self.capacity) for length in sorted(lengths)}
        for length in longest.values():  # of each size
            for count, rows in calls:
                last = max(length - count, 1)
                for start in (0, last, last):  # the first makes the buffers of the layers
                    self._kv.lengths[0] = start
                    self.read(torch.zeros(1, count, dtype=torch.int64, device=self.model.device), rows)
        self.roll_back(0)

    def _rows_for(self, parts: Sequence[Part]) -> int:
        """See `CachedModel`; rounded up, so that batches that shrink and grow take few recordings."""
        return min(1 << (super()._rows_for(parts) - 1).bit_length(), self._kv.streams)

    @staticmethod
    def _sized(count: int) -> int:
        """See `CachedModel`; the sizes that are recorded."""
        return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8

    def _run_packed(self, call: PackedCall, mask: Tensor) -> Answer:
        """See `CachedModel`; calls of one shape are recorded like those of a single stream."""
        packing = call.packing
        if not self._memory.recorder.works or call.tokens.shape[1] > MOST_TOKENS:
            return super()._run_packed(call, mask)
        wanted = len(call.wanted) if isinstance(call.wanted, Tensor) else 0
        seen = min(_seen(packing.seen), self.capacity)
        # All that shapes depend on, and whether queries are spread out or fill the rectangle as they are.
        key = (call.tokens.shape[1], packing.rows, packing.count, wanted, seen, packing.place is None)
        if key not in self._memory.packed:
            self._memory.packed[key] = _Packed.like(call, mask, seen)
        made = self._memory.packed[key]
        made.take(call, mask)
        logits, states = self._answer(made, lambda: self._forward_packed(made))
        return logits.clone(), None if states is None else states.clone()

    def _forward_packed(self, made: _Packed) -> Answer:
        return super()._run_packed(made.call, made.mask)

    def _call(self, count: int, rows: int, seen: int, told: bool) -> _Call:
        """Return the calls of a shape, `told` what they see or reading on."""
        key = (count, rows, seen, told)
        if key not in self._memory.calls:
            device = self.model.device
            tokens, positions = torch.zeros(2, 1, count, dtype=torch.int64, device=device)
            call = _Call(tokens, torch.zeros((), dtype=torch.int64, device=device), rows, seen)
            if told:
                call.mask = torch.zeros(1, 1, count, seen, dtype=torch.bool, device=device)
                call.positions = positions
            self._memory.calls[key] = call
        return self._memory.calls[key]

    def _answer(self, call: _Recorded, forward: Callable[[], Answer]) -> Answer:
        """Make a call; the first one recorded for an earlier `CudaGraphModel` is compared with what the model says now."""
        memory = self._memory
        answer = call.answer(memory.recorder, forward)
        if memory.unchecked and call.inherited:
            # An adapter switched on or off, a hook: nothing tells but the logits.
            now = forward()
            memory.unchecked = False
            if not torch.equal(answer[0], now[0]):
                memory.calls.clear()
                memory.packed.clear()
                return now
        return answer

    def _forward(self, call: _Call) -> Answer:
        now, at = self._memory.now, self._positions[0]
        # Worked out on the device: a number from the host would be recorded as it is.
        slots = call.start + at[: call.tokens.shape[1]]
        positions = slots[None] if call.positions is None else call.positions
        mask = (at[: call.seen] <= slots[:, None])[None, None] if call.mask is None else call.mask  # [1, 1, n, seen]
        if self._windows:
            self._position_at.index_copy_(1, slots, positions)
        now.slots, now.seen = slots, call.seen
        try:
            with attending_grouped(self.model):
                by_layer = self._by_layer(mask, positions, self._position_at[:, : call.seen])
                return self._run(call.tokens, by_layer, positions, call.rows)
        finally:
            now.slots = None


def _seen(slots: int) -> int:
    """Return the next power of two, `LEAST_SEEN` at least."""
    return max(LEAST_SEEN, 1 << max(slots - 1, 0).bit_length())


def _addresses(model: PreTrainedModel) -> tuple[object, ...]:
    """Return where a model's weights lie and how it attends: recordings hold for these alone."""
    weights = itertools.chain(model.parameters(), model.buffers())
    return (model.config._attn_implementation, *(weight.data_ptr() for weight in weights))


def _taken(model: PreTrainedModel, kind: tuple[object, ...], capacity: int, streams: int) -> _Memory | None:
    """Return the smallest kept memory that serves, which is in use from now on; else make room for a new one."""
    kept = _KEPT.get(model, [])
    if serving := [memory for memory in kept if memory.serves(kind, capacity, streams)]:
        memory = min(serving, key=lambda one: one.slots)
        kept.remove(memory)
        return memory
    for memory in list(kept):
        alike = memory.kind == kind and (memory.kv.streams == 1) == (streams == 1)
        if memory.kind[-1] != kind[-1] or (alike and memory.capacity <= capacity and memory.kv.streams <= streams):
            kept.remove(memory)  # its weights have moved, or the new one will serve for it
    _shrink(kept, model)
    return None


def _keep(model: weakref.ref[PreTrainedModel], memory: _Memory) -> None:
    """Keep what a captured model leaves, beside what others have left as far as there is room."""
    alive = model()
    if alive is None or not (memory.calls or memory.packed):
        return
    memory.unchecked = True
    for call in (*memory.calls.values(), *memory.packed.values()):
        call.inherited = call.play is not None
    kept = _KEPT.setdefault(alive, [])
    _shrink(kept, alive)
    kept.append(memory)
    del kept[:-MOST_KEPT]


def _shrink(kept: list[_Memory], model: PreTrainedModel) -> None:
    """Forget the oldest memories that take more than there is room for beside another."""
    while kept and sum(memory.slots for memory in kept) * token_bytes(model) > _room(model.device):
        del kept[0]


def _room(device: torch.device) -> float:
    """Return the bytes that memories beside the latest may take."""
    if device.type != "cuda":
        return math.inf
    return SHARE_KEPT * float(torch.cuda.get_device_properties(device).total_memory)


def open_cache(
    model: PreTrainedModel,
    capacity: int,
    vocabulary: int,
    hidden: bool | Sequence[int] = False,
    streams: int = 1,
    device: torch.device | None = None,
) -> CachedModel:
    """Return the cached model for S streams: one that records its calls where all of the model lies on one GPU."""
    if model.device.type == "cuda" and not is_placed(model):
        return CudaGraphModel(model, capacity, vocabulary, hidden, streams, device=device)
    return CachedModel(model, capacity, vocabulary, hidden, streams, device)
