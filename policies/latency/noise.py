"""How noisy the machine was while something was timed: spread, stalls, phases and drift, of the timings themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from .estimate import DECISIONS, VERIFY
from .measurements import Key, Measurements, Seconds

FEWEST = 4
"""Timings of a thing from which on their quartiles tell something, and repetitions from which on their pace does."""

STALLED = 2.0
"""Times the median from which on a timing is a stall."""

SPREAD, STALLS, PHASES, DRIFT = 0.35, 0.02, 0.15, 0.1
"""The most of each figure that a quiet machine shows; see `Noise`."""

STRETCHES = 4
"""Repetitions with independent paces that a measurement counts as, however many it has: slow phases last longer than one.
Chosen on simulated machines (`benchmarks/noise/compared.py`): intervals are too narrow with more, and too wide with fewer."""

REMEDY = "close other programs and measure again, or raise --budget"


@dataclass(frozen=True)
class Noise:
    """What timings say of the machine.

    Attributes:
        repetitions: of the whole set.
        spread: interquartile range over median of the timings of a thing, the mean over things, by their seconds.
        stalls: share of the seconds that timings took beyond `STALLED` times their median.
        phases: how much slower the slowest repetition was than the fastest one, relative.
        drift: how much slower the machine grew from the first repetition to the last, relative; negative: faster.
        lasting: repetitions that are drawn in one piece in a bootstrap, at least 1; more where slow phases span some.
        worst: the thing whose timings differ most: its name, and its fastest, mean and slowest seconds.
        pace_spread: standard deviation of the logarithm of the pace over repetitions.
    """

    repetitions: int
    spread: float
    stalls: float
    phases: float
    drift: float
    lasting: int
    worst: tuple[str, float, float, float]
    pace_spread: float = 0.0

    @property
    def pace_error(self) -> float:
        """Standard error of the logarithm of the mean pace, beside another measurement of the same machine."""
        return self.pace_spread / math.sqrt(STRETCHES)

    @property
    def reasons(self) -> list[str]:
        """What is beyond that of a quiet machine, in words; nothing of a quiet one."""
        said = []
        if self.spread > SPREAD:
            said.append(f"timings of the same size differed by {self.spread:.0%} between their quartiles")
        if self.stalls > STALLS:
            said.append(f"stalls took {self.stalls:.0%} of the time")
        if self.phases > PHASES:
            said.append(f"the slowest stretch took {1.0 + self.phases:.2f} times as long as the fastest")
        if abs(self.drift) > DRIFT:
            said.append(f"it grew {'slower' if self.drift > 0 else 'faster'} by {abs(self.drift):.0%} while measuring")
        return said

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was busy with something else, or changed its pace, be it for a moment."""
        return bool(self.reasons)

    @property
    def text(self) -> str:
        """One line: the verdict and its figures."""
        name, least, mean, most = self.worst
        took = f"{name} took {_ms(least)} to {_ms(most)} ms (mean {_ms(mean)})"
        if self.is_noisy:
            return f"this machine was busy: {'; '.join([took, *self.reasons])}; {REMEDY}"
        return f"this machine was quiet: {took}; spread {self.spread:.2f} in {self.repetitions} repetitions"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict and its figures as plain values."""
        figures = asdict(self)
        del figures["worst"], figures["lasting"]
        return {"machine": "busy" if self.is_noisy else "quiet", **figures}


def judge(measurements: Measurements) -> Noise | None:
    """Return how noisy the machine was; None where nothing was timed often enough to tell."""
    series = {k: v for k, v in measurements.by_repetition.items() if sum(values.size for values in v) >= FEWEST}
    timed = [one for one in (_Timed(key, seconds) for key, seconds in series.items()) if one.middle > 0.0]  # it divides
    if not timed:
        return None
    pace = _pace(timed)
    total = sum(one.total for one in timed)
    return Noise(
        len(pace),
        sum((one.three_quarters - one.quarter) / one.middle * one.total for one in timed) / total,
        sum(one.stalled for one in timed) / total,
        float(pace.max() / pace.min()) - 1.0,
        _drift(pace) / float(np.median(pace)),
        _lasting(pace),
        _worst(timed),
        float(np.log(pace).std(ddof=1)) if pace.size > 1 else 0.0,
    )


class _Timed:
    """One thing timed: its seconds, the repetition of each, and figures of them."""

    def __init__(self, key: Key, series: Sequence[Seconds]) -> None:
        self.key, self.seconds = key, np.concatenate(series)
        self.repetition = np.repeat(np.arange(len(series)), [values.size for values in series])
        quartiles: list[float] = np.quantile(self.seconds, [0.25, 0.5, 0.75]).tolist()
        self.quarter, self.middle, self.three_quarters = quartiles
        self.total = float(self.seconds.sum())
        self.stalled = float((self.seconds - STALLED * self.middle).clip(0.0).sum())


def _pace(timed: Sequence[_Timed]) -> Seconds:
    """Return by repetition its seconds over what they are at the median of each thing timed; stalls count up to theirs."""
    count = 1 + max(int(one.repetition.max()) for one in timed)
    taken, usual = np.zeros(count), np.zeros(count)
    for one in timed:
        taken += np.bincount(one.repetition, np.minimum(one.seconds, STALLED * one.middle), count)
        usual += one.middle * np.bincount(one.repetition, minlength=count)
    # A ratio of sums: a thing weighs by its seconds, and a repetition that lacks one is not the faster for it.
    pace: Seconds = taken[usual > 0] / usual[usual > 0]
    return pace


def _drift(pace: Seconds) -> float:
    """Return the rise over all repetitions of the line that is nearest to the pace."""
    if pace.size < FEWEST:
        return 0.0
    slope, _ = np.polyfit(np.arange(pace.size), pace, 1)
    return float(slope) * (pace.size - 1)


def _lasting(pace: Seconds) -> int:
    """Return how many repetitions to draw in one piece: twice as many as a pace lasts beyond chance, or one.

    Of n independent repetitions the correlation with the one before is within 2 / sqrt(n); the rule is that of Politis and
    White (2004), with a quarter of the repetitions at most.
    """
    off = pace - pace.mean()
    power = float(off @ off)
    # The standard deviation of correlations where repetitions are independent: the first lag is held to twice that, others
    # to it. Lags go up to an eighth of the repetitions, as the answer is twice their number.
    chance = 1.0 / np.sqrt(pace.size)
    shares = [float(off[lag:] @ off[:-lag]) / power if power else 0.0 for lag in range(1, pace.size // 8 + 1)]
    if not shares or shares[0] < 2.0 * chance:
        return 1
    return 2 * len(list(takewhile(lambda share: share > chance, shares)))


def _worst(timed: Sequence[_Timed]) -> tuple[str, float, float, float]:
    """Return (name, fastest, mean, slowest) of what differs most, of the verifications where there are some."""
    named = [one for one in timed if one.key.what == VERIFY] or timed
    worst = max(named, key=lambda one: float(one.seconds.max() - one.seconds.min()))
    least, most = float(worst.seconds.min()), float(worst.seconds.max())
    return _described(worst.key), least, float(worst.seconds.mean()), most


def _described(key: Key) -> str:
    if key.what == VERIFY:
        return f"verifications of {key.counts[0]} tokens"
    return f"decisions of {key.of}" if key.what == DECISIONS else " ".join([key.what, key.of, *map(str, key.counts)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
