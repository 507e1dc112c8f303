"""Running record of earlier rounds of S streams, from which HISTORY features are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .contract import Array
from .kernels import on_first_use

PAST_WEIGHT = 0.8
"""Weight of the past in the running means; the first round counts whole."""

HISTORY_FEATURES = ("mean_accepted", "mean_full", "last_accepted", "last_verified")

kernels = on_first_use("features")


@dataclass(frozen=True, slots=True)
class History:
    """Running record of S streams.

    Attributes:
        record: [S, 5] float64, `HISTORY_FEATURES`, then the weight of the past in the running means, 1 - 0.8^n after n
            rounds.
    """

    record: Array

    @staticmethod
    def start(streams: int) -> History:
        """Return the history of fresh sequences."""
        return History(np.zeros((streams, len(HISTORY_FEATURES) + 1)))

    def after(self, accepted: Array, verified: Array, active: Array | None = None, cut: Array | None = None) -> History:
        """Return the history after a round.

        Args:
            accepted, verified: [S] int64, min(A, k) and k.
            active: [S] bool, streams that had a round; None = all.
            cut: [S] bool, rounds cut by EOS or a length limit, which do not count; None = none.
        """
        streams = len(self.record)
        active = np.ones(streams, dtype=np.bool_) if active is None else active
        cut = np.zeros(streams, dtype=np.bool_) if cut is None else cut
        after = np.empty(self.record.shape)
        kernels().add_round(self.record, accepted, verified, active, cut, PAST_WEIGHT, after)
        return History(after)

    def values(self, names: Sequence[str] = HISTORY_FEATURES) -> Array:
        """Return the named features [S, len(names)] float32."""
        values: Array = self.record.take(history_columns(names), 1).astype(np.float32)
        return values


def history_columns(names: Sequence[str]) -> list[int]:
    """Return the columns of `History.record` that hold these features."""
    return [HISTORY_FEATURES.index(name) for name in names]
