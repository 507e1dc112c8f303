"""Candidates from heads on the target's last hidden state, one head per depth (Medusa, Hydra)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..models.device import upload
from ..models.pair import Pair
from ..models.view import layer_view
from ..round_state import RoundState, Rows
from .base import Drafter, Proposal
from .networks import MedusaHeads


class HeadsDrafter(Drafter):
    """Head j scores the tokens of depth j + 1, from the hidden state that the anchor was drawn from.

    A head is evaluated when its depth is proposed. Below the last head nothing is proposed.

    Args:
        pair: target that the heads were trained for.
        network: heads on the target's device.
    """

    layers = (-1,)
    reading = "nothing"

    def __init__(self, pair: Pair, network: MedusaHeads) -> None:
        self._network, self._device, self._dtype = network, pair.device, pair.logits_dtype
        self._embedding = layer_view(pair.target, pair.target.get_input_embeddings())
        self.max_depth = network.shape.depth
        self._last: dict[int, Tensor] = {}  # by stream [1, H], the state of the last token that the target has read

    def keep_states(self) -> int:
        """Return the width H of the hidden states in proposals."""
        return self._network.shape.hidden

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        assert states is not None
        self._last[stream] = states[-1:].clone()  # CUDA graphs of the target overwrite their outputs

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        counts = [len(stream_rows) for _, stream_rows in rows]
        if depth >= self._network.shape.depth:
            return Proposal.of_weights([{}] * sum(counts), self._dtype, self._device)
        hidden, path = [self._last[stream] for stream, _ in rows], None
        if self._network.reads_path:
            hidden = [self._last[stream] for stream, stream_rows in rows for _ in stream_rows]
            paths = [round.path_tokens(stream, row) for stream, stream_rows in rows for row in stream_rows]
            path = self._embedding(upload(paths, self._device))
        states = self._network.state(depth, torch.cat(hidden), path)
        logits = self._network.outputs[depth](states)
        if len(states) < sum(counts):  # the same for all rows of a stream
            stream_of_row = upload(np.repeat(np.arange(len(counts)), counts), self._device)
            logits, states = logits[stream_of_row], states[stream_of_row]
        return Proposal(logits.to(self._dtype), None, states)
