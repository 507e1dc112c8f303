"""Timings of a shared machine made into prices: an average that few outliers do not move, and lines through averages."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Groups = Mapping[tuple[int, ...], ArrayLike]
"""Timings by the counts of what was timed, such as the tokens that each call of a round read."""

Points = tuple[tuple[int, float], ...]

STALL = 3.0
"""Times their median that timings count for at most: what takes longer happened to the machine, not to the model."""

_MOST_STEPS = 100
"""Iterations of non-negative least squares for each unknown; a few are usual."""

ENOUGH = 10
"""Timings from which on an average is as good as any: groups of more weigh no more."""


def typical(seconds: ArrayLike) -> float:
    """Return the mean of timings, 0 of none; stalls are cut to `STALL` times the median.

    Sums are predicted, so the mean counts and not the median: of a machine that is slow for a tenth of the time, the median
    does not know.
    """
    values = np.asarray(seconds, dtype=np.float64)
    if not values.size:
        return 0.0
    # `np.median` takes ten times as long over so few, and every draw of a profile asks for dozens.
    ordered = np.sort(values, axis=None)
    median = (ordered[(values.size - 1) // 2] + ordered[values.size // 2]) / 2.0
    return float(np.minimum(values, STALL * median).mean())


def line(groups: Sequence[tuple[Sequence[float], ArrayLike]], enough: int | None = ENOUGH) -> list[float]:
    """Return the coefficients [C], none below 0, that the averages of groups are nearest to: non-negative least squares.

    Args:
        groups: (counts [C], timings) of rounds that consisted of the same.
        enough: larger groups weigh more, up to so many timings; None = without bound.
    """
    from scipy.optimize import nnls  # slow to import, and only needed where costs are estimated

    weight = np.sqrt([np.size(values) if enough is None else min(np.size(values), enough) for _, values in groups])
    x = np.array([counts for counts, _ in groups], dtype=np.float64) * weight[:, None]  # [G, C]
    y = np.array([typical(values) for _, values in groups]) * weight
    # Tokens come in thousands, rounds one by one: columns of one length make a well-conditioned problem of it. The weights'
    # roots stand in x and y, since squares are summed.
    length = np.linalg.norm(x, axis=0)
    length[length == 0.0] = 1.0
    found, _ = nnls(x / length, y, maxiter=_MOST_STEPS * x.shape[1])
    return [float(value) for value in found / length]


def rising(sides: Sequence[Groups]) -> list[Points]:
    """Return the seconds of a call by tokens for each of several sides: never falling, straight between powers of two.

    They are of one shape, found from all timings together, each side on a scale of its own.

    Args:
        sides: timings of rounds by the tokens that each of their calls read.
    """
    every = pooled(sides)
    if not every:
        return [()] * len(sides)
    knots = _knots(max(max(sizes) for sizes in every))
    # A round's calls were timed together, so their parts add up. No slope between knots is below 0, so the curve never falls.
    # Every timing counts: the sizes that come up most are knots, where the curve can go through what was timed.
    calls = [(np.sum([_parts(n, knots) for n in sizes], 0), times) for sizes, times in every.items()]
    per_call, *rises = line(calls, enough=None)
    known = [per_call + float(np.dot(rises, _parts(n, knots)[1:])) for n in knots]

    curves = []
    for side in sides:
        # All timings over all that the common curve says of them; a side that was never timed takes the curve as it is.
        told = sum(_sum(sizes, knots, known) * np.size(times) for sizes, times in side.items())
        taken = sum(typical(times) * np.size(times) for times in side.values())
        scale = taken / told if taken and told else 1.0
        curves.append(tuple((n, scale * seconds) for n, seconds in zip(knots, known, strict=True)))
    return curves


def never_falling(points: Points, weights: Sequence[float]) -> Points:
    """Return the points nearest in weighted squares whose seconds never fall; neighbours that do have their mean.

    More of the same work takes no less time: where it was timed so, that was noise. (Pool adjacent violators.)
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, points
    for (_, seconds), weight in zip(points, weights, strict=True):
        mean, mass, count = seconds, float(weight), 1
        while pools and pools[-1][0] > mean:
            other, more, before = pools.pop()
            mean, mass, count = (mean * mass + other * more) / (mass + more), mass + more, count + before
        pools.append((mean, mass, count))
    means = [mean for mean, _, count in pools for _ in range(count)]
    return tuple((n, mean) for (n, _), mean in zip(points, means, strict=True))


def between(points: Sequence[tuple[int, float]], at: Sequence[int]) -> tuple[float, ...]:
    """Return what lies on the line through the points; see `along`."""
    return tuple(along(points, at).tolist())


def along(points: Sequence[tuple[int, float]], at: ArrayLike) -> NDArray[np.float64]:
    """Return what lies on the line through the points; beyond them it goes on as it rises over all, and never falls."""
    x, y = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    # By the ends: between the last two points alone noise may rise or fall steeply.
    rise = max((y[-1] - y[0]) / (x[-1] - x[0]), 0.0) if len(x) > 1 else 0.0
    places = np.asarray(at, dtype=np.float64)
    out: NDArray[np.float64] = np.interp(places, x, y) + rise * np.maximum(places - x[-1], 0.0)
    return out


# One array for all who ask: nobody may write into it.
@functools.lru_cache(1024)
def extended(table: tuple[float, ...], count: int) -> NDArray[np.float64]:
    """Return [count] float64, the entries of a table of what 1, 2, ... things cost, which goes on as `between` does."""
    return np.array(between(tuple(enumerate(table)), range(count)))


def pooled(sides: Sequence[Groups]) -> dict[tuple[int, ...], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return the timings of several sides together, by counts in ascending order."""
    every = defaultdict(list)
    for side in sides:
        for counts, seconds in side.items():
            every[counts].append(np.asarray(seconds, dtype=np.float64))
    return {counts: np.concatenate(every[counts]) for counts in sorted(every)}


def _sum(sizes: Sequence[int], knots: Sequence[int], known: Sequence[float]) -> float:
    return float(along(list(zip(knots, known, strict=True)), sizes).sum())


def _knots(most: int) -> list[int]:
    """Return 1, 2, 4, ... below `most`, and `most`."""
    return [*(2**k for k in range((most - 1).bit_length())), most]


def _parts(tokens: int, knots: Sequence[int]) -> list[float]:
    """Return what a call costs, in calls and in tokens between one knot and the next."""
    return [1.0, *(float(min(max(tokens - low, 0), high - low)) for low, high in pairwise(knots))]
