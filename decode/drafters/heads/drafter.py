"""Candidates from heads on the target's last hidden state: Medusa and Hydra."""

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
from ..base import READS_NOTHING, Proposal
from .networks import Heads


class HeadsDrafter:
    """Head j scores the tokens of depth j + 1, from the state that the target's last token was drawn from.

    What a head says takes no pass over a text: there is never a backlog. A head is evaluated when its depth is asked for.

    Args:
        pair: whose target it is.
        network: the heads, on the target's device.

    Attributes:
        most: the number of heads.
    """

    layers: tuple[int, ...] = (-1,)
    readable = ENDLESS
    reading = READS_NOTHING

    def __init__(self, pair: Pair, network: Heads) -> None:
        self._network, self._device, self.most = network, pair.device, network.shape.depth
        self._embedding = layer_view(pair.target, pair.target.get_input_embeddings())
        self._keeps = False
        self.reserve(1, 0)

    def keep_states(self) -> int:
        """See `hidden.KeepsStates`."""
        self._keeps = True
        return self._network.shape.hidden

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        self._before: list[Tensor | None] = [None] * streams

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._before[stream] = None

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        assert states is not None
        self._before[stream] = states[-1:].clone()  # a recorded call of the target writes over its states

    def backlog(self) -> Array:
        """Return zeros: there is nothing to read."""
        return np.zeros(len(self._before), dtype=np.int64)

    def propose(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> Proposal:
        """See `Drafter`; below the last head nothing is proposed."""
        head = found[0].depth[feeding[0][0]]
        counts = [len(places) for places in feeding]
        if head >= self.most:
            return nothing(sum(counts), self._before[streams[0]])
        states = [state for state in (self._before[stream] for stream in streams) if state is not None]
        hidden = torch.cat(states) if len(states) > 1 else states[0]
        owner = np.repeat(np.arange(len(states)), counts).tolist()  # [R], by place the row of `hidden` that it reads
        rows = upload(owner, self._device) if len(owner) > len(states) else None
        path: Tensor | None = None
        if self._network.reads_path:
            paths = [here.tokens_to(p) for here, places in zip(found, feeding, strict=True) for p in places]
            path, hidden = self._embedding(upload(paths, self._device)), hidden if rows is None else hidden[rows]
        read = self._network.state(head, hidden, path)
        logits = self._network.logits(head, read)
        if path is None and rows is not None:  # the same for all places of a stream
            logits, read = logits[rows], read[rows]
        return Proposal(scores(logits), None, read if self._keeps else None)


def scores(logits: Tensor) -> Tensor:
    """Return logits in the precision that is computed with."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def nothing(rows: int, like: Tensor | None) -> Proposal:
    """Return the proposal that knows no token."""
    device = None if like is None else like.device
    wide = torch.float64 if like is not None and like.dtype == torch.float64 else torch.float32
    none = torch.full((rows, 1), -torch.inf, dtype=wide, device=device)
    # With ids, since the loop looks for rows that know no token in sparse proposals alone.
    return Proposal(none, torch.zeros(rows, 1, dtype=torch.int64, device=device))
