"""Candidates from one transformer layer on the target's last hidden states, depth by depth (like EAGLE and MTP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...policies.contract import Array
from ..models.attention import attend as attend_cached, backend_mask
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


@dataclass
class LayerInput:
    """What the layer reads of a stream: n tokens, the states of the tokens before them, and the slots that they attend to."""

    stream: int
    tokens: Sequence[int]
    states: Tensor  # [n, H]
    positions: Sequence[int]
    visible: Array  # [n, slots] bool; the last n slots are those of the tokens


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
        if self._cache.shape[2] <= slots or self._cache.shape[1] != streams:
            heads = shape.attention_heads
            # Keys and values [2, S, slots + 1, heads, d]; padding of short streams is written to the last slot.
            self._cache = weight.new_zeros(2, streams, slots + 1, heads, shape.hidden // heads)
            self._rotation = self._network.rotations(slots + 1, self._device, weight.dtype)
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
        parts = []
        for stream, _ in rows:
            text, states = self._texts[stream], torch.cat(self._texts[stream].states)
            end = text.length + len(states)
            tokens = [*text.tokens, int(round.tokens[stream, 0])]
            visible = np.tri(len(states), end, text.length, dtype=bool)
            parts.append(LayerInput(stream, tokens, states, range(text.length, end), visible))
            self._texts[stream] = _Stream([], [states[-1:]], end - 1)
        out = self._run(parts)
        if len(rows) == 1:
            return out[0, -1:]
        last = upload([range(len(rows)), [len(part.tokens) - 1 for part in parts]], self._device)
        return out[last[0], last[1]]

    def _run(self, parts: Sequence[LayerInput]) -> Tensor:
        """Return the layer's states [S, n, H]; the last ones of short streams are padding."""
        keys, values = self._cache
        count, end = (max(part.visible.shape[axis] for part in parts) for axis in range(2))
        numbers = np.zeros((3, len(parts), count), dtype=np.int64)  # tokens, slots and positions
        numbers[1] = keys.shape[1] - 1
        mask = np.zeros((len(parts), count, end), dtype=bool)
        mask[..., 0] = True  # for padding, as attention to nothing is NaN; slot 0 is visible to all other tokens
        for at, part in enumerate(parts):
            n, width = part.visible.shape
            numbers[:, at, :n] = part.tokens, range(width - n, width), part.positions
            mask[at, :n, :width] = part.visible
        tokens, slots, positions = upload(numbers, self._device)
        attention_mask = None if mask.all() else upload(mask[:, None], self._device)
        if attention_mask is not None and not attention_mask.is_cpu:
            attention_mask = backend_mask(attention_mask, keys.dtype)
        streams = [part.stream for part in parts]
        index = upload(streams, self._device)
        is_batch = streams == list(range(self._streams))  # then attention reads the cache without a copy

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[index[:, None], slots] = k
            values[index[:, None], slots] = v
            k, v = ((cache if is_batch else cache[index])[:, :end].transpose(1, 2) for cache in (keys, values))
            return attend_cached(q.transpose(1, 2), k, v, attention_mask).transpose(1, 2)

        cos, sin = self._rotation
        states = pad_sequence([part.states for part in parts], batch_first=True)
        embedded = self._network.embed(tokens, self._embedding)
        out: Tensor = self._network(embedded, states, (cos[positions], sin[positions]), attend)
        return out


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
            states = self._read_candidates(round, depth, rows)
        row_states = iter(states)
        for stream, stream_rows in rows:
            self._states[stream] |= zip(stream_rows, row_states, strict=False)
        if not self._network.shape.outputs:
            return Proposal(self._output(states).to(self._dtype), None, states)
        scores = self._network.output(states).to(self._dtype)
        dense = scores.new_full((len(scores), self._network.shape.vocabulary), -torch.inf)
        return Proposal(dense.index_copy_(1, self._network.kept, scores), None, states)

    def _read_candidates(self, round: RoundState, depth: int, rows: Rows) -> Tensor:
        """Return the states [R, H] after candidates of one depth: they share a position and have a slot each."""
        tree, parts = round.topology, []
        for stream, stream_rows in rows:
            base, fed, count = self._texts[stream].length, self._states[stream], len(stream_rows)
            slots = {row: base + at for at, row in enumerate([*fed, *stream_rows])}
            visible = np.zeros((count, base + len(slots)), dtype=bool)
            visible[:, :base] = True
            for at, row in enumerate(stream_rows):
                visible[at, [slots[ancestor] for ancestor in tree.paths[row]]] = True
            states = torch.stack([fed[tree.parent[row]] for row in stream_rows])
            tokens = round.tokens[stream, stream_rows].tolist()
            parts.append(LayerInput(stream, tokens, states, [base + depth] * count, visible))
        out = self._run(parts)
        return torch.cat([states[: len(part.tokens)] for states, part in zip(out, parts, strict=True)])
