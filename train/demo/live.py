"""Policies live, side by side: predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...decode.records import Generation, Tally
from ...policies.contract import StopPolicy
from ...policies.profile import Profile
from ..replay.arrays import TraceArrays
from ..replay.run import replay


@dataclass(frozen=True)
class LiveLine:
    """One policy, live.

    Attributes:
        name: of the policy.
        tally: its sums.
        measured, predicted: tokens/s as ratio to the first policy, in this run and by replay.
        spread: quartiles over prompts of the measured ratio.
        same_text: prompts whose text equals the first policy's; None where texts hang on what is drafted.
    """

    name: str
    tally: Tally
    measured: float
    predicted: float
    spread: tuple[float, float]
    same_text: int | None

    @property
    def miss(self) -> float:
        """Measured over predicted, less 1."""
        return self.measured / self.predicted - 1.0


def compare_live(
    generations: Sequence[Sequence[Generation]],
    policies: Sequence[StopPolicy],
    arrays: TraceArrays,
    profile: Profile,
) -> list[LiveLine]:
    """Set measured beside predicted, both as ratios to the first policy.

    Args:
        generations: of `decode.benchmark.run_alternating`.
        policies: the same.
        arrays: the traces of exactly those prompts; where replay is exact in law alone, rather those of more.
        profile: of this machine.
    """
    predicted = [replay(arrays, policy, profile).rate for policy in policies]
    seconds = np.array([[g.seconds for g in row] for row in generations])
    tokens = np.array([[len(g.tokens) for g in row] for row in generations])
    # Total tokens over total time; single prompts are for the spread alone.
    rate, each = tokens.sum(1) / seconds.sum(1), tokens / seconds
    lines = []
    for index, (policy, row) in enumerate(zip(policies, generations, strict=True)):
        low, high = np.quantile(each[index] / each[0], [0.25, 0.75])
        same = sum(a.tokens == b.tokens for a, b in zip(row, generations[0], strict=True))
        lines.append(
            LiveLine(
                policy.name,
                Tally(row),
                float(rate[index] / rate[0]),
                predicted[index] / predicted[0],
                (float(low), float(high)),
                None if arrays.header.given_text else same,
            )
        )
    return lines
