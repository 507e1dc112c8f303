"""Verifications made comparable: as each is behind rounds like its own, whatever the script had before it.

The longer rounds are, the longer ago the target's weights were read when they are read again, and the fewer of them a cache
that others use too still holds: one verification of two tokens took 13% longer in a text of shuffled lengths than in one that
drafts a single token throughout, and one of nine 5% less than in a text of long drafts. It takes some rounds to settle. So
what a verification takes is a line in the length of the rounds before it, whose slope is found from all of them, and each
length is charged for what it costs those behind it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from ...policies.latency.estimate import TREE_PATH, TREE_VERIFY, VERIFY
from ...policies.latency.measurements import Key, Measurements, Series
from ...policies.latency.robust_fits import STALL

MEMORY = 4
"""Rounds before one that it depends on."""

LEAST = 0.5
"""Share of its seconds that a verification keeps at least."""

SLOPES = {VERIFY: VERIFY, TREE_VERIFY: TREE_VERIFY, TREE_PATH: TREE_VERIFY}
"""What is timed behind other rounds, and whose slope it has. Counts end with the tokens verified and those of `Before`."""


class Before:
    """The mean of the tokens verified in the last rounds of a text."""

    def __init__(self) -> None:
        self._verified: list[int] = []

    def add(self, verified: int) -> int | None:
        """Take a round in and return the mean before it, rounded; None of the first one, which is behind the prompt."""
        last = self._verified[-MEMORY:]
        self._verified.append(verified)
        return round(sum(last) / len(last)) if last else None


def behind_their_like(measured: Measurements) -> Measurements:
    """Return the measurements with verifications by the tokens verified alone, each as behind rounds that verify as many.

    Args:
        measured: the counts of verifications end with the tokens verified in the rounds before.
    """
    slopes = {what: _slope(measured, what) for what in set(SLOPES.values())}
    out: dict[Key, Series] = {}
    for key, series in measured.series.items():
        if key.what not in SLOPES:
            out[key] = series
            continue
        *counts, before = key.counts
        more = slopes[SLOPES[key.what]] * (before - counts[-1])
        settled = tuple(tuple(round(max(ns - more, LEAST * ns)) for ns in repetition) for repetition in series)
        alike = Key(key.what, key.of, tuple(counts))
        out[alike] = tuple(a + b for a, b in zip(out[alike], settled, strict=True)) if alike in out else settled
    return Measurements(out)


def _slope(measured: Measurements, what: str) -> float:
    """Return the nanoseconds by which each token more in the rounds before prolongs a verification, at least none."""
    groups: dict[tuple[str, int], list[tuple[int, NDArray[np.float64]]]] = defaultdict(list)
    for key, series in measured.only(what).series.items():
        verified, before = key.counts
        groups[key.of, verified].append((before, np.concatenate([np.asarray(ns, dtype=np.float64) for ns in series])))
    shared, spread = 0.0, 0.0
    for parts in groups.values():
        seconds = np.concatenate([some for _, some in parts])
        lengths = np.repeat([float(before) for before, _ in parts], [some.size for _, some in parts])
        off = lengths - lengths.mean()
        shared += float(off @ np.minimum(seconds, STALL * np.median(seconds)))
        spread += float(off @ off)
    return max(shared / spread, 0.0) if spread else 0.0
