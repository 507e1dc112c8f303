"""Interpolation and fits against closed-form formulas."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from specstop.policies.costs import MIN_SHARE, along, interpolate
from specstop.policies.measurements import (
    BATCH_DRAFTS,
    BATCH_FIRST,
    BATCH_VERIFY,
    VERIFY,
    Key,
    Timings,
    estimate,
    fit_curves,
    fit_line,
)

SECONDS = st.floats(1e-6, 1.0)


@settings(deadline=None)
@given(st.lists(SECONDS, min_size=1, max_size=6), st.floats(-5.0, 20.0))
def test_interpolation_is_linear_between_points_and_along_the_ends_beyond(seconds: list[float], x: float) -> None:
    counts = np.arange(len(seconds))
    last = len(seconds) - 1
    rise = max(seconds[-1] - seconds[0], 0.0) / (last or 1)
    expected = np.interp(x, counts, seconds) + rise * (min(x, 0.0) + max(x - last, 0.0))
    assert interpolate(x, counts, seconds) == pytest.approx(max(expected, MIN_SHARE * min(seconds)))


@settings(deadline=None)
@given(SECONDS, SECONDS, st.lists(st.integers(0, 40), min_size=2, max_size=6, unique=True))
def test_a_line_is_fitted_exactly_without_noise(constant: float, slope: float, counts: list[int]) -> None:
    fitted = fit_line([((1, n), [constant + slope * n] * 3) for n in counts])
    assert fitted == pytest.approx([constant, slope], rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), SECONDS), min_size=1, max_size=8))
def test_a_fitted_curve_never_falls_and_keeps_the_sum(timings: list[tuple[int, float]]) -> None:
    side = {(n,): np.array([seconds]) for n, seconds in timings}
    (curve,) = fit_curves([side])
    assert all(high >= low - 1e-12 for (_, low), (_, high) in pairwise(curve))
    predicted = sum(float(along(curve, n)) for (n,) in side)
    assert predicted == pytest.approx(sum(float(seconds.sum()) for seconds in side.values()))


def test_the_first_draft_step_of_a_batch_has_its_own_price() -> None:
    timings: Timings = {
        Key(what, side, counts): np.array([seconds])
        for side in ("short", "long")
        for what, counts, seconds in (
            (VERIFY, (1,), 4.0), (BATCH_VERIFY, (2, 4), 5.0), (BATCH_FIRST, (2,), 3.0), (BATCH_DRAFTS, (2, 4), 8.0),
        )
    }  # fmt: skip
    costs = estimate(timings, (10.0, 40.0), 1)
    assert costs.first_draft_s([0, 2], 20.0).tolist() == pytest.approx([0.0, 3.0])
    assert costs.draft_s([0, 2], 20.0).tolist() == pytest.approx([0.0, 2.0])
    drafted = np.array([3, 3])
    assert costs.batch_seconds(np.array([20, 20]), drafted, np.array([1, 1]), drafted, 0.5) == pytest.approx(13.5)
