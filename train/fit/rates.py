"""On which prompts the rates are taken that a rule is settled by, and with which heads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...policies.contract import StopPolicy
from ...policies.heads.base import Head
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ..heads.crossfit import Folds
from ..replay.run import replay_many
from ..replay.traces.arrays import TraceArrays

Rates = Callable[[Sequence[LearnedPolicy]], list[float]]
"""Gives the tokens per second of policies that differ in their rule only."""


@dataclass(frozen=True)
class Part:
    """Training prompts, and the head that plays them.

    A head of many weights knows its own prompts so well that there every decision seems to pay, the first above all.

    Attributes:
        arrays: traces of the prompts.
        head: one that was fitted without them; None = a policy's own.
    """

    arrays: TraceArrays
    head: Head | None = None

    def player(self, policy: StopPolicy) -> StopPolicy:
        """Return a policy as it plays these prompts, no deeper than they were drafted."""
        if self.head is not None and isinstance(policy, LearnedPolicy):
            policy = copy.copy(policy)
            policy.head = self.head
        return policy.limited(self.arrays.depth)


def left_out_parts(arrays: TraceArrays, folds: Folds, heads: Sequence[Head]) -> list[Part]:
    """Return the prompts fold by fold, each fold with the head that was fitted without it.

    Args:
        arrays: traces.
        folds: of its prompts.
        heads: of each fold; if there is a single head, of the first fold, which is then the only part.
    """
    return [Part(arrays.subset(folds.sequences(fold)), head) for fold, head in enumerate(heads)]


def replayed_rates(parts: Sequence[Part], profile: Profile) -> Rates:
    """Return the rates of policies on all parts together."""

    def rates(policies: Sequence[LearnedPolicy]) -> list[float]:
        tokens, seconds = np.zeros((2, len(policies)))
        for part in parts:
            played = replay_many(part.arrays, [part.player(policy) for policy in policies], profile)
            tokens += [float(one.tokens.sum()) for one in played]
            seconds += [float(one.seconds.sum()) for one in played]
        return [float(rate) for rate in tokens / seconds]  # a ratio of sums, as one replay of all would have it

    return rates
