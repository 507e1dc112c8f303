"""Timings by what was timed and by repetition, bootstrap draws of them, and how noisy the machine was."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from .entries import Entries

Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]
Series = tuple[tuple[int, ...], ...]
"""Nanoseconds of one thing timed, by repetition; whole ones come back from a file as they went in."""

NS = 1e-9
MAX_NS = 10**15
"""The longest timing that is read from a file: nothing takes eleven days."""

SHORT, LONG = CONTEXTS = ("short", "long")
DECISIONS, VERIFY = "decisions", "verify"

LOST = 3
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
class Measurements:
    """All timings of a profile.

    Attributes:
        series: by what was timed. Things repeated equally often were repeated in turns: a repetition is a stretch of time in
            which all of them were timed. What is noisy may have been repeated more often.
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

        Circular block bootstrap (Politis and Romano 1992) with `LOST` blocks fewer than there are. Things repeated less often
        are drawn at the same times. What did not come up in the repetitions drawn stays what it was in all.

        Args:
            rng: of the draw.
            length: repetitions drawn in one piece; more than one where a slow phase lasts longer.
        """
        counts = {len(series) for series in self.series.values()}
        places, drawn = rng.random(max(counts, default=1)), {}
        for count in counts:
            step = min(length, count)
            # `places` are shares of the time, so that series of any count are drawn at the same times.
            starts = (places[: max(count // step - LOST, 1)] * count).astype(int)
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
        """Return the series of their JSON form; raises `ValueError` or `KeyError` for anything else."""
        if not isinstance(raw, list):
            raise ValueError("measurements: expected a list")
        series = {}
        for at, entry in enumerate(raw):
            name = f"measurements[{at}]"
            values = Entries(entry, name).values
            if not all(isinstance(values[key], str) for key in ("what", "of")):
                raise ValueError(f"{name}: expected texts in what and of")
            timed = values["ns"] if isinstance(values["ns"], list) else []
            if not timed or not all(_are_whole(ns, MAX_NS) for ns in timed) or not any(timed):
                raise ValueError(f"{name}.ns: expected lists of whole nanoseconds by repetition, at least one timing")
            if not _are_whole(values["counts"], 2**31):
                raise ValueError(f"{name}.counts: expected a list of whole numbers")
            key = Key(values["what"], values["of"], tuple(values["counts"]))
            if key in series:
                raise ValueError("measurements: the same series twice")
            series[key] = tuple(map(tuple, timed))
        return Measurements(series)


def _are_whole(values: Any, most: int) -> bool:
    # By `type`: JSON's true is an int to `isinstance`.
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= most for value in values)


def groups(timings: Timings, what: str, of: str | None = None) -> Groups:
    """Return the seconds of a part of a round by counts, ascending: of one context (or policy), None = of both contexts."""
    found = defaultdict(list)
    for key, seconds in timings.items():
        if key.what == what and of in (None, key.of) and seconds.size:
            found[key.counts].append(seconds)
    return {counts: np.concatenate(found[counts]) for counts in sorted(found)}


def collected(repetitions: Sequence[Mapping[Key, Sequence[float]]]) -> Measurements:
    """Return the measurements of something timed again and again: the seconds of each repetition, by what was timed."""
    keys = sorted({key for seconds in repetitions for key in seconds})
    return Measurements({key: tuple(_nanoseconds(seconds.get(key, ())) for seconds in repetitions) for key in keys})


def _nanoseconds(seconds: Sequence[float]) -> tuple[int, ...]:
    return tuple(np.rint(np.asarray(seconds, dtype=np.float64) / NS).clip(0).astype(np.int64).tolist())


MIN_TIMINGS = 4
"""Timings of a thing from which on their quartiles mean something, and repetitions from which on their pace does."""

STALLED = 2.0
"""Times the median from which on a timing is a stall."""

SPREAD, STALLS, PHASES, DRIFT = 0.35, 0.02, 0.15, 0.1
"""The largest figures of a quiet machine; see `Noise`."""

STRETCHES = 4
"""Repetitions with independent paces that a measurement counts as: slow phases last longer than one repetition. Chosen on
simulated machines (`benchmarks/noise/compared.py`): intervals are too narrow with more, too wide with fewer."""

REMEDY = "close other programs and measure again, or raise --budget"


@dataclass(frozen=True)
class Noise:
    """How noisy the machine was.

    Attributes:
        repetitions: of the whole set.
        spread: interquartile range over median of the timings of a thing, the mean over things weighted by their seconds.
        stalls: share of the seconds that timings took beyond `STALLED` times their median.
        phases: how much slower the slowest repetition was than the fastest one, relative.
        drift: how much slower the machine grew from the first repetition to the last, relative; negative: faster.
        lasting: repetitions to draw in one piece in a bootstrap, at least 1; more where slow phases span several.
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
        """Standard error of the logarithm of the mean pace, compared with another measurement of the same machine."""
        return self.pace_spread / math.sqrt(STRETCHES)

    @property
    def reasons(self) -> list[str]:
        """What exceeds the figures of a quiet machine."""
        figures = (
            (self.spread > SPREAD, f"timings of the same size differed by {self.spread:.0%} between their quartiles"),
            (self.stalls > STALLS, f"stalls took {self.stalls:.0%} of the time"),
            (
                self.phases > PHASES,
                f"the slowest stretch took {1.0 + self.phases:.2f} times as long as the fastest",
            ),
            (
                abs(self.drift) > DRIFT,
                f"it grew {'slower' if self.drift > 0 else 'faster'} by {abs(self.drift):.0%} while measuring",
            ),
        )
        return [text for exceeded, text in figures if exceeded]

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was busy with something else, or changed its pace."""
        return bool(self.reasons)

    @property
    def text(self) -> str:
        """One line: the verdict and its figures."""
        name, *seconds = self.worst
        least, mean, most = (f"{value * 1e3:.3g}" for value in seconds)
        took = f"{name} took {least} to {most} ms (mean {mean})"
        if self.is_noisy:
            return f"this machine was busy: {'; '.join([took, *self.reasons])}; {REMEDY}"
        return f"this machine was quiet: {took}; spread {self.spread:.2f} in {self.repetitions} repetitions"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict and its figures as plain values."""
        figures = asdict(self)
        del figures["worst"], figures["lasting"]
        return {"machine": "busy" if self.is_noisy else "quiet", **figures}


