"""The logistic model of acceptance that a batch learns while decoding: one slope, an intercept a depth (`joint.budgets`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import copy_row, exact, kernel
from .features import known_depths


@kernel("void(int64[::1], int64[::1], int64[::1], float64[:,::1], float64[:,::1])")
def share_latest(members: Any, starts: Any, updates: Any, weights: Any, out: Any) -> None:
    """Write to the streams of each batch the weights of the one that was fitted most often: others may have paused.

    Args:
        members [M], starts [G + 1]: of the batches; see `kernels.batches`.
        updates: [S].
        weights, out: [S, 1 + K].
    """
    for g in range(starts.shape[0] - 1):
        mine = members[starts[g] : starts[g + 1]]
        latest = mine[0]
        for i in range(mine.shape[0]):
            if updates[mine[i]] > updates[latest]:
                latest = mine[i]
        for i in range(mine.shape[0]):
            copy_row(weights[latest], out[mine[i]])


@kernel("void(boolean[:,::1], float32[:,:,::1], int64, float64, float64[:,::1])")
def note_odds(alive: Any, features: Any, depth: int, most: float, odds: Any) -> None:
    """Write the log-odds of a depth: of each stream's branch whose likeliest token is the likeliest; infinite without one.

    Args:
        alive: [S, B].
        features: [S, B, 1], the probability of the likeliest token.
        depth: j, 1 or more.
        most: at which log-odds are clipped.
        odds: [S, K], is written.
    """
    for s in range(alive.shape[0]):
        chance = -1.0
        for b in range(alive.shape[1]):
            if alive[s, b]:
                chance = max(chance, np.float64(features[s, b, 0]))
        odds[s, depth - 1] = np.inf
        if chance >= 0.0:
            # A chance of 1 divides by 0 and one of 0 has the logarithm of 0: infinite either way, and then clipped.
            odds[s, depth - 1] = min(max(np.log(chance / (1.0 - chance)), -most), most)


@kernel("void(float64[:,::1], float64[:,::1], float64[:,::1], float64[:,::1])")
def say_confidences(odds: Any, weights: Any, stale: Any, out: Any) -> None:
    """Write the confidences of depths by their odds; of those not seen by the odds before them, or as they were before.

    Args:
        odds: [S, K]; infinite = not seen.
        weights: [S, 1 + K].
        stale: [S, K] of the round before.
        out: [S, K].
    """
    for s in range(odds.shape[0]):
        z = np.inf
        for k in range(odds.shape[1]):
            if not np.isinf(odds[s, k]):
                z = odds[s, k]
            out[s, k] = stale[s, k] if np.isinf(z) else 1.0 / (1.0 + np.exp(-(weights[s, 0] * z + weights[s, 1 + k])))


@exact
def _newton_step(sums: Any, ridge: Any, damping: Any, weights: Any) -> None:
    """Take a damped Newton step.

    Args:
        sums: [K, 6], see `joint.budgets.AcceptanceState`.
        ridge, damping: see `joint.budgets.AdaptiveVerification`.
        weights: [1 + K], is written.
    """
    # Newton on slope w and intercepts b_k. The curvature is diagonal but for the row and column of w: the b_k are eliminated
    # (`slope` is the Schur complement of w), then found by substitution. Damping is by the tokens that a number rests on.
    depths = sums.shape[0]
    slope, level, total = ridge, 0.0, 0.0
    for k in range(depths):
        c = sums[k, 2] + ridge
        slope += sums[k, 0] - sums[k, 1] * sums[k, 1] / c
        level += sums[k, 3] - sums[k, 1] * sums[k, 4] / c
        total += sums[k, 5]
    step = level / slope * total / (total + damping)
    # With a slope below 0 a surer draft would count as less acceptable. `not` holds back a NaN too.
    if not weights[0] + step >= 0.0:
        step = 0.0
    weights[0] += step
    for k in range(depths):
        c, n = sums[k, 2] + ridge, sums[k, 5]
        weights[1 + k] += (sums[k, 4] - sums[k, 1] * step) / c * n / (n + damping)


@kernel(
    "void(boolean[::1], boolean[::1], int64[::1], int64[::1], float64[:,::1], float64[::1], int64[::1], int64[::1], "
    "float64[:,::1], int64[::1], int64[::1], float64[:,:,::1])"
)
def learn(
    active: Any, cut: Any, accepted: Any, verified: Any, odds: Any, constants: Any, members: Any, starts: Any, weights: Any,
    updates: Any, rounds: Any, sums: Any,
) -> None:  # fmt: skip
    """Take in a round, and fit the batches anew that it is time for.

    Args:
        active, cut, accepted, verified: [S] of the round.
        odds: [S, K] by depth; infinite = not seen.
        constants: rounds between fits, ridge, damping.
        members [M], starts [G + 1]: of the batches; see `kernels.batches`.
        weights, updates, rounds, sums: of `joint.budgets.AcceptanceState`, are written.
    """
    depths = odds.shape[1]
    for s in range(odds.shape[0]):
        for k in range(min(known_depths(active[s], cut[s], accepted[s], verified[s]), depths)):
            z = odds[s, k]
            if np.isinf(z):
                continue
            chance = 1.0 / (1.0 + np.exp(-(weights[s, 0] * z + weights[s, 1 + k])))
            # Gradient and curvature at the weights of the last fit, which all streams of the batch have (`share_latest`).
            w, rest = chance * (1.0 - chance), (1.0 if k < accepted[s] else 0.0) - chance
            sums[s, k, 0] += w * z * z
            sums[s, k, 1] += w * z
            sums[s, k, 2] += w
            sums[s, k, 3] += rest * z
            sums[s, k, 4] += rest
            sums[s, k, 5] += 1.0
    whole = np.empty((depths, 6))
    for g in range(starts.shape[0] - 1):
        mine = members[starts[g] : starts[g + 1]]
        since = 0
        for i in range(mine.shape[0]):
            rounds[mine[i]] += 1
            since = max(since, rounds[mine[i]])
        if since < constants[0]:
            continue
        for k in range(depths):
            # In the order of the members, not of rows: the last bits are the same wherever the streams stand.
            for j in range(whole.shape[1]):
                whole[k, j] = 0.0
                for i in range(mine.shape[0]):
                    whole[k, j] += sums[mine[i], k, j]
                    sums[mine[i], k, j] = 0.0
        latest = weights[mine[0]]  # a view, written in place
        _newton_step(whole, constants[1], constants[2], latest)
        count = updates[mine[0]]
        for i in range(mine.shape[0]):
            count = max(count, updates[mine[i]])
        for i in range(mine.shape[0]):
            if i > 0:
                copy_row(latest, weights[mine[i]])
            updates[mine[i]] = count + 1
            rounds[mine[i]] = 0
