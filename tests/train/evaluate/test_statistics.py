"""Intervals over prompts: levels, pairing, errors of prices, number of clusters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats
from specstop.decode.benchmark import Ratio, expanded_tail
from specstop.train.evaluate.statistics import FEWEST, LogRatios, Resamples, clusters_needed

NORMAL_TAIL = 0.025


def test_totals_are_sums_over_resampled_prompts() -> None:
    boot = Resamples(["b", "a", "b", "c"], seed=3, replicates=50)
    assert boot.clusters == 3
    totals = boot.total([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]])
    assert totals.shape == (51, 2)
    assert totals[0].tolist() == [15.0, 150.0]
    assert np.allclose(totals[:, 1], 10 * totals[:, 0]), "columns share their resamples"
    # a = 2, b = 5, c = 8: three draws of these, with the two sequences of b together
    possible = {2 * i + 5 * j + 8 * (3 - i - j) for i in range(4) for j in range(4 - i)}
    assert set(totals[1:, 0]) <= {float(x) for x in possible}
    assert np.array_equal(Resamples(["b", "a", "b", "c"], 3, 50).total([1, 2, 4, 8]), totals[:, 0])
    assert not np.array_equal(Resamples(["b", "a", "b", "c"], 4, 50).total([1, 2, 4, 8]), totals[:, 0])


def test_the_tail_is_that_of_students_t_and_nears_the_nominal_one() -> None:
    for prompts in (2, 5, 20, 80):
        z = stats.norm.ppf(expanded_tail(prompts))
        assert -z == pytest.approx(stats.t.ppf(0.975, prompts - 1) * (prompts / (prompts - 1)) ** 0.5)
    tails = [expanded_tail(prompts) for prompts in (5, 20, 80, 100_000)]
    assert tails == sorted(tails)
    assert tails[-1] == pytest.approx(NORMAL_TAIL, abs=1e-5)


def test_speed_is_a_ratio_of_sums_with_prompts_drawn_together() -> None:
    boot = Resamples(range(4))
    slow = boot.total([2.0, 4.0, 6.0, 8.0])
    even = boot.interval(slow / boot.total([1.0, 2.0, 3.0, 4.0]))
    assert (even.value, even.low, even.high) == pytest.approx((2.0, 2.0, 2.0))
    uneven = boot.interval(slow / boot.total([1.0, 2.0, 3.0, 8.0]))
    assert uneven.value == pytest.approx(20 / 14) and uneven.low < uneven.value < uneven.high


def test_undefined_resamples_are_skipped_and_one_prompt_has_no_interval() -> None:
    boot = Resamples(["a", "b", "c"], replicates=500)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = boot.total([1.0, 3.0, 0.0]) / boot.total([1.0, 1.0, 0.0])
    assert not np.isfinite(ratio).all()
    found = boot.interval(ratio)
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0)
    alone = Resamples(["a", "a"], replicates=10)
    assert alone.interval(alone.total([1.0, 2.0])) == Ratio(3.0, None, None)


def family(rng: np.random.Generator, clusters: int, policies: int) -> tuple[Resamples, LogRatios]:
    seconds = np.concatenate([np.ones((clusters, 1)), 1.0 + rng.normal(0.0, 0.1, (clusters, policies))], 1)
    boot = Resamples(range(clusters), replicates=500)
    return boot, boot.log_ratios(np.ones(clusters), seconds, range(1, policies + 1), [0])


def test_simultaneous_intervals_keep_their_level_over_many_policies() -> None:
    """20 policies that gain nothing: one at a time, each is missed 1 time in 20, and some policy in two worlds of three."""
    rng, missed, single = np.random.default_rng(0), 0, 0
    for _ in range(200):
        boot, logs = family(rng, 30, 20)
        (ratios,) = boot.simultaneous([logs])
        missed += any(not r.low <= 1.0 <= r.high for r in ratios)  # type: ignore[operator]
        alone = [boot.interval(np.exp(column)) for column in logs.values.T]
        single += any(r.is_above or r.is_below for r in alone)
    assert missed <= 18 < 80 < single, "of 200 worlds 10 are expected; 18 has a chance of 1%"


def test_the_interval_of_one_policy_is_that_of_students_t() -> None:
    rng = np.random.default_rng(0)
    seconds = np.stack([np.ones(40), 1.0 + rng.normal(0.0, 0.1, 40)], 1)
    boot = Resamples(range(40), replicates=20_000)
    ((ratio,),) = boot.simultaneous([boot.log_ratios(np.ones(40), seconds, [1], [0])])
    error = seconds[:, 1].std(ddof=1) / 40**0.5 / seconds[:, 1].mean()
    assert ratio.value == pytest.approx(40 / seconds[:, 1].sum())
    assert np.log(ratio.high / ratio.low) == pytest.approx(2 * stats.t.ppf(0.975, 39) * error, rel=0.05)


def test_equal_samples_of_a_prompt_do_not_narrow_an_interval() -> None:
    rng = np.random.default_rng(0)
    seconds = np.stack([np.ones(20), 1.0 + rng.normal(0.0, 0.1, 20)], 1)
    once, eight = (Resamples(np.repeat(range(20), count).tolist()) for count in (1, 8))
    ratios = [
        boot.simultaneous([boot.log_ratios(np.ones(20 * n), np.repeat(seconds, n, 0), [1], [0])])[0][0]
        for boot, n in ((once, 1), (eight, 8))
    ]
    assert dataclasses.astuple(ratios[0]) == pytest.approx(dataclasses.astuple(ratios[1]))


def test_the_rival_is_chosen_again_and_a_policy_that_is_its_rival_has_no_error() -> None:
    rng = np.random.default_rng(0)
    fixed = 1.0 + rng.normal(0.0, 0.1, (40, 3))
    seconds = np.concatenate([fixed, fixed[:, [int(fixed.sum(0).argmin())]], 1.0 + rng.normal(0.0, 0.1, (40, 1))], 1)
    boot = Resamples(range(40))
    logs = boot.log_ratios(np.ones(40), seconds, [3, 4], [0, 1, 2])
    drawn = boot.total(seconds)
    ratios = drawn[:, :3].min(1) / drawn[:, 4]
    assert np.exp(logs.values[0, 1]) == pytest.approx(ratios[0])
    assert np.exp(logs.values[:, 1]) == pytest.approx(ratios, rel=0.01), "linear in the deviations"
    assert logs.values[0, 0] == 0.0 and (logs.values[1:, 0] <= 1e-12).all()
    alone, pair = boot.simultaneous([logs])[0]
    assert alone.low == pytest.approx(1.0, abs=0.1) and pair.low < pair.value < pair.high  # type: ignore[operator]
    ((same,),) = boot.simultaneous([boot.log_ratios(np.ones(40), seconds, [3], [int(fixed.sum(0).argmin())])])
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)


def test_errors_of_prices_widen_intervals() -> None:
    rng = np.random.default_rng(0)
    seconds = np.stack([np.ones(40), 1.0 + rng.normal(0.0, 0.05, 40)], 1)
    boot = Resamples(range(40))
    noise = np.concatenate([np.zeros((1, 2)), rng.normal(0.0, 0.05, (boot.replicates, 2)) * [0.0, 1.0]])
    plain, priced = (
        boot.simultaneous([boot.log_ratios(np.ones(40), seconds, [1], [0], price)])[0][0] for price in (None, noise)
    )
    halves = [np.log(r.high / r.low) / 2 for r in (plain, priced)]
    assert halves[1] == pytest.approx(np.hypot(halves[0], 1.96 * 0.05), rel=0.1)


def test_the_number_of_clusters_needed_excludes_1() -> None:
    assert clusters_needed(Ratio(1.02, 0.98, 1.06), 50) == int(np.ceil(50 * (np.log(0.98 / 1.02) / np.log(1.02)) ** 2))
    assert clusters_needed(Ratio(1.3, 1.29, 1.31), 5) == FEWEST
    assert clusters_needed(Ratio(1.0, 0.9, 1.1), 50) is None and clusters_needed(Ratio(1.1), 1) is None
