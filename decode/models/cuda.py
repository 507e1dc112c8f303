"""A cached model that records its calls as CUDA graphs.

A graph repeats operations on the same addresses and shapes. So each shape of packed call has fixed input tensors, and
attention reads the next power of two of the slots in use. Without a GPU the model is a plain `CachedModel`.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .attention import KVCache, KVLayer, PackedCall, Part, pack
from .cache import CachedModel
from .device import Recorded, Recorder, round_up_size
from .placement import is_placed, warn_once
from .view import READS_ALL, Reading, long_rope, state_key, token_bytes

MAX_TOKENS, MAX_EXACT, MIN_SLOTS = 1024, 64, 256
"""Tokens of the longest recorded call, and of the longest that is not filled up; minimum slots that attention reads."""

MAX_CALLS, RECORDED_SHARE = 256, 0.05
"""Maximum number of recorded calls of a memory, and maximum share of the device for their outputs."""

MAX_KEPT, KEPT_SHARE = 4, 0.125
"""Maximum number of unused memories of a model, and maximum share of the device for all but the latest. Runs that alternate,
such as single texts and batches, would otherwise discard each other's recordings."""


@dataclass(kw_only=True)
class RecordedCall(Recorded[tuple[Tensor, Tensor | None]]):
    """Packed calls of one shape, with their inputs and the bytes of their outputs: logits and hidden states."""

    call: PackedCall
    size: int = 0


@dataclass(eq=False)
class Memory:
    """Buffers and recordings. They outlive a `CudaGraphModel` for the next one of the same model.

    Attributes:
        kind: What the recordings depend on besides shapes, and whether they are of one stream; last, the state of the model.
        calls: Recorded calls by shape, the least recently used first.
    """

    kind: tuple[object, ...]
    recorder: Recorder
    kv: KVCache
    layers: list[KVLayer]
    position_at: Tensor
    calls: dict[object, RecordedCall] = field(default_factory=dict)

    def evict(self) -> None:
        """Remove the least recently used calls beyond `MAX_CALLS` and `RECORDED_SHARE`."""
        limit, size = RECORDED_SHARE * device_bytes(self.position_at.device), sum(c.size for c in self.calls.values())
        while len(self.calls) > MAX_CALLS or (len(self.calls) > 1 and size > limit):
            size -= self.calls.pop(next(iter(self.calls))).size


UNUSED_MEMORIES: weakref.WeakKeyDictionary[PreTrainedModel, list[Memory]] = weakref.WeakKeyDictionary()
"""Unused memories by model, the latest last."""

_KEEPING = threading.RLock()
"""Held while `UNUSED_MEMORIES` changes. Python may free a model, which leaves its memory here, in any thread."""


def _take_memory(model: PreTrainedModel, kind: tuple[object, ...], capacity: int, streams: int) -> Memory | None:
    """Remove and return a kept memory that fits, or free those that a new one replaces."""
    with _KEEPING:
        kept = UNUSED_MEMORIES.get(model, [])
        for memory in kept:
            if memory.kind == kind and memory.kv.capacity >= capacity and memory.kv.streams >= streams:
                kept.remove(memory)
                return memory
        kept[:] = [memory for memory in kept if memory.kind[-1] == kind[-1] and memory.kind != kind]
        return None


def _keep_memory(model: weakref.ref[PreTrainedModel], memory: Memory) -> None:
    """Keep the memory of a `CudaGraphModel` that is no longer used."""
    alive = model()
    if alive is not None and memory.calls:
        with _KEEPING:
            kept = UNUSED_MEMORIES.setdefault(alive, [])
            slots = KEPT_SHARE * device_bytes(alive.device) / token_bytes(alive)
            while len(kept) >= MAX_KEPT or sum(one.kv.capacity * one.kv.streams for one in kept) > slots:
                del kept[0]
            kept.append(memory)


