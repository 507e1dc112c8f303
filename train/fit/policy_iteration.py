"""Policy iteration: heads are fitted on the rounds that the policy with these heads plays, until those settle.

Policies skip easy runs, so the anchors they visit are harder than the average one, and HISTORY features tell of the policy's
own play. Each fit changes both. The loop goes round until the visits stay where they are, or the rate on prompts
that were not fitted on stops rising; the best round by that rate wins, the last one need not be it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...policies.learned import ContinuationPolicy

MOST_ROUNDS = 4
SETTLED = 0.02
"""Share of the visits that may still move: below it another fit would see the same rounds."""

GAIN = 1e-3
"""Relative rise of the rate that one more round must have brought for another to be tried."""


@dataclass
class Iteration:
    """What came of each round so far.

    Attributes:
        policies: that were fitted.
        rates: their tokens per second on prompts that were not fitted on.
        moved: share of the visits that moved, against the round before; the first is against the start.
    """

    policies: list[ContinuationPolicy] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)

    def add(self, policy: ContinuationPolicy, rate: float, before: Tensor, after: Tensor) -> None:
        """Note a round: its policy and rate, and the visits [N] of each anchor of the training traces before and after it."""
        self.policies.append(policy)
        self.rates.append(rate)
        self.moved.append(distance(before, after))

    @property
    def is_over(self) -> bool:
        """Whether another fit would bring nothing."""
        # Two fits in a row without a gain: a single one may fall back while the visits still move.
        stalled = len(self.rates) > 2 and max(self.rates[-2:]) < (1.0 + GAIN) * max(self.rates[:-2])
        return self.moved[-1] < SETTLED or stalled

    @property
    def best(self) -> int:
        """The number of the best round, from 0."""
        return self.rates.index(max(self.rates))

    @property
    def made(self) -> ContinuationPolicy:
        """The policy of the best round."""
        return self.policies[self.best]


def distance(one: Tensor, other: Tensor) -> float:
    """Return the total variation between two distributions of visits over the same anchors: 0 the same, 1 none shared."""
    a, b = (v.double() / v.double().sum().clamp_min(1.0) for v in (one, other))
    return float(0.5 * (a - b).abs().sum())
