"""Intervals over prompts, coverage in simulated worlds, and verdicts."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import simulated_worlds
from scipy import stats
from specstop.decode.benchmark import Ratio, expanded_tail
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.measurements import Noise
from specstop.train.evaluate.importance import COLUMNS, observed_rounds
from specstop.train.evaluate.records import DEPLOY, INCONCLUSIVE, NOISY, REFUSE, TOO_FEW, Line
from specstop.train.evaluate.statistics import FEWEST, Clusters, LogRatios, Resamples, clusters_needed, form_clusters
from specstop.train.evaluate.verdict import answer, doubts, findings, verdict
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from synthetic import synthetic_trace

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


def test_undefined_resamples_are_skipped_and_one_prompt_has_no_interval() -> None:
    boot = Resamples(["a", "b", "c"], replicates=500)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = boot.total([1.0, 3.0, 0.0]) / boot.total([1.0, 1.0, 0.0])
    assert not np.isfinite(ratio).all()
    result = boot.interval(ratio)
    assert (result.value, result.low, result.high) == (2.0, 1.0, 3.0)
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


def line(name: str, kind: str, rate: float) -> Line:
    one = Ratio(rate, rate, rate)
    return Line(name, kind, 100.0 * rate, one, one, one)


FIXED = [line("plain decoding", "fixed", 1.0), line("best fixed", "fixed", 1.5)]


def clusters(count: int) -> Clusters:
    return Clusters(tuple(map(str, range(count))))


def policy(name: str, kind: str, rate: float, ratio: Ratio, count: int = 40, **parts: Ratio) -> Line:
    return replace(line(name, kind, rate), to_rival=ratio, verdict=verdict(ratio, count, parts), parts=parts)


def test_a_policy_is_deployed_only_if_its_interval_lies_above_1() -> None:
    quick = policy("quick", "learned", 1.62, Ratio(1.08, 0.95, 1.21))
    sure = policy("sure", "rule", 1.6, Ratio(1.07, 1.02, 1.11))
    result = answer([*FIXED, quick, sure], "fixed:3", clusters(40))
    assert result is not None
    assert (result.verdict, result.deploy, result.use, result.candidate) == (DEPLOY, True, "sure", "sure")
    assert "1.60 times as fast as plain decoding" in result.headline and "1.020 to 1.110" in result.headline
    assert "all 2 policies at once" in result.interval and "40 prompts" in result.interval
    alone = answer([*FIXED, quick], "fixed:3", clusters(40))
    assert alone is not None
    assert (alone.verdict, alone.use, alone.candidate) == (INCONCLUSIVE, "fixed:3", "quick")
    # The lower end is log(1.08 / .95) = .128 from the value, which is log(1.08) = .077 from 1: 40 (.128 / .077)^2 prompts.
    needed = int(re.search(r"About (\d+) prompts", alone.headline)[1])  # type: ignore[index]
    assert needed == pytest.approx(40 * (math.log(1.08 / 0.95) / math.log(1.08)) ** 2, abs=1)


@pytest.mark.parametrize(
    ("ratio", "count", "parts", "expected"),
    [
        (Ratio(0.95, 0.9, 0.99), 40, {}, REFUSE),
        (Ratio(1.3, 1.288, 1.314), 19, {}, TOO_FEW),
        (Ratio(0.95, 0.9, 0.99), 1, {}, TOO_FEW),
        (Ratio(1.0, 0.9, 1.1), 40, {}, INCONCLUSIVE),
        (Ratio(1.1, 1.02, 1.2), 40, {"profile": Ratio(1.1, 0.99, 1.2)}, NOISY),
        (Ratio(1.1, 0.97, 1.2), 40, {"prompts": Ratio(1.1, 1.05, 1.2)}, NOISY),
        (Ratio(1.1, 1.02, 1.2), 40, {"profile": Ratio(1.1)}, DEPLOY),
    ],
)
def test_every_interval_has_a_verdict(ratio: Ratio, count: int, parts: dict[str, Ratio], expected: str) -> None:
    result = answer([*FIXED, policy("x", "learned", 1.4, ratio, count, **parts)], "fixed:3", clusters(count))
    assert result is not None
    assert result.verdict == expected
    assert (result.use, result.deploy) == (("x", True) if expected == DEPLOY else ("fixed:3", False))


def test_a_report_that_contradicts_itself_deploys_nothing() -> None:
    top = policy("x", "learned", 1.7, Ratio(1.1, 1.05, 1.2))
    quiet = Noise(10, 0.1, 0.0, 0.0, 0.0, 1)
    busy = replace(quiet, phases=12.0)
    for below, share, noise, word in (
        (["x"], 0.5, quiet, "faster than the oracle bound"),
        ([], 1.2, quiet, "at most 1 is possible"),
        ([], 0.5, busy, "13.0 times"),
        ([], 0.5, quiet, ""),
    ):
        lines = [*FIXED, replace(top, oracle_share=Ratio(share, share, share))]
        reasons = doubts(lines, below, SimpleNamespace(noise=noise))  # type: ignore[arg-type]
        result = answer(lines, "fixed:3", clusters(40), doubts=reasons)
        assert result is not None
        assert (result.verdict == NOISY) == bool(word) and word in result.headline
        assert result.deploy != bool(word)


def test_the_primary_policy_is_what_the_answer_is_about() -> None:
    mine = policy("mine", "learned", 1.5, Ratio(1.0, 0.9, 1.1))
    other = policy("other", "learned", 1.7, Ratio(1.1, 1.05, 1.2))
    result = answer([*FIXED, mine, other], "fixed:3", clusters(40), primary="mine")
    assert result is not None
    assert (result.verdict, result.candidate) == (INCONCLUSIVE, "mine")
    assert "primary policy" in result.headline and "primary policy" in result.interval


def test_on_trees_the_best_static_tree_is_the_rival() -> None:
    lines = [*FIXED, line("best static tree", "static", 1.7), policy("x", "learned", 1.6, Ratio(0.94, 0.9, 0.97))]
    result = answer(lines, "fixed:3", clusters(40))
    assert result is not None
    assert (result.deploy, result.use) == (False, "best static tree")
    assert "the best fixed length (fixed:3) and the best static tree" in result.headline


def test_clusters_are_prompts_or_groups() -> None:
    prompts, groups = [f"p{i}" for i in range(100)], [f"g{i // 20}" for i in range(100)]
    tokens = [50] * 100
    for by, count in (("prompt", 100), ("group", 5)):
        chosen = form_clusters(prompts, groups, tokens, by)
        assert (chosen.count, chosen.unit, chosen.largest) == (count, f"{by}s", 1 / count)
    # A prompt of two groups counts for one of them: clusters are disjoint.
    shared = form_clusters([*prompts[:99], "p0"], groups, tokens, "group")
    assert shared.of[0] == shared.of[99] == "g0" and shared.count == 5
    for by, names in (("groups", groups), ("group", [""] * 100)):
        with pytest.raises(InputError, match="cluster"):
            form_clusters(prompts, names, tokens, by)


def test_a_prompt_with_most_of_the_tokens_is_named() -> None:
    for longest, share in ((9, 0), (60, 23), (200, 50)):
        arrays = synthetic_trace([[0] * longest, *[[1] * 9] * 20], 3)
        chosen = form_clusters(arrays.clusters, arrays.groups, arrays.text_tokens.tolist())
        warnings = findings(SimpleNamespace(noise=None), chosen, arrays.prompt_ids)  # type: ignore[arg-type]
        assert len(warnings) == bool(share) and all(
            f"prompt '0' has {share}% of all tokens" in text for text in warnings
        )
        ratio = Ratio(1.1, 1.05, 1.2)
        top = replace(line("x", "rule", 1.6), to_rival=ratio, verdict=verdict(ratio, 21, None, chosen.largest))
        result = answer([*FIXED, top], "fixed:3", chosen)
        assert result is not None
        assert result.verdict == (TOO_FEW if share == 50 else DEPLOY)
        assert ("one has 50% of all tokens" in result.headline) == (share == 50)


STANDARD_ERRORS = 5.0  # of a simulated mean around its truth: a false alarm in two million


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    return simulated_worlds


@pytest.mark.parametrize("seed", [3, 4])
def test_the_closed_form_of_a_text_is_what_replay_takes_on_average(coverage: ModuleType, seed: int) -> None:
    chance = np.random.default_rng(seed)
    world = coverage.draw_world(chance)
    arrays = trace_arrays(coverage.sample_dense(world, 1500, chance))
    for policy in (FixedLength(0), FixedLength(3), coverage.DEEPER, coverage.LOGGING):
        seconds = replay(arrays, policy, world.profile).seconds.numpy()
        error = seconds.std() / len(seconds) ** 0.5
        assert abs(seconds.mean() - coverage.true_seconds(world, policy)) < STANDARD_ERRORS * error, policy.name


@pytest.mark.parametrize("seed", [5, 6])
def test_the_closed_form_of_a_round_is_what_rounds_bring_on_average(coverage: ModuleType, seed: int) -> None:
    chance = np.random.default_rng(seed)
    world = coverage.draw_world(chance)
    arrays = trace_arrays(coverage.sample_live(world, 600, Confidence(0.0, coverage.DEPTH), 0.5, chance), extra=COLUMNS)
    for policy in (FixedLength(2), coverage.DEEPER, coverage.LOGGING):
        shown = observed_rounds(arrays, policy, world.profile)
        assert shown.observed.all()
        for values, truth in zip((shown.tokens, shown.seconds), coverage.true_round(world, policy), strict=True):
            by_prompt = values.reshape(600, -1).mean(1)
            error = by_prompt.std() / 600**0.5
            assert abs(by_prompt.mean() - truth) <= STANDARD_ERRORS * error + 1e-9, policy.name


def test_a_sample_of_worlds_is_covered(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 worlds: at 95% each, 6 or fewer hits of 10 in a row of figures happen once in 900; over rows they hang together."""
    monkeypatch.setattr(coverage, "LENGTHS", np.array([12, 18, 28]))
    result = [one for seed in range(10) for one in coverage.dense_world(seed)]
    hits = {what: [f.covered for f in result if f.what == what] for what in {f.what for f in result}}
    assert set(map(len, hits.values())) == {10}
    assert len(hits) == 4
    assert min(map(sum, hits.values())) >= 7, hits


def test_a_sample_of_live_worlds_is_covered_without_bias(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "LIVE_SIZES", (40,))
    result = [one for seed in range(20) for one in coverage.live_world(seed)]
    for what in ("tokens", "seconds", "rate", "to recorded"):
        mine = [f for f in result if (f.method, f.what) == ("importance", what)]
        errors = np.array([f.error for f in mine])
        assert len(mine) == 20
        assert sum(f.covered for f in mine) >= 14, what
        assert abs(errors.mean()) < STANDARD_ERRORS * errors.std() / 20**0.5, what
