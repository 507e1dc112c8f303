"""Lengths and levels that follow how rounds went (`policies.baselines.adaptive`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import kernel
from ..features import known_depths


@kernel(
    "void(boolean[::1], boolean[::1], int64[::1], int64[::1], float64, float64, float64, float32[::1], float32[::1])"
)
def move_length(
    active: Any, cut: Any, accepted: Any, verified: Any, up: float, down: float, most: float, length: Any,
    length_after: Any,
) -> None:  # fmt: skip
    """Move the lengths after a round: up where all was accepted, else down.

    Args:
        active, cut, accepted, verified: [S] of the round.
        up, down: steps.
        most: the largest length; the least is 1.
        length: [S].
        length_after: is written.
    """
    for s in range(length.shape[0]):
        length_after[s] = length[s]
        if known_depths(active[s], cut[s], accepted[s], verified[s]):
            # In float32 as the state is: the next round must not depend on whether it was stored between.
            moved = length[s] + np.float32(up) if accepted[s] == verified[s] else length[s] - np.float32(down)
            length_after[s] = min(max(moved, 1.0), most)


@kernel(
    "void(boolean[::1], boolean[::1], int64[::1], int64[::1], float64[::1], float64[::1], float64[::1], float64[::1], "
    "float64[::1], float32[::1])"
)
def move_level(
    active: Any, cut: Any, accepted: Any, verified: Any, constants: Any, level: Any, rate: Any, level_after: Any,
    rate_after: Any, most: Any,
) -> None:  # fmt: skip
    """Move the levels after a round.

    Args:
        active, cut, accepted, verified: [S] of the round.
        constants: alpha, eps, b1, b2 and gamma.
        level: [S] lambda.
        rate: [S] the running share of accepted tokens.
        level_after, rate_after: are written.
        most: [S] the entropy at which the bound is the level, is written.
    """
    alpha, eps, b1, b2, gamma = constants[0], constants[1], constants[2], constants[3], constants[4]
    for s in range(level.shape[0]):
        level_after[s], rate_after[s] = level[s], rate[s]
        if known_depths(active[s], cut[s], accepted[s], verified[s]):  # which is none where nothing was verified
            share = b1 * rate[s] + (1.0 - b1) * accepted[s] / verified[s]
            aim = level[s] + eps if share <= alpha else level[s] - eps
            level_after[s] = min(max(b2 * level[s] + (1.0 - b2) * aim, 0.0), 1.0)
            rate_after[s] = share
        most[s] = (1.0 - level_after[s]) * (1.0 - level_after[s]) / gamma
