"""HISTORY features: what earlier rounds of the same sequence say. One implementation for the live loop and for replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .contract import RoundOutcome

PAST_WEIGHT = 0.8
"""Weight of the past in the running means; the first round counts whole."""

HISTORY_FEATURES = ("mean_accepted", "mean_full", "last_accepted", "last_verified")
_PAST = (PAST_WEIGHT, PAST_WEIGHT, PAST_WEIGHT, 0.0, 0.0)


class History:
    """Running record of S streams.

    Args:
        record: [S, 5]: weight of the running means, the weighted sums of min(A, k) and of full acceptance, and min(A, k)
            and k of the last round.
    """

    def __init__(self, record: Tensor) -> None:
        self.record = record
        self._past = torch.tensor(_PAST, device=record.device)

    @staticmethod
    def start(streams: int, device: torch.device | str = "cpu") -> History:
        """Return the history of fresh sequences: all zeros."""
        return History(torch.zeros(streams, 5, device=device))

    def after(self, outcome: RoundOutcome) -> History:
        """Return the history after a round; streams without one, and rounds that were cut, change nothing."""
        accepted, verified = outcome.accepted.float(), outcome.verified.float()
        full = (outcome.accepted == outcome.verified).float()
        news = torch.stack([torch.ones_like(full), accepted, full, accepted, verified], -1)
        record = torch.lerp(news, self.record, self._past)
        return History(torch.where((outcome.active & ~outcome.cut)[:, None], record, self.record))

    def values(self, names: Sequence[str] = HISTORY_FEATURES) -> Tensor:
        """Return [S, len(names)], the named HISTORY features; zeros before the first round."""
        if not names:
            return self.record[:, :0]
        means = self.record[:, 1:3] / self.record[:, :1].clamp_min(1e-6)
        table = torch.cat([means, self.record[:, 3:]], -1)
        if tuple(names) == HISTORY_FEATURES:
            return table
        return table[:, [HISTORY_FEATURES.index(name) for name in names]]
