"""On which prompts the rates are taken that a rule is settled by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...policies.latency.profile import Profile
from ...policies.learned.policy import LearnedPolicy
from ..heads.crossfit import Folds
from ..replay.run import replay_many
from ..replay.traces.arrays import TraceArrays

Rates = Callable[[Sequence[LearnedPolicy]], list[float]]
"""Gives the tokens per second of policies that differ in their rule only."""


def replayed_rates(arrays: TraceArrays, profile: Profile) -> Rates:
    """Return the rates of policies on all prompts of a trace, no deeper than it goes."""

    def rates(policies: Sequence[LearnedPolicy]) -> list[float]:
        limited = [policy.limited(arrays.depth) for policy in policies]
        return [played.rate for played in replay_many(arrays, limited, profile)]

    return rates


def left_out_rates(arrays: TraceArrays, folds: Folds, drafts: Sequence[LearnedPolicy], profile: Profile) -> Rates:
    """Return the rates of policies on prompts that their heads were not fitted on, the first fold apart.

    A head of many weights knows its own prompts so well that there every decision seems to pay, the first above all.

    Args:
        arrays: traces.
        folds: of its prompts; the first is left for measuring.
        drafts: for each fold a policy whose head was fitted without it. One alone plays all the prompts it was fitted on.
        profile: what rounds cost.
    """
    if len(drafts) == 1:
        return replayed_rates(arrays.subset(folds.sequences(0, inside=False)), profile)
    parts = [arrays.subset(folds.sequences(fold)) for fold in range(1, folds.count)]

    def rates(policies: Sequence[LearnedPolicy]) -> list[float]:
        tokens, seconds = np.zeros((2, len(policies)))
        # Policies differ in their rule only: each fold's prompts are played by the head that was fitted without them.
        for draft, part in zip(drafts[1:], parts, strict=True):
            played = replay_many(part, [draft.with_rule(policy.rule) for policy in policies], profile)
            tokens += [float(one.tokens.sum()) for one in played]
            seconds += [float(one.seconds.sum()) for one in played]
        return [float(rate) for rate in tokens / seconds]  # a ratio of sums, as one replay of all would have it

    return rates
