"""Candidates from one transformer layer on the target's last hidden states, depth by depth (EAGLE and MTP in kind)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ....policies.contract import Array
from ...candidates import Candidates
from ...models.attention import without_cudnn
from ...models.cuda.transfer import upload
from ...models.pair import Pair
from ...models.reading.modes import ENDLESS
from ...models.view import layer_view
from ..base import READS_ALL, Proposal
from .medusa import scores
from .networks import LayerNetwork, output_layer


class LayerReader:
    """Reads committed tokens with the target's states, and candidates with the layer's own in their place.

    Slot i of its cache belongs to token i + 1 of a text, beside which it reads the state of token i. What candidates leave
    in the cache is written over: once accepted they are read again, with the target's states.

    Args:
        pair: whose target it is.
        network: on the target's device.
    """

    layers: tuple[int, ...] = (-1,)
    readable = ENDLESS
    reading = READS_ALL
    beyond = 0  # slots that candidates take and the loop does not count

    def __init__(self, pair: Pair, network: LayerNetwork) -> None:
        self._network, self._device = network, pair.device
        self._embedding = layer_view(pair.target, pair.target.get_input_embeddings())
        self._output = output_layer(pair.target)
        self._like = network.before  # for its device and type
        self._cache = LayerCache(0, 0, 1, 1, self._like)  # of no stream, so that `reserve` makes another
        self._rotation = network.rotations(0, self._device, self._like.dtype)
        self.reserve(1, 0)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        shape, slots = self._network.shape, tokens + self.beyond
        if self._cache.slots < slots or self._cache.streams != streams:
            width = shape.hidden // shape.attention_heads
            self._cache = LayerCache(streams, slots, shape.attention_heads, width, self._like)
        # Not as long as the cache: that may have grown.
        if len(self._rotation[0]) <= slots:
            self._rotation = self._network.rotations(slots + 1, self._device, self._like.dtype)
        self._unread: list[list[tuple[int, Tensor]]] = [[] for _ in range(streams)]
        self._last: list[Tensor | None] = [None] * streams  # the state of the last token that the target has read
        self._length = [0] * streams  # slots that hold committed tokens
        self._slot: list[dict[int, int]] = [{} for _ in range(streams)]  # of places fed this round
        self._states: dict[tuple[int, int], Tensor] = {}  # by stream and place

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._unread[stream], self._last[stream], self._length[stream], self._slot[stream] = [], None, 0, {}
        self._cache.clear(stream)

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        assert states is not None
        states = states.clone()  # a recorded call of the target writes over its states
        last = self._last[stream]
        # The first token of a text has no state before it and is never read: there the states are one fewer than the tokens.
        befores = [*([] if last is None else [last]), *states[:-1]]
        self._unread[stream] += zip(tokens[len(tokens) - len(befores) :], befores, strict=True)
        self._last[stream] = states[-1]
        self._slot[stream] = {}

    def backlog(self) -> Array:
        """See `Drafter`."""
        return np.array([len(unread) + 1 for unread in self._unread])

    def _take_unread(self, stream: int) -> list[Row]:
        """Return the committed tokens that are to be read, and begin a round."""
        first, unread = self._length[stream], self._unread[stream]
        self._unread[stream], self._slot[stream] = [], {}
        self._length[stream] += len(unread)
        return [Row(token, state, at, at, at, (at,)) for at, (token, state) in enumerate(unread, first)]

    def _row(self, stream: int, here: Candidates, place: int) -> Row:
        """Return the row of a candidate, in the next slot: it sees the text and its path."""
        base, fed = self._length[stream], self._slot[stream]
        # Candidates of one depth share a position, but each has a slot of its own.
        fed[place] = slot = base + len(fed)
        depth, parent = here.depth[place], here.parent[place]
        # Of what the target has not read there is only the layer's own state.
        state = self._last[stream] if parent < 0 else self._states[stream, parent]
        assert state is not None
        path = tuple(fed[before] for before in here.path(place))
        return Row(here.tokens[place], state, slot, base + depth, base, path)

    def _read_places(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> tuple[list[Tensor], list[list[Row]]]:
        """Read places, at the roots what is unread of the text before them; return their states [n, H] and rows by stream."""
        read, fed = [], []
        for stream, here, places in zip(streams, found, feeding, strict=True):
            read.append([] if here.depth[places[0]] else self._take_unread(stream))
            fed.append([self._row(stream, here, place) for place in places])
        states = self._read([[*before, *rows] for before, rows in zip(read, fed, strict=True)], streams)
        # Rows of the backlog come first: nothing is proposed after them.
        last = [
            states[at, len(before) : len(before) + len(rows)]
            for at, (before, rows) in enumerate(zip(read, fed, strict=True))
        ]
        return last, fed

    def _read(self, rows: Sequence[Sequence[Row]], streams: Sequence[int]) -> Tensor:
        """Return [S, n, H], the states of rows."""
        most = max(map(len, rows))
        # What fills a short stream up writes to the slot that is nobody's (`LayerCache.place`).
        full = [[*some, *[some[-1]] * (most - len(some))] for some in rows]
        tokens = upload([[row.token for row in some] for some in full], self._device)
        states = torch.stack([row.state for some in full for row in some]).unflatten(0, tokens.shape)
        return self._run(self._embedding(tokens), states, rows, streams)

    def _run(self, embedded: Tensor, states: Tensor, rows: Sequence[Sequence[Row]], streams: Sequence[int]) -> Tensor:
        """Return [S, n, H] from embeddings and states [S, n, H] of rows, the last one of a stream repeated."""
        most = embedded.shape[1]
        positions = [[*(row.position for row in some), *[0] * (most - len(some))] for some in rows]
        at = upload(positions, self._device)
        self._cache.place(rows, streams)
        out: Tensor = self._network(
            embedded, states, (self._rotation[0][at], self._rotation[1][at]), self._cache.attend
        )
        return out


class LayerDrafter(LayerReader):
    """Proposes what the target's own output layer says of the layer's states, depth by depth; see `LayerReader`."""

    _keeps = False

    def keep_states(self) -> int:
        """See `hidden.KeepsStates`."""
        self._keeps = True
        return self._network.shape.hidden

    def propose(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> Proposal:
        """See `Drafter`."""
        last, _ = self._read_places(streams, found, feeding)
        for stream, places, some in zip(streams, feeding, last, strict=True):
            self._states |= {(stream, place): state for place, state in zip(places, some, strict=True)}
        new = last[0] if len(last) == 1 else torch.cat(last)
        return Proposal(scores(self._output(new)), None, new if self._keeps else None)


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
