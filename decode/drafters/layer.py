"""Candidates from one transformer layer on the target's last hidden states, depth by depth (like EAGLE and MTP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array
from ..models.attention import Part, TreeRows, attend as attend_cached, backend_mask, pack, split
from ..models.device import upload
from ..models.pair import Pair
from ..models.view import layer_view
from ..round_state import RoundState, Rows
from .base import Drafter, Proposal
from .networks import LayerNetwork, output_layer


@dataclass
class _Stream:
    """Committed tokens of a stream that the layer has not read."""

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # [n, H], of the token before each one, and before the anchor
    length: int = 0  # slots of the tokens that it has read
    used: int = 0  # slots in use, with those of the anchor and the candidates


class LayerReader(Drafter):
    """Runs a layer with a key-value cache: committed tokens with the target's states, candidates with the layer's own.

    Slot i of the cache belongs to token i + 1 of a text, which is read with the state of token i. Candidates are overwritten:
    once accepted they are read again, with the target's states. The network is on the target's device.
    """

    layers = (-1,)
    reading = "all"

    def __init__(self, pair: Pair, network: LayerNetwork) -> None:
        self._network, self._device, self._dtype = network, pair.device, pair.logits_dtype
        self._embedding = layer_view(pair.target, pair.target.get_input_embeddings())
        self._output = output_layer(pair.target)
        self._cache = network.before.new_zeros(2, 0, 1, 1, 1)
        self.reserve(1, 0)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        super().reserve(streams, tokens)
        shape, weight = self._network.shape, self._network.before
        slots = tokens + shape.depth  # CTC positions need slots beyond the candidates
        if self._cache.shape[3] < slots or self._cache.shape[1] != streams:
            heads = shape.attention_heads
            self._cache = weight.new_zeros(2, streams, heads, slots, shape.hidden // heads)  # keys and values
            self._rotation = self._network.rotations(slots, self._device, weight.dtype)
        self._texts = [_Stream() for _ in range(streams)]

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._texts[stream] = _Stream()
        self._cache[:, stream] = 0  # masked values are multiplied by 0, but NaN would stay

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        assert states is not None
        text = self._texts[stream]
        text.tokens.extend(tokens if text.states else tokens[1:])  # the first token has no state before it
        text.states.append(states.clone())  # CUDA graphs of the target overwrite their outputs

    def backlog(self) -> Array:
        """See `Drafter`."""
        return np.array([len(text.tokens) + 1 for text in self._texts])

    def _read_anchors(self, round: RoundState, rows: Rows) -> Tensor:
        """Read the backlogs and the anchors; return the states [S, H] after the anchors."""
        parts, states = [], []
        for stream, _ in rows:
            text = self._texts[stream]
            parts.append(Part(stream, [*text.tokens, int(round.tokens[stream, 0])]))
            states += text.states
            last = text.length + len(text.tokens)  # the slot of the anchor
            self._texts[stream] = _Stream([], [states[-1][-1:]], last, text.length)
        out = self._run(parts, states)
        return out[-1:] if len(rows) == 1 else out[upload(split(parts)[1:] - 1, self._device)]

    def _run(self, parts: Sequence[Part], states: Sequence[Tensor]) -> Tensor:
        """Return the layer's states [T, H] after the tokens of all parts, given those before them (together [T, H])."""
        first = min(part.stream for part in parts)
        shifted = [replace(part, stream=part.stream - first) for part in parts]
        used = [text.used for text in self._texts[first:]]
        call = pack(shifted, used, 1 + max(part.stream for part in shifted), self._device)
        for part in parts:
            self._texts[part.stream].used += len(part.tokens)
        (keys, values), (cos, sin) = self._cache[:, first:], self._rotation
        mask = backend_mask(call.mask(), keys.dtype)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = call.write(keys, values, k.transpose(1, 2), v.transpose(1, 2))
            return call.gather(attend_cached(call.spread(q.transpose(1, 2)), k, v, mask).transpose(1, 2))

        tokens, positions = call.line[:1], call.line[1:2]
        embedded = self._network.embed(tokens, self._embedding)
        out: Tensor = self._network(embedded, torch.cat(list(states))[None], (cos[positions], sin[positions]), attend)
        return out[0]


class LayerDrafter(LayerReader):
    """Proposes by the target's output layer, or the layer's own, on the layer's states; see `LayerReader`."""

    def keep_states(self) -> int:
        """Return the width H of the hidden states in proposals."""
        return self._network.shape.hidden

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        if depth == 0:
            states = self._read_anchors(round, rows)
            # By stream and row, in the order of the slots, which begin with that of the anchor.
            self._states: dict[int, dict[int, Tensor]] = {stream: {} for stream, _ in rows}
        else:
            states = self._read_candidates(round, rows)
        row_states = iter(states)
        for stream, stream_rows in rows:
            self._states[stream] |= zip(stream_rows, row_states, strict=False)
        if not self._network.shape.outputs:
            return Proposal(self._output(states).to(self._dtype), None, states)
        scores = self._network.output(states).to(self._dtype)
        dense = scores.new_full((len(scores), self._network.shape.vocabulary), -torch.inf)
        return Proposal(dense.index_copy_(1, self._network.kept, scores), None, states)

    def _read_candidates(self, round: RoundState, rows: Rows) -> Tensor:
        """Return the states [R, H] after candidates of one depth: they share a position and have a slot each."""
        parts, states = [], []
        for stream, stream_rows in rows:
            fed = self._states[stream]
            tree = TreeRows(round.topology, self._texts[stream].length, list(fed), stream_rows)
            parts.append(Part(stream, round.tokens[stream, stream_rows].tolist(), tree=tree))
            states += [fed[round.topology.parent[row]][None] for row in stream_rows]
        return self._run(parts, states)
