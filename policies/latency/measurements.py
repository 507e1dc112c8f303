"""Timings as they were read off the clock, by what was timed and by repetition; bootstrap draws of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .entries import Entries

Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]

NS = 1e-9
"""Seconds of the unit that timings are kept in: whole nanoseconds come back from a file as they went in."""

MOST_NS = 10**15
"""The longest timing that is read from a file: nothing takes eleven days."""

# A mean of m out of n blocks, drawn with replacement, has variance (n - 1) s^2 / (n m), where s^2 is that of the sample;
# Student's t with n - 1 degrees of freedom makes it (n - 1) s^2 / (n (n - 3)): the same for m = n - 3.
LOST = 3
"""Blocks fewer than there are that a draw takes: as wide as Student's t with one degree of freedom less than blocks."""


class Key(NamedTuple):
    """What was timed.

    Attributes:
        what: the part of a round, such as `verify`; the kinds are those of `estimate`.
        of: the context (`short`, `long`), or the policy that decided.
        counts: tokens, rows or calls.
    """

    what: str
    of: str
    counts: tuple[int, ...] = ()


Series = tuple[tuple[int, ...], ...]
"""Nanoseconds of one thing timed, by repetition of the whole set; a thing may not come up in each."""


@dataclass(frozen=True)
class Measurements:
    """All timings of a profile.

    Attributes:
        series: by what was timed. Things that were repeated equally often were repeated in turns, so that a repetition
            is a stretch of time in which all of them were timed; what is noisy may have been repeated more often.
    """

    series: Mapping[Key, Series] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.series)

    @cached_property
    def by_repetition(self) -> dict[Key, list[Seconds]]:
        """The seconds of each repetition, by what was timed."""
        return {key: [np.array(ns, dtype=np.float64) * NS for ns in series] for key, series in self.series.items()}

    @cached_property
    def _every(self) -> dict[Key, Seconds]:
        return {key: np.concatenate(parts) for key, parts in self.by_repetition.items()}

    def only(self, what: str) -> Measurements:
        """Return those of one kind."""
        return Measurements({key: series for key, series in self.series.items() if key.what == what})

    def leaving(self, what: str) -> Measurements:
        """Return those of all kinds but one."""
        return Measurements({key: series for key, series in self.series.items() if key.what != what})

    def without(self, what: str, of: str) -> Measurements:
        """Return those of everything else."""
        return Measurements({key: series for key, series in self.series.items() if key[:2] != (what, of)})

    def with_series(self, more: Measurements) -> Measurements:
        """Return these and others, which replace those of the same key."""
        return Measurements({**self.series, **more.series})

    def pooled(self) -> Timings:
        """Return the timings of all repetitions together."""
        return Timings(self._every)

    def resampled(self, rng: np.random.Generator, length: int = 1) -> Timings:
        """Return a bootstrap draw: repetitions with replacement, the same ones of everything that was timed in them.

        Args:
            rng: of the draw.
            length: repetitions that are drawn in one piece; more than one where a slow phase lasts longer than one.

        So few repetitions give too narrow intervals when as many are drawn as there are; with `LOST` blocks fewer, the
        variance of a mean is that of Student's t. Things repeated less often than others are drawn at the same times; what
        did not come up in any of the repetitions drawn is what it was in all.
        """
        most = max((len(series) for series in self.series.values()), default=0)
        places, drawn = rng.random(max(most, 1)), {}
        # Circular blocks (Politis and Romano 1992): one that reaches the end goes on at the beginning, so that repetitions
        # near an end come up as often as others. `places` are shares of the time, the same for series of any count.
        for count in {len(series) for series in self.series.values()}:
            step = min(length, count)
            blocks = max(count // step - LOST, 1)
            starts = (places[:blocks] * count).astype(int)
            drawn[count] = ((starts[:, None] + np.arange(step)) % count).ravel().tolist()
        draw = {
            key: np.concatenate([parts[at] for at in drawn[len(parts)]]) for key, parts in self.by_repetition.items()
        }
        return Timings({key: seconds if seconds.size else self._every[key] for key, seconds in draw.items()})

    def to_list(self) -> list[dict[str, Any]]:
        """Return the series as JSON values."""
        return [
            {"what": key.what, "of": key.of, "counts": list(key.counts), "ns": [list(ns) for ns in series]}
            for key, series in self.series.items()
        ]

    @staticmethod
    def from_list(raw: Any) -> Measurements:
        """Return the series of their JSON form; anything else is a `ValueError` or `KeyError`."""
        if not isinstance(raw, list):
            raise ValueError("measurements: expected a list")
        series = {}
        for at, entry in enumerate(raw):
            values = Entries(entry, f"measurements[{at}]").values
            if not all(isinstance(values[name], str) for name in ("what", "of")):
                raise ValueError(f"measurements[{at}]: expected texts in what and of")
            repetitions = values["ns"] if isinstance(values["ns"], list) else []
            timed = tuple(_wholes(ns, f"measurements[{at}].ns", MOST_NS) for ns in repetitions)
            if not any(timed):
                raise ValueError(
                    f"measurements[{at}].ns: expected a list of timings by repetition, at least one timing"
                )
            series[Key(values["what"], values["of"], _wholes(values["counts"], f"measurements[{at}].counts"))] = timed
        if len(series) != len(raw):
            raise ValueError("measurements: the same series twice")
        return Measurements(series)


def _wholes(values: Any, name: str, most: int = 2**31) -> tuple[int, ...]:
    # By `type`: JSON's true is an int to `isinstance`.
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= most for value in values):
        raise ValueError(f"{name}: expected a list of whole numbers between 0 and {most}")
    return tuple(values)


class Timings:
    """Seconds by what was timed, repetitions pooled: what costs are estimated from."""

    def __init__(self, seconds: Mapping[Key, Seconds]) -> None:
        self._groups: dict[tuple[str, str], dict[tuple[int, ...], Seconds]] = {}
        for key, values in seconds.items():
            if values.size:
                self._groups.setdefault((key.what, key.of), {})[key.counts] = values

    def groups(self, what: str, of: str) -> dict[tuple[int, ...], Seconds]:
        """Return the seconds of one part of a round at one context (or by one policy), by counts."""
        return self._groups.get((what, of), {}).copy()

    def named(self, what: str) -> list[str]:
        """Return the contexts or policies that a part was timed of."""
        return [of for some, of in self._groups if some == what]


def collected(repetitions: Sequence[Mapping[Key, Sequence[float]]]) -> Measurements:
    """Return the measurements of something timed again and again.

    Args:
        repetitions: the seconds of each, by what was timed.
    """
    keys = sorted({key for seconds in repetitions for key in seconds})
    return Measurements({key: tuple(_nanoseconds(seconds.get(key, ())) for seconds in repetitions) for key in keys})


def _nanoseconds(seconds: Sequence[float]) -> tuple[int, ...]:
    return tuple(np.rint(np.asarray(seconds, dtype=np.float64) / NS).clip(0).astype(np.int64).tolist())
