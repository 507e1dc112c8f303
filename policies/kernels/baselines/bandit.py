"""What a bandit learns of a round, and the arm it tries next (`policies.baselines.bandit`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import exact, kernel

_TINY = 1e-30  # in the place of 0 where something is divided by it


@kernel(
    "void(boolean[::1], boolean[::1], int64[::1], int64[::1], int64[::1], float64[::1], float64, int64[::1], "
    "float64[:,::1], float64[:,:,::1])"
)
def add_reward(
    active: Any, cut: Any, accepted: Any, drafted: Any, verified: Any, seconds: Any, nominal: float, choice: Any, pulls: Any,
    sums: Any,
) -> None:  # fmt: skip
    """Add a round to what is known of the arm that decided it.

    Args:
        active, cut, accepted, drafted, verified, seconds: [S] of the round.
        nominal: what a drafted token counts in shares of a round, where a round has no seconds.
        choice: [S] the arm that decided.
        pulls: [S, A] rounds of each arm; changed in place.
        sums: [S, A, 5] of tokens t, seconds s, t t, t s and s s; changed in place.
    """
    for s in range(choice.shape[0]):
        # A round that the end of the text cut short says nothing of the arm; nor does one whose tokens were all left out.
        if not active[s] or cut[s] or (verified[s] == 0 and drafted[s] > 0):
            continue
        tokens = accepted[s] + 1.0
        spent = seconds[s] if seconds[s] > 0.0 else 1.0 + nominal * drafted[s]
        pulls[s, choice[s]] += 1.0
        arm = sums[s, choice[s]]
        arm[0] += tokens
        arm[1] += spent
        arm[2] += tokens * tokens
        arm[3] += tokens * spent
        arm[4] += spent * spent


@exact
def _by_bonus(pulls: Any, sums: Any, explore: Any) -> Any:
    """Return the arm of the largest share of the best rate and bonus; one that was not tried comes first."""
    total, best_rate = 0.0, _TINY
    for a in range(pulls.shape[0]):
        total += pulls[a]
        best_rate = max(best_rate, sums[a, 0] / max(sums[a, 1], _TINY))
    best, most = 0, -np.inf
    for a in range(pulls.shape[0]):
        if pulls[a] == 0.0:
            return a
        # In shares of the best rate: the bonus is that of rewards between 0 and 1, whatever a second is worth.
        rate = sums[a, 0] / max(sums[a, 1], _TINY)
        worth = rate / best_rate + explore * np.sqrt(np.log(max(total, 1.0)) / pulls[a])
        if worth > most:
            best, most = a, worth
    return best


@exact
def _by_draw(pulls: Any, sums: Any, explore: Any, normals: Any) -> Any:
    """Return the arm of the largest draw around its rate; one that was not tried comes first."""
    best, most = 0, -np.inf
    for a in range(pulls.shape[0]):
        if pulls[a] == 0.0:
            return a
        seconds = max(sums[a, 1], _TINY)
        rate = sums[a, 0] / seconds
        # The variance of tokens - rate x seconds, with one round's worth of a token squared before any is seen.
        spread = max(sums[a, 2] - 2.0 * rate * sums[a, 3] + rate * rate * sums[a, 4], 0.0) + 1.0
        # The deviation of a ratio of sums by the delta method: that of tokens - rate x seconds, over the seconds.
        worth = rate + explore * (np.sqrt(spread) / seconds) * normals[a]
        if worth > most:
            best, most = a, worth
    return best


@kernel("void(boolean[::1], float64[:,::1], float64[:,:,::1], float64, float64[:,::1], int64[::1])")
def choose(active: Any, pulls: Any, sums: Any, explore: float, normals: Any, choice: Any) -> None:
    """Choose the arm of the next round for the streams that had one.

    Args:
        active: [S].
        pulls, sums: see `add_reward`.
        explore: how much what is not known well counts.
        normals: [S, A] draws; without columns the bonus of UCB decides.
        choice: [S]; changed in place.
    """
    for s in range(choice.shape[0]):
        if active[s] and normals.shape[1]:
            choice[s] = _by_draw(pulls[s], sums[s], explore, normals[s])
        elif active[s]:
            choice[s] = _by_bonus(pulls[s], sums[s], explore)