def device_bytes(device: torch.device) -> float:
    """Return the memory of a GPU; infinity for other devices."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else math.inf


class CudaGraphModel(CachedModel):
    """A `CachedModel` that records packed calls when they come for the second time: all of `read_parts` except beginnings.

    Args:
        model, capacity, vocabulary, hidden, streams, device: See `CachedModel`; the capacity is rounded up.
        recorder: Creates the recorder of a device.
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
        reading: Reading = READS_ALL,
    ) -> None:
        # Buffers created in inference mode cannot be written to outside of it.
        kind = (streams == 1, vocabulary, hidden, recorder, torch.is_inference_mode_enabled(), _state(model))
        memory = _take_memory(model, kind, capacity, streams)
        # In coarse steps, so that the memory also serves the next text of about this length.
        step = max(MIN_SLOTS, attended_slots(capacity) // 4)
        capacity = memory.kv.capacity if memory else -(-capacity // step) * step
        super().__init__(model, capacity, vocabulary, hidden, streams, device, reading)
        if memory is None:
            memory = Memory(kind, recorder(model.device), self._kv, self._layers, self._position_at)
        self._memory, self._kv, self._layers, self._position_at = memory, memory.kv, memory.layers, memory.position_at
        self._cache = Cache(layers=list(memory.layers))
        self._kv.lengths[:] = [0] * self._kv.streams
        self._reads_beyond = True
        if memory.recorder.works:
            self._min_packed = 1  # single streams are recorded, too
            self._max_packed = max(self._max_packed, MAX_TOKENS // streams)
        weakref.finalize(self, _keep_memory, weakref.ref(model), memory).atexit = False

    @property
    def skips(self) -> bool:  # type: ignore[override]
        """See `CachedModel`."""
        return self._memory.recorder.can_skip(self._device)

    def prepare(self, calls: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Record calls of (tokens, rows) in texts of these lengths. Calls of one shape are recorded once."""
        if not self._memory.recorder.works or self.streams > 1:
            return
        longest = {min(attended_slots(length), self.capacity): min(length, self.capacity) for length in sorted(lengths)}
        for length in longest.values():
            sizes = ((count if _is_exact(count, rows) else round_up_size(count), rows) for count, rows in calls)
            for count, rows in dict.fromkeys(sizes):
                count = min(count, self.capacity - 1)
                last = max(length - count, 1)
                for start in (0, last, last):  # the first call creates the buffers of the layers
                    self._kv.lengths[0] = start
                    self.read_parts([Part(0, [0] * count, rows)])
                    if count == rows == 1 and self.skips:  # a draft step; see `device_policies`
                        self._kv.lengths[0] = start
                        self.read_parts([Part(0, [0], 1)], torch.ones((), dtype=torch.bool, device=self._device))
        self.roll_back(0)

    def refresh(self) -> None:
        """Use the current layers of the model, and discard the recordings if they have changed."""
        super().refresh()
        state = _state(self.original)
        if state != self._memory.kind[-1]:
            self._memory.kind = (*self._memory.kind[:-1], state)
            self._memory.calls = {}

    def _pack(self, parts: Sequence[Part]) -> PackedCall:
        """Return a call of one of few shapes, so that batches that shrink and grow need few recordings."""
        rows = min(1 << max(part.stream for part in parts).bit_length(), self._kv.streams)
        is_chain = len(parts) == 1 == self.streams and parts[0].tree is None
        exact = is_chain and _is_exact(len(parts[0].tokens), parts[0].rows)
        call = pack(parts, self._kv.lengths, rows, self._device, int if exact else round_up_size)
        is_full = call.is_full and (
            exact or not is_chain
        )  # else a chain that happens to fill its size is another shape
        return replace(call, slots=min(attended_slots(call.slots), self.capacity), is_full=is_full)

    def _run_packed(self, call: PackedCall) -> tuple[Tensor, Tensor | None]:
        """Return scores and hidden states, see `CachedModel`, from a recording of calls of this shape."""
        memory, key = self._memory, call.shape
        # Recordings do not contain the layouts of adopted prompts.
        if not memory.recorder.works or call.line.shape[1] > MAX_TOKENS or self._layouts:
            return super()._run_packed(call)
        recorded = memory.calls.pop(key) if key in memory.calls else RecordedCall(call=call)
        memory.calls[key] = recorded
        for fixed, new in zip(recorded.call.tensors, call.tensors, strict=True):
            fixed.copy_(new)
        logits, states = recorded.run_or_replay(
            memory.recorder, partial(super()._run_packed, recorded.call), recorded.call.needed
        )
        if not recorded.size:
            recorded.size = logits.nbytes + (0 if states is None else states.nbytes)
            memory.evict()
        return logits.clone(), None if states is None else states.clone()  # the next call of this shape overwrites them


def _is_exact(count: int, rows: int) -> bool:
    """Whether a chain of one text is recorded at its size. Longer ones, and backlogs of a draft, are filled up."""
    return count <= 2 or (rows == 0 and count <= MAX_EXACT)


def attended_slots(slots: int) -> int:
    """Return the next power of two, at least `MIN_SLOTS`."""
    return max(MIN_SLOTS, 1 << max(slots - 1, 0).bit_length())


def _state(model: PreTrainedModel) -> tuple[object, ...]:
    """Return what recordings hold for: the state of the model and the addresses of the weights."""
    weights = itertools.chain(model.parameters(), model.buffers())
    return (state_key(model), *(weight.data_ptr() for weight in weights))


def open_cache(
    model: PreTrainedModel,
    capacity: int,
    vocabulary: int,
    hidden: bool | Sequence[int] = False,
    streams: int = 1,
    device: torch.device | None = None,
    reading: Reading = READS_ALL,
) -> CachedModel:
    """Return the cached model for S streams, see `CachedModel`. It records its calls if the whole model is on one GPU.

    Warns, once per model, if several texts are read one at a time.
    """
    if streams > 1 and not reading.side_by_side:
        warn_once(
            model,
            f"{type(model).__name__}: reading several texts in one call changes their logits, so the texts of a batch are "
            "read one at a time; larger batches are no faster",
        )
    if reading == READS_ALL and model.device.type == "cuda" and not is_placed(model) and long_rope(model) is None:
        return CudaGraphModel(model, capacity, vocabulary, hidden, streams, device=device)
    return CachedModel(model, capacity, vocabulary, hidden, streams, device, reading)
