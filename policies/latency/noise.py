"""How noisy the machine was while a profile was measured: spread, stalls, phases and drift, of the timings themselves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from .estimate import FIRST, LATER, OUTSIDE, PLAIN, VERIFY
from .measurements import Key, Measurements, Seconds

ROUND_PARTS = (VERIFY, PLAIN, FIRST, LATER, OUTSIDE)
"""What the seconds of a chain round are made of."""

FEWEST = 4
"""Timings from which on their quartiles tell something."""

STALLED = 2.0
"""Times the median from which on a timing is a stall."""

SPREAD, STALLS, PHASES, DRIFT = 0.35, 0.03, 0.15, 0.10
"""The most of each figure that a quiet machine shows; see `Noise`."""

REMEDY = "close other programs and measure again, or raise --budget"


@dataclass(frozen=True)
class Noise:
    """What the timings of a profile say of the machine.

    Attributes:
        repetitions: of the whole set of texts.
        spread: interquartile range over median of the verifications of a size, the mean over sizes.
        stalls: share of the seconds that timings took beyond `STALLED` times their median.
        phases: how much slower the slow repetitions (90th percentile) were than the fast ones (10th), relative.
        drift: how much slower the machine grew from the first repetition to the last, relative; negative: faster.
        lasting: repetitions that a slow phase spans, at least 1: what is drawn in one piece in a bootstrap.
        worst: the verification whose timings differ most: (tokens, fastest, mean, slowest seconds).
    """

    repetitions: int
    spread: float
    stalls: float
    phases: float
    drift: float
    lasting: int
    worst: tuple[int, float, float, float]

    @property
    def reasons(self) -> list[str]:
        """What is beyond that of a quiet machine, in words; nothing of a quiet one."""
        said = []
        if self.spread > SPREAD:
            said.append(f"timings of the same verification differed by {self.spread:.0%} between quartiles")
        if self.stalls > STALLS:
            said.append(f"stalls took {self.stalls:.0%} of the time")
        if self.phases > PHASES:
            said.append(f"slow stretches took {1.0 + self.phases:.2g} times as long as fast ones")
        if abs(self.drift) > DRIFT:
            said.append(f"it grew {'slower' if self.drift > 0 else 'faster'} by {abs(self.drift):.0%} while measuring")
        return said

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was busy with something else, or changed its pace."""
        return bool(self.reasons)

    @property
    def text(self) -> str:
        """One line for the console."""
        tokens, least, mean, most = self.worst
        took = f"verifications of {tokens} tokens took {_ms(least)} to {_ms(most)} ms (mean {_ms(mean)})"
        if self.is_noisy:
            return f"this machine was busy: {'; '.join([took, *self.reasons])}; {REMEDY}"
        return f"quiet: {took}, spread {self.spread:.2f}, {self.repetitions} repetitions"


def judge(measurements: Measurements) -> Noise | None:
    """Return how noisy the machine was; None where no round was timed."""
    rounds = measurements.only(*ROUND_PARTS)
    timed = {key: values for key, values in rounds.by_repetition().items() if sum(map(len, values)) >= FEWEST}
    if not any(key.what == VERIFY for key in timed):
        return None
    middles = {key: float(np.median(np.concatenate(values))) for key, values in timed.items()}
    pace = _pace(timed, middles)
    low, middle, high = np.quantile(pace, [0.1, 0.5, 0.9]).tolist()
    return Noise(
        len(pace),
        _spread(timed),
        _stalls(timed, middles),
        (high - low) / low,
        _drift(pace) / middle,
        _lasting(pace),
        _worst(timed),
    )


def _pace(timed: dict[Key, list[Seconds]], middles: dict[Key, float]) -> Seconds:
    """Return by repetition its seconds over what they are at the median of each thing timed; stalls count up to theirs."""
    count = max(map(len, timed.values()))
    taken, usual = np.zeros(count), np.zeros(count)
    for key, repetitions in timed.items():
        for at, values in enumerate(repetitions):
            taken[at] += np.minimum(values, STALLED * middles[key]).sum()
            usual[at] += middles[key] * values.size
    return taken[usual > 0] / usual[usual > 0]


def _stalls(timed: dict[Key, list[Seconds]], middles: dict[Key, float]) -> float:
    """Return the share of the seconds beyond `STALLED` times the median."""
    every = {key: np.concatenate(values) for key, values in timed.items()}
    beyond = sum(float((values - STALLED * middles[key]).clip(0.0).sum()) for key, values in every.items())
    return beyond / sum(float(values.sum()) for values in every.values())


def _spread(timed: dict[Key, list[Seconds]]) -> float:
    """Return the mean over sizes and contexts of the interquartile range of verifications over their median."""
    shares = []
    for key, values in timed.items():
        if key.what == VERIFY:
            quarter, middle, three = np.quantile(np.concatenate(values), [0.25, 0.5, 0.75]).tolist()
            shares.append((three - quarter) / middle)
    return float(np.mean(shares))


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
    chance = 1.0 / np.sqrt(pace.size)
    shares = [float(off[lag:] @ off[:-lag]) / power if power else 0.0 for lag in range(1, pace.size // 8 + 1)]
    if not shares or shares[0] < 2.0 * chance:
        return 1
    return 2 * len(list(takewhile(lambda share: share > chance, shares)))


def _worst(timed: dict[Key, list[Seconds]]) -> tuple[int, float, float, float]:
    """Return (tokens, fastest, mean, slowest) of the verification whose slowest is furthest from its fastest."""
    every = {key: np.concatenate(values) for key, values in timed.items() if key.what == VERIFY}
    key = max(every, key=lambda one: float(every[one].max() - every[one].min()))
    values = every[key]
    return key.counts[0], float(values.min()), float(values.mean()), float(values.max())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
