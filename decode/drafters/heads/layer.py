"""Candidates from one transformer layer on the target's last hidden states, depth by depth (like EAGLE and MTP)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ....policies.contract import Array
from ...models.device import upload, without_cudnn
from ...models.pair import Pair
from ...models.view import layer_view
from ...round_state import RoundState, Rows
from ..base import READS_ALL, Drafter, Proposal
from .networks import LayerNetwork, output_layer


class LayerReader(Drafter):
    """Runs a layer with a key-value cache: committed tokens with the target's states, candidates with the layer's own.

    Slot i of the cache belongs to token i + 1 of a text, which is read with the state of token i. Candidates are overwritten:
    once accepted they are read again, with the target's states.

    Args:
        pair: target that the network was trained for.
        network: layer on the target's device.
    """

    layers = (-1,)
    reading = READS_ALL
    _extra_slots = 0  # of a round, beyond its candidates

    def __init__(self, pair: Pair, network: LayerNetwork) -> None:
        self._network, self._device, self._dtype = network, pair.device, pair.logits_dtype
        self._embedding = layer_view(pair.target, pair.target.get_input_embeddings())
        self._output = output_layer(pair.target)
        self._cache = network.before.new_zeros(2, 0, 1, 1, 1)
        self.reserve(1, 0)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        super().reserve(streams, tokens)
        shape, slots, weight = self._network.shape, tokens + self._extra_slots, self._network.before
        if self._cache.shape[2] <= slots or self._cache.shape[1] != streams:
            heads = shape.attention_heads
            # Keys and values [2, S, slots + 1, heads, d]; padding of short streams is written to the last slot.
            self._cache = weight.new_zeros(2, streams, slots + 1, heads, shape.hidden // heads)
            self._rotation = self._network.rotations(slots + 1, self._device, weight.dtype)
        self._unread_tokens: list[list[int]] = [[] for _ in range(streams)]
        self._unread_states: list[list[Tensor]] = [[] for _ in range(streams)]  # [n, H], of the tokens before
        self._last: list[Tensor | None] = [None] * streams  # [1, H], of the last token that the target has read
        self._length = [0] * streams  # slots of committed tokens

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._unread_tokens[stream], self._unread_states[stream] = [], []
        self._last[stream], self._length[stream] = None, 0
        self._cache[:, stream] = 0  # masked values are multiplied by 0, but NaN would stay

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        assert states is not None
        states = states.clone()  # CUDA graphs of the target overwrite their outputs
        if (last := self._last[stream]) is not None:
            self._unread_states[stream].append(last)
        else:
            tokens = tokens[1:]  # the first token of a text has no state before it
        self._unread_tokens[stream].extend(tokens)
        self._unread_states[stream].append(states[:-1])
        self._last[stream] = states[-1:]

    def backlog(self) -> Array:
        """See `Drafter`."""
        return np.array([len(tokens) + 1 for tokens in self._unread_tokens])

    def _read_anchors(self, round: RoundState, rows: Rows) -> Tensor:
        """Read the backlogs and the anchors; return the states [S, H] after the anchors."""
        tokens, states, slots, visible = [], [], [], []
        for stream, _ in rows:
            last, first, unread = self._last[stream], self._length[stream], self._unread_tokens[stream]
            assert last is not None
            tokens.append([*unread, int(round.tokens[stream, 0])])
            states.append(torch.cat([*self._unread_states[stream], last]))
            slots.append(list(range(first, first + len(tokens[-1]))))
            visible.append(np.tri(len(tokens[-1]), slots[-1][-1] + 1, first, dtype=bool))
            self._length[stream] += len(unread)
            self._unread_tokens[stream], self._unread_states[stream] = [], []
        out = self._run([stream for stream, _ in rows], self._embed(tokens), states, slots, slots, visible)
        if len(rows) == 1:
            return out[0, -1:]
        index, last_rows = upload([list(range(len(rows))), [len(row) - 1 for row in tokens]], self._device)
        return out[index, last_rows]

    def _embed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        embedded: Tensor = self._embedding(upload(_padded(tokens, 0), self._device))
        return embedded

    def _run(
        self,
        streams: Sequence[int],
        embedded: Tensor,
        states: Sequence[Tensor],
        slots: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        visible: Sequence[Array],
    ) -> Tensor:
        """Run the layer and return its states [S, n, H], of which the last ones of short streams are padding.

        Args:
            streams: S, ascending.
            embedded: [S, n, H] embeddings of the tokens.
            states: by stream [rows, H], those of the tokens before.
            slots, positions: by stream and row.
            visible: by stream [rows, slots] bool, the slots that a row attends to.
        """
        keys, values = self._cache
        scratch, end = keys.shape[1] - 1, max(mask.shape[1] for mask in visible)
        mask = np.zeros((len(streams), embedded.shape[1], end), dtype=bool)
        mask[..., 0] = True  # for padding, as attention to nothing is NaN; slot 0 is visible to all other rows
        for own, part in zip(mask, visible, strict=True):
            own[: len(part), : part.shape[1]] = part
        attention_mask = None if mask.all() else torch.from_numpy(mask).to(self._device)[:, None]
        at, rotary = upload(_padded(slots, scratch), self._device), upload(_padded(positions, 0), self._device)
        index = upload(list(streams), self._device)
        is_batch = list(streams) == list(range(self._streams))  # then attention reads the cache without a copy

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[index[:, None], at] = k
            values[index[:, None], at] = v
            k, v = ((cache if is_batch else cache[index])[:, :end].transpose(1, 2) for cache in (keys, values))
            with without_cudnn(q.device):
                out = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attention_mask)
            return out.transpose(1, 2)

        cos, sin = self._rotation
        out: Tensor = self._network(embedded, pad_sequence(list(states), True), (cos[rotary], sin[rotary]), attend)
        return out


class LayerDrafter(LayerReader):
    """Proposes by the target's own output layer on the layer's states; see `LayerReader`."""

    _keeps = False

    def keep_states(self) -> int:
        """Return the hidden states with every proposal from now on; the result is their width H."""
        self._keeps = True
        return self._network.shape.hidden

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        if depth == 0:
            states = self._read_anchors(round, rows)
            self._slots = {stream: {0: self._length[stream]} for stream, _ in rows}  # by stream and row
            self._states: dict[tuple[int, int], Tensor] = {}  # by stream and row
        else:
            states = self._read_candidates(round, depth, rows)
        fed = [(stream, row) for stream, own in rows for row in own]
        self._states |= zip(fed, states, strict=True)
        return Proposal(self._output(states).to(self._dtype), None, states if self._keeps else None)

    def _read_candidates(self, round: RoundState, depth: int, rows: Rows) -> Tensor:
        """Return the states [R, H] after candidates of one depth: they share a position and have a slot each."""
        slots, states, visible, tree = [], [], [], round.topology
        for stream, own in rows:
            base, by_row = self._length[stream], self._slots[stream]
            by_row |= zip(own, range(base + len(by_row), base + len(by_row) + len(own)), strict=True)
            slots.append([by_row[row] for row in own])
            mask = np.zeros((len(own), base + len(by_row)), dtype=bool)
            mask[:, :base] = True
            for at, row in enumerate(own):
                mask[at, [by_row[ancestor] for ancestor in tree.paths[row]]] = True
            visible.append(mask)
            states.append(torch.stack([self._states[stream, tree.parent[row]] for row in own]))
        positions = [[self._length[stream] + depth] * len(own) for stream, own in rows]
        embedded = self._embed([round.tokens[stream, own].tolist() for stream, own in rows])
        out = self._run([stream for stream, _ in rows], embedded, states, slots, positions, visible)
        return torch.cat([part[: len(own)] for part, (_, own) in zip(out, rows, strict=True)])


def _padded(rows: Sequence[Sequence[int]], fill: int) -> list[list[int]]:
    longest = max(map(len, rows))
    return [[*row, *[fill] * (longest - len(row))] for row in rows]
