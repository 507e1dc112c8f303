"""A live trace as logged feedback on one policy: what its rounds show, how likely they were to show it, and a regression."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...policies.contract import Array
from ...policies.profile import Profile
from ..replay.traces.arrays import TraceArrays
from .estimators import ESTIMATORS, Terms
from .rewards import predicted
from .rounds import Shown, recorded_rounds


@dataclass(frozen=True)
class Feedback:
    """n rounds. A policy's value is what would be seen if every round showed what it needs.

    Attributes:
        seen: [n] bool, the round shows it.
        weight: [n] 1 / chance that it does, where seen; else 0.
        rewards: [n] by name, tokens and seconds; 0 where not seen.
        models: [n] by name, the regression's rewards.
        own: [n] by name, what the logging policy's own rounds brought; 0 where that is unknown.
        by_coin: [n] bool, the round shows the policy only if it explores.
        is_explored_only: the logging policy is unknown, so that the coin alone says what is seen.
    """

    seen: Array
    weight: Array
    rewards: dict[str, Array]
    models: dict[str, Array]
    own: dict[str, Array]
    by_coin: Array
    is_explored_only: bool

    @property
    def by_exploration(self) -> Array:
        """[n] bool, seen because the round explored and for no other reason."""
        return self.by_coin & self.seen

    def terms(self, estimator: str, reward: str) -> Terms:
        """Return the [n] numerators and [n] denominators of one of `ESTIMATORS`, of one of the rewards."""
        model = self.models[reward]
        return ESTIMATORS[estimator](self.rewards[reward], self.weight, model, model * self.seen)


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
    rewards = {"tokens": shown.tokens * seen, "seconds": shown.seconds * seen}
    return Feedback(
        seen=seen,
        weight=np.divide(1.0, seeing, out=np.zeros(len(seen)), where=seen),
        rewards=rewards,
        models={name: predicted(arrays, base, reward, seen, by_coin, seed) for name, reward in rewards.items()},
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
