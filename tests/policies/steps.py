"""Steps and outcomes of rounds from plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from specstop.policies.contract import Array, DraftStep, RoundOutcome


def draft_step(
    depth: int, features: Any, alive: Any = None, parent: Any = None, hidden: Any = None, batch: Any = None
) -> DraftStep:
    """Return a step with features [S, B, F]; by default all branches are alive and children of the first branch."""
    values = np.ascontiguousarray(features, dtype=np.float32)
    shape = values.shape[:2]
    mask = np.ones(shape, dtype=np.bool_) if alive is None else np.array(alive, dtype=np.bool_)
    parents = np.zeros(shape, dtype=np.int64) if parent is None else np.array(parent, dtype=np.int64)
    batches = np.arange(len(values)) if batch is None else np.array(batch)
    return DraftStep(depth, mask, parents, values, hidden or {}, batches)


def round_outcome(
    accepted: Sequence[int], drafted: Sequence[int], seconds: Any = 1.0, cut: Any = False, active: Any = True
) -> RoundOutcome:
    """Return the outcome of a round in which all drafted tokens were verified."""

    def by_stream(values: Any, dtype: type) -> Array:
        return np.broadcast_to(np.array(values, dtype=dtype), len(drafted)).copy()

    k = by_stream(drafted, np.int64)
    return RoundOutcome(
        by_stream(active, bool), k, k, by_stream(accepted, np.int64), by_stream(cut, bool), by_stream(seconds, float)
    )
