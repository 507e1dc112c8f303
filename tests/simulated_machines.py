"""Simulated machines: a clock that stalls, slows down in phases or drifts, and rounds of a pair with its timings."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from specstop.decode.profile.measuring import Effort, Seconds, measure
from specstop.policies import Profile, measurements as part
from specstop.policies.costs import CostTable
from specstop.policies.measurements import CONTEXTS, Key, Noise, measure_noise

DEPTH, NEW_TOKENS, ACCEPTED = 10, 48, 0.7
"""Longest chain of the pair, tokens of a text, and probability that a drafted token is accepted."""

PAIR = Profile(
    CostTable(60.0, (6e-4, 6e-4), 0.0, tuple(3.8e-3 + 1.5e-4 * n for n in range(DEPTH + 1))),
    CostTable(240.0, (6.6e-4, 6.6e-4), 0.0, tuple(4.2e-3 + 1.6e-4 * n for n in range(DEPTH + 1))),
    2e-5, 1.2e-4, (6e-3, 2e-6), {},
)  # fmt: skip
"""Costs of the shipped pair on two cores."""

WANDER_S = 1.0
"""Seconds over which a wandering pace is correlated."""


@dataclass(frozen=True)
class Disturbance:
    """Deviations of a simulated machine from its mean speed.

    Attributes:
        jitter: standard deviation of the logarithm of each timing.
        wander: the same of a factor that changes slowly.
        slow, share, period_s, begin_s: phases: timings are `slow` times as long during this share of each period, from
            `begin_s` on.
        stalls, stall_s: mean number per second, and mean seconds of each (exponential distribution).
        drift: relative slowdown after ten seconds; negative: faster.
        scale: factor of all timings.
    """

    jitter: float = 0.03
    wander: float = 0.005
    slow: float = 1.0
    share: float = 0.5
    period_s: float = 4.0
    begin_s: float = 0.0
    stalls: float = 0.0
    stall_s: float = 0.0
    drift: float = 0.0
    scale: float = 1.0


QUIET = {
    "steady": Disturbance(jitter=0.0, wander=0.0),
    "usual jitter": Disturbance(jitter=0.03),
    "more jitter": Disturbance(jitter=0.06),
    "much jitter": Disturbance(jitter=0.1),
    "wandering pace": Disturbance(wander=0.01),
    "slow machine": Disturbance(scale=4.0),
    "fast machine": Disturbance(scale=0.3),
    "rare hiccups": Disturbance(stalls=0.2, stall_s=0.01),
    "one long hiccup in a minute": Disturbance(stalls=1 / 60, stall_s=0.1),
    "many tiny hiccups": Disturbance(stalls=30.0, stall_s=0.0003),
    "a slight drift": Disturbance(drift=0.02),
    "slight phases": Disturbance(slow=1.03, period_s=3.0),
    "jitter, hiccups and wandering": Disturbance(jitter=0.06, wander=0.01, stalls=0.5, stall_s=0.01),
    "a slow machine with hiccups": Disturbance(scale=3.0, jitter=0.05, stalls=0.3, stall_s=0.02),
}

NOISY = {
    "half the time half as fast, 4 s": Disturbance(slow=2.0, period_s=4.0),
    "half the time a fifth slower, 6 s": Disturbance(slow=1.2, period_s=6.0),
    "a fifth of the time 4 times as slow, 5 s": Disturbance(slow=4.0, share=0.2, period_s=5.0),
    "a tenth of the time 5 times as slow, 0.4 s": Disturbance(slow=5.0, share=0.1, period_s=0.4),
    "one slow second": Disturbance(slow=3.0, share=0.02, period_s=50.0, begin_s=3.0),
    "slow from the third second on": Disturbance(slow=1.3, share=1.0, period_s=1e6, begin_s=3.0),
    "slow until the fourth second": Disturbance(slow=1.5, share=4e-6, period_s=1e6),
    "half the time half as fast, 50 ms": Disturbance(slow=2.0, period_s=0.05),
    "long stalls, rare": Disturbance(stalls=0.5, stall_s=0.2),
    "stalls of 40 ms": Disturbance(stalls=2.0, stall_s=0.04),
    "stalls of 8 ms, many": Disturbance(stalls=60.0, stall_s=0.008),
    "time slices of another process": Disturbance(stalls=100.0, stall_s=0.004),
    "slower by a third in 10 s": Disturbance(drift=0.33),
    "faster by a quarter in 10 s": Disturbance(drift=-0.25),
    "jitter of a third": Disturbance(jitter=0.33),
    "phases and stalls": Disturbance(slow=1.5, share=0.3, period_s=2.0, stalls=2.0, stall_s=0.05),
}


class Machine:
    """A clock that advances with its work, and the timings of a pair that it decodes.

    Args:
        disturbance: see `Disturbance`.
        seed: of its random numbers.
        costs: of the pair, on an idle machine.
        unit_s: seconds of a unit of `costs`.
    """

    def __init__(self, disturbance: Disturbance, seed: int, costs: Profile = PAIR, unit_s: float = 1.0) -> None:
        self._kind, self._rng, self._costs, self._unit_s = disturbance, np.random.default_rng(seed), costs, unit_s
        self._now, self._wander = 0.0, 0.0

    def clock(self) -> float:
        """Return its seconds."""
        return self._now

    def work(self, units: float) -> float:
        """Return the seconds of work that takes so many units on an idle machine, and advance the clock."""
        kind, rng = self._kind, self._rng
        taken = units * self._unit_s * kind.scale * self._pace() * float(np.exp(kind.jitter * rng.standard_normal()))
        taken += sum(rng.exponential(kind.stall_s, rng.poisson(kind.stalls * taken))) if kind.stalls else 0.0
        left = float(np.exp(-taken / WANDER_S))
        self._wander = left * self._wander + (1.0 - left**2) ** 0.5 * kind.wander * float(rng.standard_normal())
        self._now += taken
        return float(taken)

    def _pace(self) -> float:
        kind, since = self._kind, self._now - self._kind.begin_s
        is_slow = since >= 0.0 and since % kind.period_s < kind.share * kind.period_s
        drift = max(1.0 + kind.drift * self._now / 10.0, 0.2)
        return drift * (kind.slow if is_slow else 1.0) * float(np.exp(self._wander))

    def texts(self, number: int) -> Seconds:
        """Return the timings of a repetition, like a calibration run: a scripted and a plain text at each context."""
        timed: dict[Key, list[float]] = defaultdict(list)
        costs, depth = self._costs, self._costs.max_depth
        for side, table in zip(CONTEXTS, (costs.low, costs.high), strict=True):
            tokens, written = int(table.context), 0
            timed[Key(part.PREFILL, side, (tokens,))].append(
                self.work(costs.prefill_s[0] + costs.prefill_s[1] * tokens)
            )
            lengths = self._rng.permutation(np.repeat(np.arange(depth + 1), 2)).tolist()
            while written < NEW_TOKENS:
                drafted = lengths.pop() if lengths else int(self._rng.integers(depth + 1))
                written += 1 + min(drafted, int(self._rng.geometric(1.0 - ACCEPTED)) - 1)
                self._round(timed, side, table, drafted)
            timed[Key(part.PLAIN, side)].extend(self.work(table.verify_s[0]) for _ in range(NEW_TOKENS))
        return timed

    def _round(self, timed: dict[Key, list[float]], side: str, table: CostTable, drafted: int) -> None:
        costs, decisions = self._costs, min(drafted, self._costs.max_depth - 1)
        if drafted:
            is_longer = table.draft_s[0] != table.draft_s[1] and bool(self._rng.integers(2))  # a backlog of two
            timed[Key(part.FIRST, side, (1 + is_longer,))].append(self.work(table.draft_s[is_longer]))
        if drafted > 1:
            timed[Key(part.LATER, side, (drafted,))].append(sum(self.work(table.later_s) for _ in range(drafted - 1)))
        for name, price in costs.decision_s.items():
            if decisions and price:
                timed[Key(part.DECISIONS, name, (decisions,))].append(self.work(price * decisions))
        timed[Key(part.VERIFY, side, (drafted,))].append(self.work(table.verify_s[drafted]))
        timed[Key(part.OUTSIDE, side, (drafted,))].append(self.work(costs.round_s + costs.step_s * drafted))


def profiled(disturbance: Disturbance, seed: int, budget_s: float) -> tuple[Noise, float]:
    """Return the noise that timings of a simulated machine show, and the seconds of its clock."""
    machine = Machine(disturbance, seed)
    noise = measure_noise(measure({"chains": machine.texts}, Effort(budget_s), clock=machine.clock))
    assert noise is not None
    return noise, machine.clock()
