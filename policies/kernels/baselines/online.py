"""The logistic model of acceptance that is learned while decoding (`policies.baselines.online`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import copy_row, exact, kernel
from ..features import known_depths

_EDGE = 1e-3  # of a probability: log-odds stay within +-7, so that no token outweighs hundreds


@exact
def _sigmoid(value: Any) -> Any:
    """Return 1 / (1 + e^-value), without overflow."""
    if value >= 0.0:  # either form overflows on the other side
        return 1.0 / (1.0 + np.exp(-value))
    return np.exp(value) / (1.0 + np.exp(value))


@kernel(
    "void(float32[:,:,::1], boolean[:,::1], int64[:,::1], int64, boolean, float64[:,::1], float64[:,::1], float64[:,::1], "
    "float64[:,::1], float64[:,::1])"
)
def survive(
    features: Any, alive: Any, parent: Any, depth: int, begins: bool, weights: Any, before: Any, seen: Any, survival: Any,
    seen_after: Any,
) -> None:  # fmt: skip
    """Follow the product of modelled acceptance probabilities, and note the best log-odds of the depth.

    Args:
        features: [S, B, 1] probabilities.
        alive, parent: [S, B].
        depth: j, from 1 on.
        begins: the product begins here.
        weights: [S, 2] slope and intercept.
        before: [S, B'] the product at the depth before.
        seen: [S, K] log-odds that were noted of this round; infinite = not asked.
        survival: [S, B] is written; 0 where a branch is not alive.
        seen_after: is written.
    """
    for s in range(alive.shape[0]):
        copy_row(seen[s], seen_after[s])
        most = -np.inf
        for b in range(alive.shape[1]):
            survival[s, b] = 0.0
            if not alive[s, b]:
                continue
            chance = min(max(np.float64(features[s, b, 0]), _EDGE), 1.0 - _EDGE)
            odds = np.log(chance / (1.0 - chance))
            most = max(most, odds)
            survival[s, b] = _sigmoid(weights[s, 0] * odds + weights[s, 1])
            if not begins:
                survival[s, b] *= before[s, parent[s, b]]
        if most > -np.inf:
            seen_after[s, depth - 1] = most


@kernel(
    "void(boolean[::1], boolean[::1], int64[::1], int64[::1], float64, float64[:,::1], float64[:,::1], float64[:,::1], "
    "float64[:,::1], float64[:,::1])"
)
def take_step(
    active: Any, cut: Any, accepted: Any, verified: Any, decay: float, weights: Any, precision: Any, seen: Any,
    weights_after: Any, precision_after: Any,
) -> None:  # fmt: skip
    """Take a Newton step on the accept bits of a round.

    Args:
        active, cut, accepted, verified: [S] of the round.
        decay: of the precision.
        weights: [S, 2] slope and intercept.
        precision: [S, 3] of the slope, of both, of the intercept.
        seen: [S, K] log-odds by depth; infinite = not asked.
        weights_after, precision_after: are written.
    """
    for s in range(weights.shape[0]):
        slope, level = weights[s, 0], weights[s, 1]
        a, b, d = decay * precision[s, 0], decay * precision[s, 1], decay * precision[s, 2]
        to_slope, to_level, some = 0.0, 0.0, False
        for j in range(min(known_depths(active[s], cut[s], accepted[s], verified[s]), seen.shape[1])):
            odds = seen[s, j]
            if not np.isfinite(odds):  # the policy was not asked at this depth, so has nothing to learn there
                continue
            some = True
            chance = _sigmoid(slope * odds + level)
            error, spread = (1.0 if j < accepted[s] else 0.0) - chance, chance * (1.0 - chance)
            # Curvature and slope at the weights from before the round, so that the order of depths does not count.
            a, b, d = a + spread * odds * odds, b + spread * odds, d + spread
            to_slope, to_level = to_slope + error * odds, to_level + error
        copy_row(weights[s], weights_after[s])
        copy_row(precision[s], precision_after[s])
        if some:  # the system of two unknowns, by determinants: a decayed prior keeps it positive
            size = a * d - b * b
            weights_after[s, 0] = slope + (d * to_slope - b * to_level) / size
            weights_after[s, 1] = level + (a * to_level - b * to_slope) / size
            precision_after[s, 0], precision_after[s, 1], precision_after[s, 2] = a, b, d
