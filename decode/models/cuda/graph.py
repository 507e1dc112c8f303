"""A cached model whose calls are recorded: of a forward of hundreds of launches, CUDA plays one.

A recording repeats what was done, at the same addresses and in the same shapes. So tokens and their place lie in fixed
buffers, one set for each number of tokens; positions and causal mask are made of them on the device; and attention reads not
the slots in use but the next power of two of them. Recording takes a GPU: without one the model is a plain `CachedModel`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..attention import attending_grouped
from ..cache import CachedModel
from ..long_rope import LongRopeModel, long_rope
from ..packed import PackedCall, Part
from ..placement import is_placed, warn_once
from ..view import READS_ALL, Reading
from .memory import Answer, FixedLayer, Memory, RecordedCall, RecordedPacked, keep_memory, take_memory
from .recorder import Recorded, Recorder, filled_up

MOST_TOKENS, EXACT_TOKENS = 1024, 64
"""Longest call that is recorded, and longest chain that is recorded as it is: longer ones are filled up (`filled_up`).
Prompts come in all lengths and gain little, and so does what is longer still."""

LEAST_SEEN = 256
"""Slots that attention reads at least; each next size is twice the last, so that a long text takes few recordings."""


class CudaGraphModel(CachedModel):
    """A `CachedModel` that records calls of up to `MOST_TOKENS` tokens after others when they come for the second time.

    The least recently used recordings are dropped where there are too many (`Memory.evict`).

    Args:
        model, capacity, vocabulary, hidden, device, reading: as of `CachedModel`; the capacity is rounded up.
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
        reading: Reading = READS_ALL,
    ) -> None:
        # Buffers made in inference mode cannot be written to outside of it; weights that lie elsewhere were not recorded.
        kind = (vocabulary, hidden, recorder, torch.is_inference_mode_enabled(), _addresses(model))
        memory = take_memory(model, kind, capacity, streams)
        # In coarse steps, so that the next text of about this length finds the memory large enough.
        step = max(LEAST_SEEN, _seen(capacity) // 4)
        capacity = memory.capacity if memory else -(-capacity // step) * step
        super().__init__(model, capacity, vocabulary, hidden, memory.kv.streams if memory else streams, device, reading)
        self._asked = streams  # a memory may have room for more
        self._fewest = 1 if streams > 1 else 2  # the last text of a batch is read by recordings, too
        if memory is None:
            at = self._position_at
            memory = Memory(self.capacity, kind, recorder(model.device), self._kv, self._positions, at)
            memory.layers = [FixedLayer(self._kv, memory.now) for _ in self._layers]
        # In the place of what the base class has made, where no layer has allocated anything yet.
        self._memory, self._layers, self._kv = memory, list(memory.layers), memory.kv
        self._positions, self._position_at = memory.positions, memory.position_at
        self._cache = Cache(layers=list(memory.layers))
        self._kv.lengths[:] = [0] * self._kv.streams
        self._reads_beyond |= memory.recorder.works
        # Not at the end of the process, when nobody comes for it.
        weakref.finalize(self, keep_memory, weakref.ref(model), memory).atexit = False

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
        if start == 0 or count > MOST_TOKENS or self.streams > 1 or not self._records:
            return super().read(tokens, rows, mask, positions, stream)
        end = start + count
        # Trees and long calls come in all sizes: what fills one up is written behind it, where nothing is seen.
        long = count > EXACT_TOKENS
        wide = filled_up(count) if long or (mask is not None and rows == 0) else count
        if start + wide > self.capacity:
            if long:
                return super().read(tokens, rows, mask, positions, stream)
            wide = count
        call = self._call(wide, rows, min(_seen(start + wide), self.capacity), mask is not None)
        call.tokens[:, :count] = self._known(tokens)
        if isinstance(call.rows, Tensor):
            call.rows.copy_(self._positions[0, count - rows : count])
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

    @property
    def _records(self) -> bool:
        """Whether calls are recorded: not where a text has a layout, which recordings do not know of."""
        return self._memory.recorder.works and self._layouts is None

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
                    self.read(torch.zeros(1, count, dtype=torch.int64, device=self.view.original.device), rows)
        self.roll_back(0)

    def refresh(self) -> None:
        """See `CachedModel`; recordings hold for weights where they lay."""
        super().refresh()
        memory, addresses = self._memory, _addresses(self.view.original)
        if addresses != memory.kind[-1]:
            memory.kind = (*memory.kind[:-1], addresses)
            memory.forget()
        elif has_adapters(self.view.original):
            memory.inherit()  # one may have been switched on or off, which addresses do not tell

    def _rows_for(self, parts: Sequence[Part]) -> int:
        """See `CachedModel`; rounded up, so that batches that shrink and grow take few recordings."""
        return min(1 << (super()._rows_for(parts) - 1).bit_length(), self._kv.streams)

    @staticmethod
    def _sized(count: int) -> int:
        """See `CachedModel`; the sizes that are recorded."""
        return filled_up(count)

    def _run_packed(self, call: PackedCall, mask: Tensor) -> Answer:
        """See `CachedModel`; calls of one shape are recorded like those of a single stream."""
        packing = call.packing
        if not self._records or call.tokens.shape[1] > MOST_TOKENS:
            return super()._run_packed(call, mask)
        wanted = len(call.wanted) if isinstance(call.wanted, Tensor) else 0
        seen = min(_seen(packing.seen), self.capacity)
        # All that shapes depend on, and whether queries are spread out or fill the rectangle as they are.
        key = (call.tokens.shape[1], packing.rows, packing.count, wanted, seen, packing.place is None)
        made = self._memory.recorded(self._memory.packed, key, lambda: RecordedPacked.like(call, mask, seen))
        made.take(call, mask)
        logits, states = self._answer(made, lambda: self._forward_packed(made))
        return logits.clone(), None if states is None else states.clone()

    def _forward_packed(self, made: RecordedPacked) -> Answer:
        return super()._run_packed(made.call, made.mask)

    def _call(self, count: int, rows: int, seen: int, told: bool) -> RecordedCall:
        """Return the calls of a shape, `told` what they see or reading on."""
        device = self.view.original.device

        def build() -> RecordedCall:
            tokens, positions = torch.zeros(2, 1, count, dtype=torch.int64, device=device)
            call = RecordedCall(tokens, torch.zeros((), dtype=torch.int64, device=device), rows, seen)
            if rows and count > EXACT_TOKENS:  # its last rows may fill it up
                call.rows = torch.zeros(rows, dtype=torch.int64, device=device)
            if told:
                call.mask = torch.zeros(1, 1, count, seen, dtype=torch.bool, device=device)
                call.positions = positions
            return call

        return self._memory.recorded(self._memory.calls, (count, rows, seen, told), build)

    def _answer(self, call: Recorded[Answer], forward: Callable[[], Answer]) -> Answer:
        """Make a call; the first one recorded for an earlier `CudaGraphModel` is compared with what the model says now."""
        memory = self._memory
        answer = call.answer(memory.recorder, forward)
        if not call.size:  # a new shape
            call.size = sum(part.nbytes for part in answer if part is not None)
            memory.evict()
        if memory.unchecked and call.inherited:
            # An adapter switched on or off, a hook: nothing tells but the logits.
            now = forward()
            memory.unchecked = False
            if not torch.equal(answer[0], now[0]):
                memory.forget()
                return now
        return answer

    def _forward(self, call: RecordedCall) -> Answer:
        now, at = self._memory.now, self._positions[0]
        # Worked out on the device: a number from the host would be recorded as it is.
        slots = call.start + at[: call.tokens.shape[1]]
        positions = slots[None] if call.positions is None else call.positions
        mask = (at[: call.seen] <= slots[:, None])[None, None] if call.mask is None else call.mask  # [1, 1, n, seen]
        if self._windows:
            self._position_at.index_copy_(1, slots, positions)
        now.slots, now.seen = slots, call.seen
        try:
            with self.view as model, attending_grouped(model):
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


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether layers of a model have adapters of peft."""
    return any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules())


def open_cache(
    model: PreTrainedModel,
    capacity: int,
    vocabulary: int,
    hidden: bool | Sequence[int] = False,
    streams: int = 1,
    device: torch.device | None = None,
    reading: Reading = READS_ALL,
) -> CachedModel:
    """Return the cached model for S streams: one that records its calls where all of the model lies on one GPU.

    Warns, once a model, that its texts are read one at a time though there are several.
    """
    if streams > 1 and not reading.side_by_side:
        warn_once(
            model,
            f"{type(model).__name__}: reading several texts in one call changes their logits, so the texts of a batch are "
            "read one at a time; larger batches are no faster",
        )
    if long_rope(model) is not None:
        return LongRopeModel(model, capacity, vocabulary, hidden, streams, device, reading)
    recordable = reading == READS_ALL and model.device.type == "cuda" and not is_placed(model)
    if recordable:
        return CudaGraphModel(model, capacity, vocabulary, hidden, streams, device=device)
    return CachedModel(model, capacity, vocabulary, hidden, streams, device, reading)
