"""A live trace as logged feedback on one policy, in the words of Open Bandit Pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...policies.latency.profile import Profile
from ..replay.traces.arrays import TraceArrays
from .rewards import predicted
from .rounds import Shown, recorded_rounds

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Feedback:
    """n rounds; action 1 = the round shows what the policy needs, 0 = it does not.

    Attributes:
        action, pscore: [n]; `pscore` is the chance of the action taken.
        action_dist: [n, 2, 1], all on action 1: the value of the policy is what would be seen if every round showed it.
        rewards: [n] by name, tokens and seconds; 0 where not seen.
        models: [n, 2, 1] by name, the regression's rewards.
        own: [n] by name, what the logging policy's own rounds brought; 0 where that is unknown.
        by_coin: [n] bool, the round shows the policy only if it explores.
        is_explored_only: the logging policy is unknown, so that the coin alone says what is seen.
    """

    action: Array
    pscore: Array
    action_dist: Array
    rewards: dict[str, Array]
    models: dict[str, Array]
    own: dict[str, Array]
    by_coin: Array
    is_explored_only: bool

    @property
    def by_exploration(self) -> Array:
        """[n] bool, seen because the round explored and for no other reason."""
        return self.by_coin & (self.action > 0)


def logged_feedback(arrays: TraceArrays, shown: Shown, base: Shown | None, profile: Profile, seed: int = 0) -> Feedback:
    """Return the trace as feedback on a policy.

    Args:
        arrays: with `extra=rounds.COLUMNS`.
        shown: what the trace shows of the policy.
        base: what it shows of the logging policy; None = unknown.
        profile: what rounds cost.
        seed: of the regression's folds.
    """
    explored, share = arrays.extra["explored"].numpy().astype(bool), arrays.header.explore
    seen, is_explored_only = shown.seen, False
    if base is not None:
        # An explored round owes it to the coin if the logging policy alone would not have gone as deep; one that did not
        # explore and is not seen would have been, had it explored.
        by_coin = np.where(explored, ~base.reaches(shown), ~seen)
    elif share:  # whatever the other rounds happen to show: weights must not depend on how the coin fell
        by_coin, seen, is_explored_only = np.ones(len(seen), dtype=bool), seen & explored, True
    else:
        by_coin = ~seen
    seeing = np.where(by_coin, share, 1.0)  # the chance that the round shows the policy
    dist = np.zeros((len(seen), 2, 1))
    dist[:, 1] = 1.0
    rewards = {"tokens": shown.tokens * seen, "seconds": shown.seconds * seen}
    models = {}
    for name, reward in rewards.items():
        model = np.zeros_like(dist)
        model[:, 1, 0] = predicted(arrays, base, reward, seen, by_coin, seed)
        models[name] = model
    return Feedback(
        action=seen.astype(np.int64),
        pscore=np.where(seen, seeing, 1.0 - seeing),
        action_dist=dist,
        rewards=rewards,
        models=models,
        own=_own(arrays, base, explored, profile),
        by_coin=by_coin,
        is_explored_only=is_explored_only,
    )


def _own(arrays: TraceArrays, base: Shown | None, explored: Array, profile: Profile) -> dict[str, Array]:
    """Return tokens and seconds of the logging policy: of all rounds where it is known, else of those left to it."""
    if base is not None:
        return {"tokens": base.tokens, "seconds": base.seconds}
    tokens, seconds = recorded_rounds(arrays, profile)
    # Explored rounds are not the logging policy's own; where all explored there are no others.
    alone = np.ones(len(explored), dtype=bool) if explored.all() else ~explored
    return {"tokens": tokens * alone, "seconds": seconds * alone}
