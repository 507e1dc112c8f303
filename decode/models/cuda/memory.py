"""What recorded calls of a model read and write, and what outlives one `CudaGraphModel` for the next.

Runs take turns: alone and in a batch, with hidden states and without. So several memories of a model are kept.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kv_cache import KVCache, KVLayer, token_bytes
from ..packed import PackedCall
from .recorder import Recorded, Recorder

Key = TypeVar("Key")
Call = TypeVar("Call", bound=Recorded[Any])

Answer = tuple[Tensor, Tensor | None]
"""Logits and, if asked for, the last hidden states."""


@dataclass
class Now:
    """Of the call that is being made: the slots [n] that its states go to, and how many slots attention reads."""

    slots: Tensor | None = None
    seen: int = 0


class FixedLayer(KVLayer):
    """Keys and values of one layer, written where `now` says; as many slots are returned as it says, used or not."""

    def __init__(self, kv: KVCache, now: Now) -> None:
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


@dataclass
class RecordedCall(Recorded[Answer]):
    """What calls of one shape read; `mask` and `positions` where they are not those of a text.

    `mask` is [B, 1, n, seen] boolean, `positions` [B, n].
    """

    tokens: Tensor  # [B, n]
    start: Tensor  # []
    rows: int | Tensor  # how many of the last ones, or which
    seen: int
    mask: Tensor | None = None
    positions: Tensor | None = None


@dataclass
class RecordedPacked(Recorded[Answer]):
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
    def like(call: PackedCall, mask: Tensor, seen: int) -> RecordedPacked:
        """Return buffers for calls of the shape of this one, whose attention reads `seen` slots."""
        packing = call.packing
        place = None if packing.place is None else packing.place.clone()
        own = replace(packing, stream=packing.stream.clone(), slot=packing.slot.clone(), place=place, seen=seen)
        copies = {name: getattr(call, name).clone() for name in ("tokens", "positions", "query_positions")}
        wanted = call.wanted.clone() if isinstance(call.wanted, Tensor) else call.wanted
        wide = torch.zeros(*mask.shape[:-1], seen, dtype=torch.bool, device=mask.device)
        return RecordedPacked(replace(call, packing=own, wanted=wanted, **copies), wide)


def _numbers(call: PackedCall) -> tuple[Tensor | int | None, ...]:
    """Return what a packed call brings anew."""
    packing = call.packing
    return call.tokens, call.positions, call.wanted, call.query_positions, packing.stream, packing.slot, packing.place


@dataclass(eq=False)
class Memory:
    """Buffers and recordings. They outlive a `CudaGraphModel`, for the next one of the same model; they refer to neither.

    Attributes:
        calls, packed: recorded calls by shape, the latest used last.
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
    now: Now = field(default_factory=Now)
    layers: list[FixedLayer] = field(default_factory=list)
    calls: dict[tuple[int | bool, ...], RecordedCall] = field(default_factory=dict)
    packed: dict[tuple[int, ...], RecordedPacked] = field(default_factory=dict)
    unchecked: bool = False

    def inherit(self) -> None:
        """Have the first recording that is played compared with what the model says then."""
        self.unchecked = True
        for call in (*self.calls.values(), *self.packed.values()):
            call.inherited = call.play is not None

    def forget(self) -> None:
        """Forget what is recorded."""
        self.calls.clear()
        self.packed.clear()

    @property
    def slots(self) -> int:
        """Tokens that it has room for."""
        return self.capacity * self.kv.streams

    def recorded(self, table: dict[Key, Call], key: Key, build: Callable[[], Call]) -> Call:
        """Return the calls of a shape in `calls` or `packed`, made by `build` if there are none, as the latest used."""
        call = table.pop(key) if key in table else build()
        table[key] = call
        return call

    def evict(self) -> None:
        """Forget the least recently used calls beyond `MOST_CALLS`, and those whose tensors take more than their share."""
        room = SHARE_RECORDED * _device_bytes(self.positions.device)
        tables: tuple[dict[Any, Any], ...] = (self.calls, self.packed)
        size = sum(call.size for table in tables for call in table.values())
        while (count := sum(map(len, tables))) > 1 and (count > MOST_CALLS or size > room):
            table = max(tables, key=len)
            size -= table.pop(next(iter(table))).size

    def serves(self, kind: tuple[object, ...], capacity: int, streams: int) -> bool:
        """Whether it can be used for so many streams; a batch can be smaller than the one it was made for."""
        enough = self.kv.streams == 1 if streams == 1 else self.kv.streams >= streams
        return self.kind == kind and self.capacity >= capacity and enough


KEPT: weakref.WeakKeyDictionary[PreTrainedModel, list[Memory]] = weakref.WeakKeyDictionary()
"""By model the last memories that nobody uses any more, the latest last: `generate`, called again, need not record again."""

_KEEPING = threading.RLock()
"""Held while `KEPT` is changed. Python frees a loop, which leaves its memory here, in whichever thread it happens to be."""

MOST_CALLS, SHARE_RECORDED = 256, 0.05
"""Recorded calls of a memory, and the share of the device that the tensors they keep may take. A chain takes two dozen for
each size of attention; each keeps the logits of all its rows."""

MOST_KEPT, SHARE_KEPT = 4, 0.125
"""Memories of a model that are kept, and the share of the device that those beside the latest may take: runs that take turns,
alone and in a batch, with hidden states and without, would each throw away what the other recorded."""


def take_memory(model: PreTrainedModel, kind: tuple[object, ...], capacity: int, streams: int) -> Memory | None:
    """Return the smallest kept memory that serves, which is in use from now on; else make room for a new one."""
    with _KEEPING:
        kept = KEPT.get(model, [])
        for memory in sorted(kept, key=lambda one: one.slots):
            if memory.serves(kind, capacity, streams):
                kept[:] = [one for one in kept if one is not memory]
                return memory

        def is_replaced(memory: Memory) -> bool:
            alike = memory.kind == kind and (memory.kv.streams == 1) == (streams == 1)
            serves_less = alike and memory.capacity <= capacity and memory.kv.streams <= streams
            return serves_less or memory.kind[-1] != kind[-1]  # its weights have moved

        kept[:] = [memory for memory in kept if not is_replaced(memory)]
        _shrink(kept, model)
    return None


def keep_memory(model: weakref.ref[PreTrainedModel], memory: Memory) -> None:
    """Keep what a captured model leaves, beside what others have left as far as there is room."""
    alive = model()
    if alive is None or not (memory.calls or memory.packed):
        return
    memory.inherit()
    with _KEEPING:
        kept = KEPT.setdefault(alive, [])
        _shrink(kept, alive)
        kept.append(memory)
        del kept[:-MOST_KEPT]


def _shrink(kept: list[Memory], model: PreTrainedModel) -> None:
    """Forget the oldest memories that take more than there is room for beside another."""
    while kept and sum(memory.slots for memory in kept) * token_bytes(model) > _room(model.device):
        del kept[0]


def _room(device: torch.device) -> float:
    """Return the bytes that memories beside the latest may take."""
    return SHARE_KEPT * _device_bytes(device)


def _device_bytes(device: torch.device) -> float:
    """Return the memory of a GPU; elsewhere there is no bound."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else math.inf
