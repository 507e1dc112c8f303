"""Decisions of learned policies: calibrated probabilities, the survival of each branch, and the threshold of the rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import copy_row, kernel, kernel_part


@kernel_part
def _calibrated(score: Any, pieces: Any) -> Any:
    """Return the value of a map at a score; see `Calibrator.pieces`."""
    if pieces.shape[0] == 1:
        return 1.0 / (1.0 + np.exp(-pieces[0, 0] * score))
    low, high = 0, pieces.shape[1] - 1  # the first bound that is not below the score; the last one is infinite
    while low < high:
        middle = (low + high) // 2
        if pieces[0, middle] < score:
            low = middle + 1
        else:
            high = middle
    return pieces[2, low] + pieces[3, low] * (score - pieces[1, low])


@kernel("void(float64[::1], float64[:,::1], float64[::1])")
def calibrate(scores: Any, pieces: Any, out: Any) -> None:
    """Write the values [n] of a map at n scores."""
    for i in range(scores.shape[0]):
        out[i] = _calibrated(scores[i], pieces)


@kernel(
    "void(float64[:,::1], boolean[:,::1], int64[:,::1], float64[:,::1], int64, int64, float64[:,::1], float64[:,::1], "
    "float64[:,::1], int64, boolean, boolean, float64[::1], float64[:,:,::1], boolean[:,::1])"
)
def decide(
    scores: Any, alive: Any, parent: Any, before: Any, depth: int, lag: int, accept: Any, next_: Any, table: Any, by: int,
    strict: bool, together: bool, threshold: Any, values: Any, kept: Any,
) -> None:  # fmt: skip
    """Write survival, accept and next of the branches of a depth [3, S, B] (0 where not alive), and which are `kept` [S, B].

    Args:
        scores: [R, 2] of the branches that are alive, in their order.
        before: [S, B'] survival of the depth before; empty = the product begins at this depth.
        depth, lag: down to the head's lag `accept` counts as 1; at depth 0 no token was drawn.
        accept, next_, table: maps of the scores, and of the product; an empty table = unchanged.
        by: compared value: 0, 1, 2 = row of `values`; 3 = survival times next.
        strict, together: see `rules.Rule`.
        threshold: [S], or [1] for all streams.
    """
    r = 0
    for s in range(alive.shape[0]):
        level, any_passes = threshold[s if threshold.shape[0] > 1 else 0], False
        for b in range(alive.shape[1]):
            kept[s, b] = False
            if not alive[s, b]:
                values[0, s, b] = values[1, s, b] = values[2, s, b] = 0.0
                continue
            chance = 1.0 if depth <= lag else _calibrated(scores[r, 0], accept)  # depth 0 too
            product = chance  # in float64, so that a long path of small chances keeps its digits
            if before.shape[1]:
                product *= before[s, parent[s, b]]
            if table.shape[1]:
                product = _calibrated(product, table)
            if depth == 0:
                product = chance = 1.0
            following = _calibrated(scores[r, 1], next_)
            values[0, s, b], values[1, s, b], values[2, s, b] = product, chance, following
            r += 1
            value = product * following if by == 3 else values[by, s, b]  # 3 = `rules.GAIN`
            kept[s, b] = value > level or (value == level and not strict)  # never at NaN
            any_passes = any_passes or kept[s, b]
        if together and any_passes:
            copy_row(alive[s], kept[s])
