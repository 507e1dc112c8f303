"""Keys and values of one transformer layer for S streams, and which of them each new row sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...models.attention import without_cudnn
from ...models.device import upload


@dataclass(slots=True)
class Row:
    """A row that the layer reads.

    Attributes:
        token: there.
        state: [H] of the place before.
        slot: where its keys go.
        position: in the text.
        sees: all slots before this one, and `beside`.
        beside: further slots, its own among them.
    """

    token: int
    state: Tensor
    slot: int
    position: int
    sees: int
    beside: tuple[int, ...]


class LayerCache:
    """Buffers [S, slots, heads, d]. The last slot of a stream is nobody's: rows that fill up a batch write there.

    Args:
        streams, slots: S, and how many slots of each are used.
        heads, width: of the layer; d.
        like: a tensor of the device and type.
    """

    def __init__(self, streams: int, slots: int, heads: int, width: int, like: Tensor) -> None:
        self.slots = slots
        self._keys, self._values = (like.new_zeros(streams, slots + 1, heads, width) for _ in range(2))
        self._streams: Tensor | None = None

    @property
    def streams(self) -> int:
        """S."""
        return len(self._keys)

    def clear(self, stream: int) -> None:
        """Overwrite what a stream holds: what is masked is multiplied by 0, and a NaN stays one."""
        self._keys[stream], self._values[stream] = 0, 0

    def grow(self, slots: int) -> None:
        """Have so many slots of each stream at least; what they hold stays."""
        more = slots - self.slots
        if more > 0:
            # The last slot, which is nobody's, moves to the new end.
            self._keys, self._values = (
                functional.pad(buffer[:, : self.slots], (0, 0, 0, 0, 0, more + 1))
                for buffer in (self._keys, self._values)
            )
            self.slots = slots

    def place(self, rows: Sequence[Sequence[Row]], streams: Sequence[int]) -> None:
        """Say where the rows of the next call go, and what they see.

        Args:
            rows: of each stream that is fed; the shorter ones are filled up.
            streams: their numbers.
        """
        device, most = self._keys.device, max(map(len, rows))
        end = 1 + max(max(row.sees - 1, *row.beside) for some in rows for row in some)  # slots that attention reads
        self._end, self._mask = end, None
        # All streams in their order: attention reads the buffers as they lie, without a copy.
        self._streams = None if list(streams) == list(range(self.streams)) else upload(list(streams), device)
        slots = [[*(row.slot for row in some), *[self.slots] * (most - len(some))] for some in rows]
        self._slots = upload(slots, device)
        if most == 1 and all(some[0].sees + sum(b >= some[0].sees for b in some[0].beside) == end for some in rows):
            return  # each sees everything
        sees = np.zeros((len(rows), most, end), dtype=bool)
        sees[:, :, 0] = True  # a row that sees nothing would be NaN
        for stream, some in enumerate(rows):
            for at, row in enumerate(some):
                sees[stream, at, : row.sees] = True
                # Nothing is committed yet, so slot 0 may be another candidate's; `beside` says whether it is seen.
                if not row.sees:
                    sees[stream, at, 0] = False
                sees[stream, at, list(row.beside)] = True
        self._mask = torch.from_numpy(sees).to(device)[:, None]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write the rows' keys and values and return what they attend to; see `layer_network.Attend`."""
        here = torch.arange(self.streams, device=keys.device) if self._streams is None else self._streams
        self._keys[here[:, None], self._slots] = keys  # [streams fed, n, heads, d]
        self._values[here[:, None], self._slots] = values
        known = (buffer if self._streams is None else buffer[here] for buffer in (self._keys, self._values))
        k, v = (buffer[:, : self._end].transpose(1, 2) for buffer in known)  # [streams fed, heads, slots, d]
        with without_cudnn(keys.device):
            out = functional.scaled_dot_product_attention(queries.transpose(1, 2), k, v, self._mask)
        return out.transpose(1, 2)
