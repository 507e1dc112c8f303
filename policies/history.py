"""HISTORY features: what earlier rounds of the same sequence say. One implementation for the live loop and for replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .contract import RoundOutcome

PAST_WEIGHT = 0.8
"""Weight of the past in the running means; the first round counts whole."""


@dataclass(frozen=True)
class History:
    """Running record of S streams; every tensor is [S]."""

    weight: Tensor
    accepted: Tensor
    full: Tensor
    last_accepted: Tensor
    last_verified: Tensor

    @staticmethod
    def start(streams: int, device: torch.device | str = "cpu") -> History:
        """Return the history of fresh sequences: all zeros."""
        return History(*(torch.zeros(streams, device=device) for _ in range(5)))

    def after(self, outcome: RoundOutcome) -> History:
        """Return the history after a round; streams without one, and rounds that were cut, change nothing."""
        counts = outcome.active & ~outcome.cut
        accepted, verified = outcome.accepted.float(), outcome.verified.float()
        full = (outcome.accepted == outcome.verified).float()
        keep = PAST_WEIGHT
        return History(
            torch.where(counts, keep * self.weight + 1 - keep, self.weight),
            torch.where(counts, keep * self.accepted + (1 - keep) * accepted, self.accepted),
            torch.where(counts, keep * self.full + (1 - keep) * full, self.full),
            torch.where(counts, accepted, self.last_accepted),
            torch.where(counts, verified, self.last_verified),
        )

    def values(self, names: Sequence[str]) -> Tensor:
        """Return [S, len(names)], the named HISTORY features; zeros before the first round."""
        scale = self.weight.clamp_min(1e-6)
        table = {
            "mean_accepted": lambda: self.accepted / scale,
            "mean_full": lambda: self.full / scale,
            "last_accepted": lambda: self.last_accepted,
            "last_verified": lambda: self.last_verified,
        }
        if not names:
            return self.weight.new_zeros(self.weight.shape[0], 0)
        return torch.stack([table[name]() for name in names], -1)
