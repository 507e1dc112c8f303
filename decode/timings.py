"""Timings of a shared machine made into prices: an average that few outliers do not move, and lines through averages."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

Calls = Mapping[tuple[int, ...], Sequence[float]]
"""Timings of calls that read so many tokens, those of a round together."""

Points = tuple[tuple[int, float], ...]

STALL = 3.0
"""Times their median that timings count for at most: what takes longer happened to the machine, not to the model."""

ENOUGH = 10
"""Timings from which on an average is as good as any: groups of more weigh no more."""


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of timings, 0 of none; stalls are cut to `STALL` times the median.

    Sums are predicted, so the mean counts and not the median: of a machine that is slow for a tenth of the time, the median
    does not know.
    """
    if not seconds:
        return 0.0
    most = STALL * statistics.median(seconds)
    return statistics.fmean(min(value, most) for value in seconds)


def line(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[float]:
    """Return the coefficients [C], none below 0, that the averages of groups are nearest to.

    Args:
        groups: (counts [C], timings) of rounds that consisted of the same; larger groups weigh more, up to `ENOUGH`.
    """
    weight = np.sqrt([min(len(values), ENOUGH) for _, values in groups])
    x = np.array([key for key, _ in groups], dtype=np.float64) * weight[:, None]
    y = np.array([typical(values) for _, values in groups]) * weight
    columns = list(range(x.shape[1]))
    while columns:
        found, *_ = np.linalg.lstsq(x[:, columns], y, rcond=None)
        if (found >= 0).all():
            break
        columns.pop(int(found.argmin()))
    out = [0.0] * x.shape[1]
    for column, value in zip(columns, found if columns else [], strict=True):
        out[column] = float(value)
    return out


def rising(sides: Sequence[Calls]) -> list[Points]:
    """Return the seconds of a call by tokens for each of several sides: never falling, straight between powers of two.

    They are of one shape, found from all timings together, each side on a scale of its own.
    """
    every: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for side in sides:
        for sizes, seconds in side.items():
            every[sizes].extend(seconds)
    if not every:
        return [()] * len(sides)
    knots = _knots(max(max(sizes) for sizes in every))
    per_call, *rises = line([(np.sum([_parts(n, knots) for n in sizes], 0), times) for sizes, times in every.items()])
    known = [per_call + float(np.dot(rises, _parts(n, knots)[1:])) for n in knots]

    curves = []
    for side in sides:
        said = {sizes: float(np.interp(sizes, knots, known).sum()) for sizes in side}
        scale = typical([s / said[sizes] for sizes, seconds in side.items() for s in seconds if said[sizes]]) or 1.0
        curves.append(tuple((n, scale * seconds) for n, seconds in zip(knots, known, strict=True)))
    return curves


def _knots(most: int) -> list[int]:
    """Return 1, 2, 4, ... below `most`, and `most`."""
    return [*(2**k for k in range((most - 1).bit_length())), most]


def _parts(tokens: int, knots: Sequence[int]) -> list[float]:
    """Return what a call costs, in calls and in tokens between one knot and the next."""
    return [1.0, *(float(min(max(tokens - low, 0), high - low)) for low, high in pairwise(knots))]
