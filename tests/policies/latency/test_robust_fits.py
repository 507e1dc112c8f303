"""Averages that outliers do not move, lines through them, and the price of decisions that comes of both."""

from __future__ import annotations

import random

import pytest
from specstop.policies.estimate import STALL, typical
from specstop.policies.latency.robust_fits import ENOUGH, extended, line, rising


def test_timings_count_by_their_mean() -> None:
    """A median would say 1 for the last two: sums are what is predicted."""
    assert typical([]) == 0.0
    assert typical([3.0]) == 3.0
    assert typical([1.0, 2.0]) == 1.5
    assert typical([1.0] * 60 + [2.0] * 40) == pytest.approx(1.4)
    assert typical([1.0] * 80 + [2.0] * 20) == pytest.approx(1.2)


def test_a_stall_counts_for_little() -> None:
    values = [float(v) for v in range(5, 25)]
    random.Random(0).shuffle(values)
    assert typical([*values, 1e6]) == pytest.approx((sum(values) + STALL * 15.0) / 21)


def test_a_line_goes_through_its_groups() -> None:
    groups = [((count, 1), [5.0 * count + 2.0] * (count + 1)) for count in range(1, 6)]
    assert line(groups) == pytest.approx([5.0, 2.0])


def test_no_coefficient_is_below_zero() -> None:
    """Times that fall with the count are a constant: no part of a round gives time back."""
    slope, constant = line([((1, 1), [4.0] * 9), ((2, 1), [3.0] * 9), ((3, 1), [2.0] * 9)])
    assert slope == 0.0 and constant == pytest.approx(3.0)


def test_large_groups_do_not_drown_small_ones() -> None:
    groups = [((1, 1), [1.0] * 10_000), ((2, 1), [2.0] * ENOUGH), ((4, 1), [5.0] * ENOUGH)]
    slope, _ = line(groups)
    assert slope == pytest.approx(25 / 21)  # least squares of three points that weigh the same, through 0


def test_sums_of_calls_give_the_curve_and_each_side_its_scale() -> None:
    def seconds(tokens: int) -> float:
        return 3.0 + 0.5 * min(tokens - 1, 1) + 0.25 * max(tokens - 8, 0)

    sizes = [(1,), (2,), (1, 1), (1, 5), (2, 3, 4), (8,), (12,), (4, 16)]
    sides = [{some: [scale * sum(map(seconds, some))] for some in sizes} for scale in (1.0, 1.5)]
    low, high = rising(sides)
    assert [tokens for tokens, _ in low] == [1, 2, 4, 8, 16]
    assert [s for _, s in low] == pytest.approx([seconds(tokens) for tokens, _ in low])
    assert [s for _, s in high] == pytest.approx([1.5 * s for _, s in low])


def test_a_size_that_was_timed_in_a_lucky_moment_is_no_cheaper_than_a_smaller_one() -> None:
    ((_, *points),) = rising([{(1,): [1.0], (2,): [1.2], (4,): [0.9], (8,): [1.6]}])
    assert [s for _, s in points] == sorted(s for _, s in points)


def test_no_call_has_no_curve() -> None:
    assert rising([{}, {}]) == [(), ()]


def test_tables_go_on_as_they_rise_over_all() -> None:
    assert extended((1.0, 2.0, 5.0), 5).tolist() == [1.0, 2.0, 5.0, 7.0, 9.0]
    assert extended((1.0, 3.0), 1).tolist() == [1.0]
    assert extended((0.5,), 3).tolist() == [0.5, 0.5, 0.5]
    assert extended((3.0, 1.0), 3).tolist() == [3.0, 1.0, 1.0]


def test_sizes_that_were_timed_often_are_priced_as_they_were() -> None:
    """Off the line between them lie many sizes that came up once or twice, and hardly pull at them."""
    often: dict[tuple[int, ...], list[float]] = {
        (n,): [seconds] * 60 for n, seconds in ((1, 1.0), (32, 3.0), (63, 4.0))
    }
    seldom: dict[tuple[int, ...], list[float]] = {(n,): [4.2] * 2 for n in range(33, 60)}
    (curve,) = rising([{**often, **seldom}])
    assert [dict(curve)[n] for n in (1, 32, 63)] == [
        pytest.approx(seconds, rel=0.11) for (seconds, *_) in often.values()
    ]
