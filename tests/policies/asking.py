"""Steps and outcomes for policies, from plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from specstop.policies.contract import Array, DraftStep, RoundOutcome


def ask(depth: int, features: Any, alive: Any = None, parent: Any = None) -> DraftStep:
    """Return a step with features [S, B, F]; all branches are alive and come from the first one unless told otherwise."""
    shown = np.array(features, dtype=np.float32)
    shape = shown.shape[:2]
    there = np.ones(shape, dtype=np.bool_) if alive is None else np.array(alive, dtype=np.bool_)
    above = np.zeros(shape, dtype=np.int64) if parent is None else np.array(parent, dtype=np.int64)
    return DraftStep(depth, there, above, shown, {}, np.arange(len(shown)))


def tell(
    accepted: Sequence[int],
    drafted: Sequence[int],
    seconds: Sequence[float] | float = 1.0,
    cut: Sequence[bool] | bool = False,
    active: Sequence[bool] | bool = True,
) -> RoundOutcome:
    """Return how a round went of streams whose drafted tokens were all verified."""

    def each(values: Any, dtype: type) -> Array:
        return np.broadcast_to(np.array(values, dtype=dtype), len(drafted)).copy()

    k = each(drafted, np.int64)
    return RoundOutcome(
        each(active, np.bool_), k, k, each(accepted, np.int64), each(cut, np.bool_), each(seconds, np.float64)
    )
