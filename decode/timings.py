"""Timings of a shared machine made into prices: an average that few outliers do not move, and lines through averages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

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
