"""Ratios of what was measured in alternation: numbers of a record by dotted key, orders of the sides, intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

CONFIDENCE = 0.95
ORDERS = {
    2: ((0, 1), (1, 0)),
    3: ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2)),
}
"""By number of sides the order of each round, by turns: after each comes its reverse, and each side comes first as often."""


def numbers(record: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a JSON value by dotted key; truth values are none."""
    if isinstance(record, bool):
        return
    if isinstance(record, (int, float)):
        if math.isfinite(record):
            yield key, float(record)
        return
    children: Any = record.items() if isinstance(record, Mapping) else ()
    if isinstance(record, list):
        children = enumerate(record)
    for name, value in children:
        yield from numbers(value, f"{key}.{name}" if key else str(name))


def order(number: int, sides: int) -> tuple[int, ...]:
    """Return in which order the sides run in a round."""
    return ORDERS[sides][number % len(ORDERS[sides])]


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of ratios of rounds, with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return value and interval as text."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(after: Sequence[float], before: Sequence[float]) -> Ratio | None:
    """Return after over before, round by round: Student's t on the logarithms of the ratios of rounds.

    Returns:
        None where there is no such ratio: fewer than two rounds, or numbers of which some are not above 0. Numbers that are
        the same in all rounds have the ratio 1, whatever they are.
    """
    if len(after) < 2:
        return None
    if list(after) == list(before):
        return Ratio(1.0, 1.0, 1.0)
    if min(*after, *before) <= 0:
        return None
    logs = [math.log(a / b) for a, b in zip(after, before, strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / len(logs) ** 0.5
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(logs) - 1)) * error
    return Ratio(math.exp(mean), math.exp(min(mean - half, 700.0)), math.exp(min(mean + half, 700.0)))


def together(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the geometric means of two runs of one side; their means where one is not above 0."""
    return [(a * b) ** 0.5 if min(a, b) > 0 else (a + b) / 2 for a, b in zip(first, second, strict=True)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high
