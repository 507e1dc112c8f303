"""HISTORY features: what earlier rounds of the same sequence say. One implementation for the live loop and for replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAST_WEIGHT = 0.8
"""Weight of the past in the running means; the first round counts whole."""

HISTORY_FEATURES = ("mean_accepted", "mean_full", "last_accepted", "last_verified")
_PLACE = {name: place for place, name in enumerate(HISTORY_FEATURES)}


class History:
    """Running record of S streams.

    Kept in float64 and by the same operations as `HistoryOne`, so that the two agree to the last bit: a boosted tree splits
    at values that were seen, where the least difference decides.

    Args:
        record: [S, 4] float64, the HISTORY features in the order of `HISTORY_FEATURES`.
        weight: [S] float64, of the past in the running means, 1 - 0.8^n after n rounds.
    """

    def __init__(self, record: Tensor, weight: Tensor) -> None:
        self.record, self.weight = record, weight

    @staticmethod
    def start(streams: int, device: torch.device | str = "cpu") -> History:
        """Return the history of fresh sequences: all zeros."""
        record = torch.zeros(streams, 4, dtype=torch.float64, device=device)
        return History(record, torch.zeros_like(record[:, 0]))

    def after(self, accepted: Tensor, verified: Tensor, counts: Tensor | None = None) -> History:
        """Return the history after a round.

        Args:
            accepted, verified: [S] min(A, k) and k.
            counts: [S] bool; False for streams without a round and for rounds that were cut, which change nothing.
        """
        accepted, verified = accepted.double(), verified.double()
        weight = PAST_WEIGHT * self.weight + (1.0 - PAST_WEIGHT)
        share = ((1.0 - PAST_WEIGHT) / weight)[:, None]
        news = torch.stack([accepted, (accepted == verified).double(), accepted, verified], -1)
        means = self.record[:, :2]
        means = means + share * (news[:, :2] - means)
        record = torch.cat([means, news[:, 2:]], -1)
        if counts is not None:
            record = torch.where(counts[:, None], record, self.record)
            weight = torch.where(counts, weight, self.weight)
        return History(record, weight)

    def values(self, names: Sequence[str] = HISTORY_FEATURES) -> Tensor:
        """Return [S, len(names)] float32, the named HISTORY features; zeros before the first round."""
        if tuple(names) == HISTORY_FEATURES[: len(names)]:
            return self.record[:, : len(names)].float()
        return self.record[:, [HISTORY_FEATURES.index(name) for name in names]].float()


class HistoryOne:
    """`History` of one stream in plain numbers: a dozen tensor operations a round would cost more than the decision."""

    def __init__(self) -> None:
        self.record = [0.0] * len(HISTORY_FEATURES)
        self._weight = 0.0

    def add(self, accepted: int, verified: int) -> None:
        """Take in a round that was not cut."""
        self._weight = PAST_WEIGHT * self._weight + (1.0 - PAST_WEIGHT)
        share = (1.0 - PAST_WEIGHT) / self._weight
        mean, full, *_ = self.record
        mean += share * (accepted - mean)
        full += share * ((accepted == verified) - full)
        self.record = [mean, full, float(accepted), float(verified)]

    def values(self, names: Sequence[str]) -> list[float]:
        """Return the named HISTORY features."""
        return [self.record[_PLACE[name]] for name in names]
