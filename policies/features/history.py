"""HISTORY features: what earlier rounds of the same sequence say, for the live loop's stream and replay's thousands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernels import on_first_use

Array = np.ndarray[Any, Any]

PAST_WEIGHT = 0.8
"""Weight of the past in the running means; the first round counts whole."""

HISTORY_FEATURES = ("mean_accepted", "mean_full", "last_accepted", "last_verified")

kernels = on_first_use("history")


@dataclass(frozen=True, slots=True)
class History:
    """Running record of S streams.

    Attributes:
        record: [S, 5] float64, the HISTORY features in the order of `HISTORY_FEATURES`, then the weight of the past in the
            running means, 1 - 0.8^n after n rounds.
    """

    record: Array

    @staticmethod
    def start(streams: int) -> History:
        """Return the history of fresh sequences: all zeros."""
        return History(np.zeros((streams, len(HISTORY_FEATURES) + 1)))

    def after(self, accepted: Array, verified: Array, active: Array | None = None, cut: Array | None = None) -> History:
        """Return the history after a round.

        Args:
            accepted, verified: [S] int64, min(A, k) and k.
            active: [S] bool, streams that had a round; None = all.
            cut: [S] bool, rounds that were cut short, which change nothing; None = none.
        """
        streams = len(self.record)
        active = np.ones(streams, dtype=np.bool_) if active is None else active
        cut = np.zeros(streams, dtype=np.bool_) if cut is None else cut
        after = np.empty(self.record.shape)
        kernels().add_round(self.record, accepted, verified, active, cut, PAST_WEIGHT, after)
        return History(after)

    def values(self, names: Sequence[str] = HISTORY_FEATURES) -> Array:
        """Return [S, len(names)] float32, the named HISTORY features; zeros before the first round."""
        out = np.empty((len(self.record), len(names)), dtype=np.float32)
        self.write(history_columns(names), np.arange(len(names)), out)
        return out

    def write(self, columns: Array, at: Array, out: Array) -> None:
        """Write features [S, n] at the places `at` [n] of `out` [S, .] float32; `columns` [n] are `history_columns`."""
        kernels().write_history(self.record, columns, at, out)


def history_columns(names: Sequence[str]) -> Array:
    """Return [n] int64, where HISTORY features stand in a record."""
    return np.array([HISTORY_FEATURES.index(name) for name in names], dtype=np.int64)