def judge(measurements: Measurements) -> Noise | None:
    """Return how noisy the machine was; None if nothing was timed often enough."""
    spread = stalls = total = 0.0
    count = max((len(series) for series in measurements.series.values()), default=0)
    taken, usual = (
        np.zeros(count),
        np.zeros(count),
    )  # seconds by repetition: as they were, and at the median of each thing
    worst, differs = ("", 0.0, 0.0, 0.0), (False, -1.0)
    for key, parts in measurements.by_repetition.items():
        seconds = measurements.pooled[key]
        quarter, median, three_quarters = (
            np.quantile(seconds, [0.25, 0.5, 0.75]) if seconds.size >= MIN_TIMINGS else np.zeros(3)
        )
        if median <= 0.0:
            continue
        total += seconds.sum()
        spread += (three_quarters - quarter) / median * seconds.sum()
        stalls += (seconds - STALLED * median).clip(0.0).sum()
        repetition = np.repeat(np.arange(len(parts)), [part.size for part in parts])
        taken += np.bincount(repetition, np.minimum(seconds, STALLED * median), count)
        usual += median * np.bincount(repetition, minlength=count)
        least, most = float(seconds.min()), float(seconds.max())
        if (key.what == VERIFY, most - least) > differs:  # a verification, if any was timed
            worst, differs = (_described(key), least, float(seconds.mean()), most), (key.what == VERIFY, most - least)
    if not total:
        return None
    # A ratio of sums: a thing weighs by its seconds, and a repetition that lacks one is not the faster for it.
    pace = taken[usual > 0] / usual[usual > 0]
    drift = np.polyfit(np.arange(pace.size), pace, 1)[0] * (pace.size - 1) if pace.size >= MIN_TIMINGS else 0.0
    return Noise(
        len(pace), float(spread / total), float(stalls / total), float(pace.max() / pace.min()) - 1.0,
        float(drift / np.median(pace)), _lasting(pace), worst, float(np.log(pace).std(ddof=1)) if pace.size > 1 else 0.0,
    )  # fmt: skip


def _lasting(pace: Seconds) -> int:
    """Return the block length of a bootstrap: twice the lags at which the pace correlates beyond chance, or 1.

    Rule of Politis and White (2004), with a quarter of the repetitions at most.
    """
    off = pace - pace.mean()
    power = float(off @ off)
    chance = 1.0 / np.sqrt(pace.size)  # standard deviation of correlations of independent repetitions
    shares = [float(off[lag:] @ off[:-lag]) / power if power else 0.0 for lag in range(1, pace.size // 8 + 1)]
    if not shares or shares[0] < 2.0 * chance:
        return 1
    return 2 * len(list(takewhile(lambda share: share > chance, shares)))


def _described(key: Key) -> str:
    if key.what == VERIFY:
        return f"verifications of {key.counts[0]} tokens"
    return f"decisions of {key.of}" if key.what == DECISIONS else " ".join([key.what, key.of, *map(str, key.counts)])
