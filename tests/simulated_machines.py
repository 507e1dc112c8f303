"""Simulated machines: a clock that stalls, slows down in phases or drifts, and rounds of a pair with its timings."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from specstop.decode.profile.measuring import Effort, Seconds, measure
from specstop.policies.measurements import (
    CONTEXTS,
    FIRST,
    LATER,
    OUTSIDE,
    PLAIN,
    PREFILL,
    VERIFY,
    Key,
    Measurements,
    Noise,
    judge,
)

from specstop import Profile

DEPTH, NEW_TOKENS, ACCEPTED = 10, 48, 0.7
"""The simulated pair: longest chain, tokens of a text, probability that a drafted token is accepted."""

VERIFY_S, ROW_S, DRAFT_S, OUTSIDE_S, STEP_S, PREFILL_S = 3.8e-3, 1.5e-4, 6e-4, 1.2e-4, 2e-5, 6e-3
"""Seconds of the parts of a round on an idle machine, as of the shipped pair on two cores."""

CONTEXTS_AT = {"short": 60.0, "long": 240.0}
"""Tokens of the two contexts."""

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
    "little jitter": Disturbance(jitter=0.01),
    "usual jitter": Disturbance(jitter=0.03),
    "more jitter": Disturbance(jitter=0.06),
    "much jitter": Disturbance(jitter=0.1),
    "wandering pace": Disturbance(wander=0.01),
    "more wandering": Disturbance(wander=0.02, jitter=0.05),
    "slow machine": Disturbance(scale=4.0),
    "slower machine": Disturbance(scale=10.0),
    "fast machine": Disturbance(scale=0.3),
    "rare hiccups": Disturbance(stalls=0.2, stall_s=0.01),
    "small hiccups": Disturbance(stalls=3.0, stall_s=0.002),
    "one long hiccup in a minute": Disturbance(stalls=1 / 60, stall_s=0.1),
    "many tiny hiccups": Disturbance(stalls=30.0, stall_s=0.0003),
    "a slight drift": Disturbance(drift=0.02),
    "a slight drift to faster": Disturbance(drift=-0.02),
    "slight phases": Disturbance(slow=1.03, period_s=3.0),
    "slight short phases": Disturbance(slow=1.05, period_s=0.3),
    "jitter, hiccups and wandering": Disturbance(jitter=0.06, wander=0.01, stalls=0.5, stall_s=0.01),
    "a slow machine with hiccups": Disturbance(scale=3.0, jitter=0.05, stalls=0.3, stall_s=0.02),
}

NOISY = {
    "half the time half as fast, 4 s": Disturbance(slow=2.0, period_s=4.0),
    "half the time a third slower, 4 s": Disturbance(slow=1.33, period_s=4.0),
    "half the time a fifth slower, 6 s": Disturbance(slow=1.2, period_s=6.0),
    "a third of the time half as fast, 1.5 s": Disturbance(slow=2.0, share=0.33, period_s=1.5),
    "a fifth of the time 4 times as slow, 5 s": Disturbance(slow=4.0, share=0.2, period_s=5.0),
    "a tenth of the time 5 times as slow, 0.4 s": Disturbance(slow=5.0, share=0.1, period_s=0.4),
    "one slow second": Disturbance(slow=3.0, share=0.02, period_s=50.0, begin_s=3.0),
    "slow from the third second on": Disturbance(slow=1.3, share=1.0, period_s=1e6, begin_s=3.0),
    "slow until the fourth second": Disturbance(slow=1.5, share=4e-6, period_s=1e6),
    "half the time half as fast, 50 ms": Disturbance(slow=2.0, period_s=0.05),
    "long stalls, rare": Disturbance(stalls=0.5, stall_s=0.2),
    "stalls of 40 ms": Disturbance(stalls=2.0, stall_s=0.04),
    "stalls of 15 ms": Disturbance(stalls=10.0, stall_s=0.015),
    "stalls of 8 ms, many": Disturbance(stalls=60.0, stall_s=0.008),
    "time slices of another process": Disturbance(stalls=100.0, stall_s=0.004),
    "slower by a third in 10 s": Disturbance(drift=0.33),
    "faster by a quarter in 10 s": Disturbance(drift=-0.25),
    "twice as slow in 10 s": Disturbance(drift=1.0),
    "jitter of a third": Disturbance(jitter=0.33),
    "phases and stalls": Disturbance(slow=1.5, share=0.3, period_s=2.0, stalls=2.0, stall_s=0.05),
}


class Machine:
    """A clock that advances with its work, and the texts of a pair that it decodes.

    Args:
        disturbance: see `Disturbance`.
        seed: of its random numbers.
    """

    def __init__(self, disturbance: Disturbance, seed: int) -> None:
        self._kind, self._rng = disturbance, np.random.default_rng(seed)
        self._now, self._wander = 0.0, 0.0

    def clock(self) -> float:
        """Return its seconds."""
        return self._now

    def work(self, seconds: float) -> float:
        """Return the seconds of work that takes `seconds` on an idle machine, and advance the clock."""
        kind, rng = self._kind, self._rng
        taken = seconds * kind.scale * self._pace() * float(np.exp(kind.jitter * rng.standard_normal()))
        taken += sum(rng.exponential(kind.stall_s, rng.poisson(kind.stalls * taken))) if kind.stalls else 0.0
        left = float(np.exp(-taken / WANDER_S))
        self._wander = left * self._wander + (1.0 - left**2) ** 0.5 * kind.wander * float(rng.standard_normal())
        self._now += taken
        return float(taken)

    def _pace(self) -> float:
        kind, since = self._kind, self._now - self._kind.begin_s
        is_slow = since >= 0.0 and since % kind.period_s < kind.share * kind.period_s
        return (
            max(1.0 + kind.drift * self._now / 10.0, 0.2)
            * (kind.slow if is_slow else 1.0)
            * float(np.exp(self._wander))
        )

    def texts(self, number: int) -> Seconds:
        """Return the timings of a repetition, like a calibration run: a scripted and a plain text at each context."""
        timed: dict[Key, list[float]] = defaultdict(list)
        for side, grown in zip(CONTEXTS, (1.0, 1.1), strict=True):
            timed[Key(PREFILL, side, (int(CONTEXTS_AT[side]),))].append(self.work(PREFILL_S * grown))
            written, lengths = 0, self._rng.permutation(np.repeat(np.arange(DEPTH + 1), 2)).tolist()
            while written < NEW_TOKENS:
                drafted = lengths.pop() if lengths else int(self._rng.integers(DEPTH + 1))
                written += 1 + min(drafted, int(self._rng.geometric(1.0 - ACCEPTED)) - 1)
                self._round(timed, side, drafted, grown)
            for _ in range(NEW_TOKENS):
                timed[Key(PLAIN, side)].append(self.work(VERIFY_S * grown))
        return timed

    def _round(self, timed: dict[Key, list[float]], side: str, drafted: int, grown: float) -> None:
        if drafted:
            timed[Key(FIRST, side, (1,))].append(self.work(DRAFT_S * grown))
        if drafted > 1:
            timed[Key(LATER, side, (drafted,))].append(sum(self.work(DRAFT_S * grown) for _ in range(drafted - 1)))
        timed[Key(VERIFY, side, (drafted,))].append(self.work((VERIFY_S + ROW_S * drafted) * grown))
        timed[Key(OUTSIDE, side, (drafted,))].append(self.work(OUTSIDE_S + STEP_S * drafted))


def profile(measurements: Measurements) -> Profile:
    """Return the profile of timings of `Machine.texts`."""
    return Profile.measured(measurements, (CONTEXTS_AT["short"], CONTEXTS_AT["long"]), DEPTH)


def profiled(disturbance: Disturbance, seed: int, budget_s: float) -> tuple[Noise, float]:
    """Return the noise that timings of a simulated machine show, and the seconds of its clock."""
    machine = Machine(disturbance, seed)
    noise = judge(measure({"chains": machine.texts}, Effort(budget_s), clock=machine.clock))
    assert noise is not None
    return noise, machine.clock()
