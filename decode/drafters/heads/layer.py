"""Candidates from one transformer layer on the target's last hidden states, depth by depth (EAGLE and MTP in kind)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....policies.contract import Array
from ...candidates import Candidates
from ...models.cuda.transfer import upload
from ...models.long_rope import ENDLESS
from ...models.pair import Pair
from ...models.view import layer_view
from ..base import READS_ALL, Proposal
from .drafter import scores
from .layer_cache import LayerCache, Row
from .layer_network import LayerNetwork
from .output_layer import output_layer


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
