"""Steps and outcomes of rounds from plain lists, and damage of JSON values."""

from __future__ import annotations

import random
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


def json_places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every entry of nested lists and dictionaries."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *json_places(value[key]))]


ODD_VALUES = (
    None, True, -1, 0, -0.0, 3.5, 5e-324, 1e7, 1e308, 10**400, float("nan"), float("inf"), "", "0.004", "top1", "learned",
    "os:system", "/etc/passwd", "\x1b[2J", "\ud800", [], {}, ["top1"], [[[]]], [1] * 5000, [1e-3, float("nan")],
    [[0, 1e-3], [0, 1e-3]], [[2**40, 1e-3]], {"each": -1, "opening": 0}, {"__reduce__": "os.system"},
)  # fmt: skip


def damage_json(value: Any, rng: random.Random) -> None:
    """Remove, add or replace an entry of nested lists and dictionaries."""
    holder, key = rng.choice(json_places(value))
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(["code", "__class__", key + "x"])] = rng.choice(ODD_VALUES)
    else:
        holder[key] = rng.choice(ODD_VALUES)
