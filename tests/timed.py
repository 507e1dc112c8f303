"""Profiles of simulated timings: known costs, timed with noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from specstop.policies import measurements as names
from specstop.policies.measurements import Key, merge_repetitions
from specstop.policies.profile import Profile

EACH = 4
"""Timings of each call in a repetition."""


def timed_profile(
    costs: Profile,
    policies: Sequence[str] = (),
    *,
    pace: float = 0.0,
    paces: Sequence[float] = (),
    jitter: float = 0.0,
    repetitions: int = 12,
    seed: int = 0,
) -> Profile:
    """Return the profile of noisy timings of these costs.

    Args:
        costs: true costs of chains.
        policies: `cost_name` of the policies to time decisions of.
        pace: standard deviation of the logarithm of a repetition's pace, whose mean is 1.
        paces: of the repetitions, instead of random ones.
        jitter: the same of single timings.
        repetitions: of all timings.
        seed: of the noise.
    """
    seconds = {
        Key(names.DECISIONS, name, (count,)): costs.decision(name) * count for name in policies for count in (1, 2, 4)
    }
    for side, table, tokens in zip(names.CONTEXTS, (costs.low, costs.high), (10, 40), strict=True):
        first, second = table.draft_s
        seconds[Key(names.PREFILL, side, (tokens,))] = costs.prefill_s[0] + costs.prefill_s[1] * tokens
        seconds[Key(names.PLAIN, side)] = table.verify_s[0]
        for backlog, draft_s in ((1, first), (2, second), (20, second + 18 * table.draft_token_s)):
            seconds[Key(names.FIRST, side, (backlog,))] = draft_s
        for count, verify_s in enumerate(table.verify_s):
            seconds[Key(names.VERIFY, side, (count,))] = verify_s
            seconds[Key(names.OUTSIDE, side, (count,))] = costs.round_s + costs.step_s * count
            if count > 1:
                seconds[Key(names.LATER, side, (count,))] = (count - 1) * table.later_s
    rng = np.random.default_rng(seed)

    def noisy(mean: float, deviation: float, count: int) -> list[float]:
        factors: list[float] = (mean * np.exp(deviation * rng.standard_normal(count) - deviation**2 / 2)).tolist()
        return factors

    factors = paces or noisy(1.0, pace, repetitions)
    timings = [{key: noisy(mean * now, jitter, EACH) for key, mean in seconds.items()} for now in factors]
    contexts = (costs.low.context, costs.high.context)
    return Profile.measured(merge_repetitions(timings), contexts, costs.max_depth, costs.temperature, costs.facts)
