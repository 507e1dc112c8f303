"""HISTORY features: what earlier rounds of the same sequence say, for the live loop's stream and replay's thousands."""

from __future__ import annotations

import functools
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
        record: [S, 4] float64, the HISTORY features in the order of `HISTORY_FEATURES`.
        weight: [S] float64, of the past in the running means, 1 - 0.8^n after n rounds.
    """

    record: Array
    weight: Array

    @staticmethod
    def start(streams: int) -> History:
        """Return the history of fresh sequences: all zeros."""
        return History(np.zeros((streams, len(HISTORY_FEATURES))), np.zeros(streams))

    def after(self, accepted: Array, verified: Array, counts: Array | None = None) -> History:
        """Return the history after a round.

        Args:
            accepted, verified: [S] int64, min(A, k) and k.
            counts: [S] bool; False for streams without a round and for rounds that were cut, which change nothing.
        """
        if counts is None:
            counts = np.ones(len(self.weight), dtype=np.bool_)
        after = History(np.empty_like(self.record), np.empty_like(self.weight))
        kernels().add_round(
            self.record, self.weight, accepted, verified, counts, PAST_WEIGHT, after.record, after.weight
        )
        return after

    def values(self, names: Sequence[str] = HISTORY_FEATURES) -> Array:
        """Return [S, len(names)] float32, the named HISTORY features; zeros before the first round."""
        return self.record.take(_columns(tuple(names)), 1).astype(np.float32)


@functools.cache
def _columns(names: tuple[str, ...]) -> Array:
    return np.array([HISTORY_FEATURES.index(name) for name in names], dtype=np.int64)
