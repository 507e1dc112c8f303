"""Profiles of a machine that nobody has: costs that are known, timed as often as one likes, with as much noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from specstop.policies.costs import CostTable
from specstop.policies.measurements import (
    CONTEXTS,
    DECISIONS,
    FIRST,
    LATER,
    OUTSIDE,
    PLAIN,
    PREFILL,
    VERIFY,
    Key,
    collected,
)
from specstop.policies.profile import Profile

PROMPTS = (10, 40)
ASKED = (1, 2, 4)


def timed_profile(
    costs: Profile,
    policies: Sequence[str] = (),
    *,
    pace: float = 0.0,
    jitter: float = 0.0,
    repetitions: int = 12,
    each: int = 4,
    seed: int = 0,
) -> Profile:
    """Return the profile that timings of a machine with these costs tell.

    Args:
        costs: true ones, of chains.
        policies: whose decisions are timed, by `cost_name`.
        pace: of the logarithm of a repetition's pace, its standard deviation; the mean pace is 1.
        jitter: the same of single timings.
        repetitions: of the whole set.
        each: timings in each.
        seed: of the noise.
    """
    chance = np.random.default_rng(seed)

    def times(seconds: float, now: float) -> list[float]:
        return (seconds * now * _lognormal(chance, jitter, each)).tolist()

    texts = []
    for now in _lognormal(chance, pace, repetitions).tolist():
        text: dict[Key, list[float]] = {}
        for side, table, tokens in zip(CONTEXTS, (costs.low, costs.high), PROMPTS, strict=True):
            text[Key(PREFILL, side, (tokens,))] = times(costs.prefill_s[0] + costs.prefill_s[1] * tokens, now)
            text |= {key: times(seconds, now) for key, seconds in _of_rounds(costs, table, side).items()}
        for name in policies:
            price = costs.decision(name)
            for count in ASKED:
                text[Key(DECISIONS, name, (count,))] = times(price * count, now)
        texts.append(text)
    return Profile.measured(
        collected(texts), (costs.low.context, costs.high.context), costs.max_depth, costs.temperature, costs.facts
    )


def _of_rounds(costs: Profile, table: CostTable, side: str) -> dict[Key, float]:
    """Return the seconds of the parts of rounds at one context."""
    found = {Key(PLAIN, side): table.verify_s[0]}
    for count, seconds in enumerate(table.verify_s):
        found[Key(VERIFY, side, (count,))] = seconds
        found[Key(OUTSIDE, side, (count,))] = costs.round_s + costs.step_s * count
        if count > 1:
            found[Key(LATER, side, (count,))] = (count - 1) * table.later_s
    for backlog, seconds in (
        (1, table.draft_s[0]),
        (2, table.draft_s[1]),
        (20, table.draft_s[1] + 18 * table.draft_token_s),
    ):
        found[Key(FIRST, side, (backlog,))] = seconds
    return found


def _lognormal(
    chance: np.random.Generator, deviation: float, count: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return factors whose mean is 1."""
    return np.exp(deviation * chance.standard_normal(count) - deviation**2 / 2)
