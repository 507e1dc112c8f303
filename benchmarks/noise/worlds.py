"""Synthetic worlds of `intervals.py`, whose true costs are timed on a simulated machine."""

from __future__ import annotations

from collections import defaultdict

import intervals as worlds
import numpy as np
from specstop.decode.profile.measuring import Case, Effort, Seconds, measure
from specstop.policies.measurements import CONTEXTS, DECISIONS, FIRST, LATER, OUTSIDE, PLAIN, PREFILL, VERIFY, Key
from specstop.policies.profile import Profile

from .machines import Disturbance, Machine

VERIFY_S = 4e-3
"""Seconds of the simulated machine for a verification of one token, which is the unit of a world."""

LENGTHS, PROMPTS = (12.0, 60.0), (12, 48)
"""Contexts of the profile, and the prompts that are read."""

EACH = 2
"""Rounds of each length in a repetition."""


def timed_profile(world: worlds.World, disturbance: Disturbance, seed: int, budget_s: float) -> Profile:
    """Return the profile of a world that a disturbed machine measures within a budget of its own seconds."""
    machine = Machine(disturbance, seed)
    timed = measure({"chains": _case(world, machine, seed)}, Effort(budget_s), clock=machine.clock)
    return Profile.measured(timed, LENGTHS, worlds.DEPTH)


def _case(world: worlds.World, machine: Machine, seed: int) -> Case:
    chance = np.random.default_rng(seed)
    costs, table, price = world.profile, world.profile.low, world.profile.decision("confidence")

    def work(units: float) -> float:
        return machine.work(units * VERIFY_S)

    def repetition(number: int) -> Seconds:
        timed: dict[Key, list[float]] = defaultdict(list)
        for side, tokens in zip(CONTEXTS, PROMPTS, strict=True):
            timed[Key(PREFILL, side, (tokens,))].append(work(costs.prefill_s[0] + costs.prefill_s[1] * tokens))
            lengths = list(range(worlds.DEPTH + 1)) * EACH
            for at in chance.permutation(len(lengths)).tolist():
                drafted = lengths[at]
                backlog = 1 + int(chance.integers(2))
                asked = min(drafted, worlds.DEPTH - 1)
                if drafted:
                    timed[Key(FIRST, side, (backlog,))].append(work(table.draft_s[backlog - 1]))
                    timed[Key(DECISIONS, "confidence", (asked,))].append(work(price * asked))
                if drafted > 1:
                    later = sum(work(table.later_s) for _ in range(drafted - 1))
                    timed[Key(LATER, side, (drafted,))].append(later)
                timed[Key(VERIFY, side, (drafted,))].append(work(table.verify_s[drafted]))
                timed[Key(OUTSIDE, side, (drafted,))].append(work(costs.round_s + costs.step_s * drafted))
            timed[Key(PLAIN, side)].extend(work(table.verify_s[0]) for _ in range(2 * EACH))
        return timed

    return repetition
