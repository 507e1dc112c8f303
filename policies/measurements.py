"""Timings by what was timed and by repetition, bootstrap draws of them, and how noisy the machine was."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]
Series = tuple[tuple[int, ...], ...]
"""Nanoseconds by repetition: whole numbers, which a file reproduces exactly."""

NS = 1e-9
MAX_NS, MAX_COUNT = 10**15, 2**31
"""Limits of what is read from a file; the first is eleven days."""

SHORT, LONG = CONTEXTS = ("short", "long")
DECISIONS, VERIFY = "decisions", "verify"

LOST_BLOCKS = 3
"""Blocks fewer than there are that a draw takes. A mean of m out of n blocks drawn with replacement has variance
(n - 1) s^2 / (n m) with the sample's variance s^2; with m = n - 3 it is (n - 1) s^2 / (n (n - 3)), that of Student's t with
n - 1 degrees of freedom."""


class Key(NamedTuple):
    """What was timed.

    Attributes:
        what: the part of a round, such as `verify`; see `estimate`.
        of: the context (`short`, `long`), or the `cost_name` of the policy that decided.
        counts: tokens, rows or calls.
    """

    what: str
    of: str
    counts: tuple[int, ...] = ()


Timings = Mapping[Key, Seconds]
Groups = dict[tuple[int, ...], Seconds]


@dataclass(frozen=True)
class _Record:
    """A series as the file has it; see `Key` and `Series`."""

    what: str
    of: str
    counts: tuple[int, ...]
    ns: Series


@dataclass(frozen=True)
class Measurements:
    """All timings of a profile.

    Attributes:
        series: by what was timed. Series of equal length were measured in turns: a repetition is a period in which all of
            them were timed. Noisy ones may have more repetitions.
    """

    series: Mapping[Key, Series] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.series)

    @cached_property
    def by_repetition(self) -> dict[Key, list[Seconds]]:
        """The seconds of each repetition, by what was timed."""
        return {key: [np.array(ns, dtype=np.float64) * NS for ns in series] for key, series in self.series.items()}

    @cached_property
    def pooled(self) -> dict[Key, Seconds]:
        """The seconds of all repetitions together, by what was timed."""
        return {key: np.concatenate(parts) for key, parts in self.by_repetition.items()}

    def where(self, keep: Callable[[Key], bool]) -> Measurements:
        """Return the series whose key `keep` accepts."""
        return Measurements({key: series for key, series in self.series.items() if keep(key)})

    def with_series(self, more: Measurements) -> Measurements:
        """Return these and others, which replace those of the same key."""
        return Measurements({**self.series, **more.series})

    def resampled(self, rng: np.random.Generator, length: int = 1) -> Timings:
        """Return a bootstrap draw: repetitions with replacement, the same ones of everything that was timed in them.

        Circular block bootstrap (Politis and Romano 1992) with `LOST_BLOCKS` fewer blocks than there are. Series with fewer
        repetitions are drawn at the same times. A series without timings in the drawn repetitions is taken whole.

        Args:
            rng: of the draw.
            length: repetitions in a block; more than one if slow phases last longer.
        """
        counts = {len(series) for series in self.series.values()}
        places, drawn = rng.random(max(counts, default=1)), {}  # places are shares of the time
        for count in counts:
            step = min(length, count)
            starts = (places[: max(count // step - LOST_BLOCKS, 1)] * count).astype(int)
            drawn[count] = ((starts[:, None] + np.arange(step)) % count).ravel().tolist()
        draw = {key: np.concatenate([parts[n] for n in drawn[len(parts)]]) for key, parts in self.by_repetition.items()}
        return {key: seconds if seconds.size else self.pooled[key] for key, seconds in draw.items()}

    def to_list(self) -> list[dict[str, Any]]:
        """Return the series as JSON values."""
        return [
            {"what": key.what, "of": key.of, "counts": list(key.counts), "ns": [list(ns) for ns in series]}
            for key, series in self.series.items()
        ]

    @staticmethod
    def from_list(raw: Any) -> Measurements:
        """Return the series of their JSON form; raises `ValueError` for anything else."""
        from pydantic import TypeAdapter  # takes 0.1 s to import

        series: dict[Key, Series] = {}
        for record in TypeAdapter(list[_Record]).validate_json(json.dumps(raw), strict=True):
            key, numbers = Key(record.what, record.of, record.counts), [n for ns in record.ns for n in ns]
            if key in series:
                raise ValueError("measurements: a series occurs twice")
            if not numbers or not 0 <= min(numbers) <= max(numbers) <= MAX_NS:
                raise ValueError(f"measurements: {record.what!r}: ns: expected at least one timing, 0 to {MAX_NS}")
            if not all(0 <= count <= MAX_COUNT for count in key.counts):
                raise ValueError(f"measurements: {record.what!r}: counts: expected numbers from 0 to {MAX_COUNT}")
            series[key] = record.ns
        return Measurements(series)


def groups(timings: Timings, what: str, of: str | None = None) -> Groups:
    """Return the seconds of a part of a round by counts, ascending: of one context (or policy), None = of both contexts."""
    parts = defaultdict(list)
    for key, seconds in timings.items():
        if key.what == what and of in (None, key.of) and seconds.size:
            parts[key.counts].append(seconds)
    return {counts: np.concatenate(parts[counts]) for counts in sorted(parts)}


def collected(repetitions: Sequence[Mapping[Key, Sequence[float]]]) -> Measurements:
    """Return the measurements of repetitions, each of which has seconds by what was timed."""
    keys = sorted({key for seconds in repetitions for key in seconds})
    return Measurements({key: tuple(_nanoseconds(seconds.get(key, ())) for seconds in repetitions) for key in keys})


def _nanoseconds(seconds: Sequence[float]) -> tuple[int, ...]:
    return tuple(np.rint(np.asarray(seconds, dtype=np.float64) / NS).clip(0).astype(np.int64).tolist())


MIN_TIMINGS = 4
"""Timings for meaningful quartiles, and repetitions for a meaningful trend."""

STALLED = 2.0
"""A timing of more than this multiple of the median is a stall."""

SPREAD, STALLS, PHASES, DRIFT = 0.35, 0.02, 0.15, 0.1
"""The largest figures of a quiet machine; see `Noise`."""

INDEPENDENT_PHASES = 4
"""Repetitions with independent paces that a measurement counts as: slow phases last longer than one repetition. Chosen on
simulated machines (`benchmarks/noise/compared.py`): intervals are too narrow with more, too wide with fewer."""

REMEDY = "close other programs and measure again, or raise --budget"


@dataclass(frozen=True)
class Noise:
    """How noisy the machine was.

    Attributes:
        repetitions: number of them.
        spread: interquartile range over median of equal timings, the mean over series weighted by their seconds.
        stalls: share of the seconds that timings took beyond `STALLED` times their median.
        phases: relative difference between the slowest and the fastest repetition.
        drift: relative change from the first repetition to the last along a line; negative = faster.
        block: repetitions in a block of the bootstrap; more than 1 if slow phases last longer.
        pace_spread: standard deviation of the logarithm of the pace over repetitions.
    """

    repetitions: int
    spread: float
    stalls: float
    phases: float
    drift: float
    block: int
    pace_spread: float = 0.0

    @property
    def pace_error(self) -> float:
        """Standard error of the logarithm of the mean pace, compared with another measurement of the same machine."""
        return self.pace_spread / math.sqrt(INDEPENDENT_PHASES)

    @property
    def reasons(self) -> list[str]:
        """What exceeds the figures of a quiet machine."""
        direction = "slower" if self.drift > 0 else "faster"
        figures = (
            (self.spread > SPREAD, f"timings of the same size differed by {self.spread:.0%} between their quartiles"),
            (self.stalls > STALLS, f"stalls took {self.stalls:.0%} of the time"),
            (self.phases > PHASES, f"the slowest repetition took {1.0 + self.phases:.2f} times as long as the fastest"),
            (abs(self.drift) > DRIFT, f"it grew {direction} by {abs(self.drift):.0%} while measuring"),
        )
        return [text for exceeded, text in figures if exceeded]

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was busy or changed its pace."""
        return bool(self.reasons)

    @property
    def text(self) -> str:
        """One line: the verdict and its figures."""
        if self.is_noisy:
            return f"this machine was busy: {'; '.join(self.reasons)}; {REMEDY}"
        return f"this machine was quiet: spread {self.spread:.2f} in {self.repetitions} repetitions"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict and its figures as plain values."""
        figures = asdict(self)
        del figures["block"]
        return {"machine": "busy" if self.is_noisy else "quiet", **figures}


def judge(measurements: Measurements) -> Noise | None:
    """Return how noisy the machine was; None if nothing was timed `MIN_TIMINGS` times."""
    spread = stalls = total = 0.0
    count = max((len(series) for series in measurements.series.values()), default=0)
    taken, usual = np.zeros((2, count))  # seconds by repetition: as measured, and at the median of each series
    for key, parts in measurements.by_repetition.items():
        seconds = measurements.pooled[key]
        if seconds.size < MIN_TIMINGS:
            continue
        low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
        if median <= 0.0:
            continue
        total += seconds.sum()
        spread += (high - low) / median * seconds.sum()
        stalls += (seconds - STALLED * median).clip(0.0).sum()
        repetition = np.repeat(np.arange(len(parts)), [part.size for part in parts])
        taken += np.bincount(repetition, np.minimum(seconds, STALLED * median), count)
        usual += median * np.bincount(repetition, minlength=count)
    if not total:
        return None
    pace = taken[usual > 0] / usual[usual > 0]
    drift = np.polyfit(np.arange(pace.size), pace, 1)[0] * (pace.size - 1) if pace.size >= MIN_TIMINGS else 0.0
    return Noise(
        len(pace), float(spread / total), float(stalls / total), float(pace.max() / pace.min()) - 1.0,
        float(drift / np.median(pace)), _block_length(pace), float(np.log(pace).std(ddof=1)) if pace.size > 1 else 0.0,
    )  # fmt: skip


def _block_length(pace: Seconds) -> int:
    """Return the block length of Politis and White (2004): twice the lags at which the pace correlates beyond chance."""
    off = pace - pace.mean()
    power = float(off @ off)
    chance = 1.0 / np.sqrt(pace.size)  # standard deviation of correlations of independent repetitions
    shares = [float(off[lag:] @ off[:-lag]) / power if power else 0.0 for lag in range(1, pace.size // 8 + 1)]
    if not shares or shares[0] < 2.0 * chance:
        return 1
    return 2 * len(list(takewhile(lambda share: share > chance, shares)))
