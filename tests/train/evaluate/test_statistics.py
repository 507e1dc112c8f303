"""Intervals over prompts, coverage in simulated worlds, and verdicts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simulated_worlds as worlds
from scipy import stats
from specstop.decode.benchmark import Ratio, expanded_tail
from specstop.policies import Array, FixedLength, InputError
from specstop.policies.measurements import Noise
from specstop.train import Line, trace_arrays
from specstop.train.evaluate.records import DEPLOY, INCONCLUSIVE, NOISY, REFUSE, TOO_FEW, Answer
from specstop.train.evaluate.statistics import FEWEST, Clusters, Resamples, clusters_needed, form_clusters
from specstop.train.evaluate.verdict import answer, doubts, findings, verdict
from synthetic import synthetic_trace

from specstop import replay


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


def test_the_tail_of_an_interval_is_that_of_students_t() -> None:
    for prompts in (2, 5, 20, 80):
        z = stats.norm.ppf(expanded_tail(prompts))
        assert -z == pytest.approx(stats.t.ppf(0.975, prompts - 1) * (prompts / (prompts - 1)) ** 0.5)


def test_undefined_resamples_are_skipped_and_one_prompt_has_no_interval() -> None:
    boot = Resamples(["a", "b", "c"], replicates=500)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = boot.total([1.0, 3.0, 0.0]) / boot.total([1.0, 1.0, 0.0])
    assert not np.isfinite(ratio).all()
    result = boot.interval(ratio)
    assert (result.value, result.low, result.high) == (2.0, 1.0, 3.0)
    alone = Resamples(["a", "a"], replicates=10)
    assert alone.interval(alone.total([1.0, 2.0])) == Ratio(3.0, None, None)


def noisy_seconds(clusters: int, noise: float = 0.1) -> Array:
    """Return [clusters, 2] seconds: 1 of the rival, and of mean 1 of a policy."""
    return np.stack([np.ones(clusters), 1.0 + np.random.default_rng(0).normal(0.0, noise, clusters)], 1)


def compared(boot: Resamples, seconds: Array, price: Array | None = None) -> Ratio:
    """Return the interval of the policy in the second column against the first column."""
    ((ratio,),) = boot.simultaneous([boot.log_ratios(np.ones(len(seconds)), seconds, [1], [0], price)])
    return ratio


def ratios_without_gain(places: int, policies: int, shared: float, seed: int, prompts: int = 30) -> list[Ratio]:
    """Return the ratios of policies that gain nothing, in places with a share of common prompts.

    A policy gains or loses on the same prompts in every place, so that its ratios are correlated over the places.
    """
    rng = np.random.default_rng([seed, round(10 * shared)])
    common = round(shared * prompts)
    separate = np.arange(common, common + places * (prompts - common)).reshape(places, -1)
    count = common + separate.size
    cost, gain = rng.gamma(4.0, size=count), rng.normal(0.0, 0.08, (count, policies))
    families = []
    for rows in separate:
        names = np.concatenate([np.arange(common), rows])
        pace = 1.0 + gain[names] + rng.normal(0.0, 0.02, (prompts, policies))
        seconds = cost[names, None] * np.concatenate([np.ones((prompts, 1)), pace], 1)
        boot = Resamples(names, replicates=500, among=range(count))
        families.append(boot.log_ratios(np.full(prompts, 60.0), seconds, range(1, policies + 1), [0]))
    return [ratio for family in boot.simultaneous(families) for ratio in family]


WORLDS = int(os.environ.get("SPECSTOP_WORLDS", "100"))
"""Simulated worlds. A longer run: SPECSTOP_WORLDS=2000 pytest -k false_deploy tests/train/evaluate/test_statistics.py"""


@pytest.mark.parametrize(("places", "policies", "shared"), [(1, 20, 1.0), (3, 4, 1.0), (3, 4, 0.5)])
def test_a_false_deploy_is_rare_over_all_policies_and_places(places: int, policies: int, shared: float) -> None:
    """At most 2.5% false deployments, and intervals that hold in 95% of the worlds, within three standard errors."""
    worlds = [ratios_without_gain(places, policies, shared, seed) for seed in range(WORLDS)]
    false_deploy = np.mean([any(ratio.is_above for ratio in ratios) for ratios in worlds])
    missed = np.mean([any(ratio.is_above or ratio.is_below for ratio in ratios) for ratios in worlds])
    assert false_deploy <= 0.025 + 3 * (0.025 * 0.975 / WORLDS) ** 0.5
    assert missed <= 0.05 + 3 * (0.05 * 0.95 / WORLDS) ** 0.5


def test_the_interval_of_one_policy_is_that_of_students_t() -> None:
    seconds = noisy_seconds(40)
    ratio = compared(Resamples(range(40), replicates=20_000), seconds)
    error = seconds[:, 1].std(ddof=1) / 40**0.5 / seconds[:, 1].mean()
    assert ratio.value == pytest.approx(40 / seconds[:, 1].sum())
    assert np.log(ratio.high / ratio.low) == pytest.approx(2 * stats.t.ppf(0.975, 39) * error, rel=0.05)


def test_equal_samples_of_a_prompt_do_not_narrow_an_interval() -> None:
    once, eight = (
        compared(Resamples(np.repeat(range(20), count).tolist()), np.repeat(noisy_seconds(20), count, 0))
        for count in (1, 8)
    )
    assert dataclasses.astuple(once) == pytest.approx(dataclasses.astuple(eight))


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
    seconds, boot = noisy_seconds(40, noise=0.05), Resamples(range(40))
    errors = np.random.default_rng(1).normal(0.0, 0.05, (1 + boot.replicates, 2)) * [0.0, 1.0]
    errors[0] = 0.0
    ratios = [compared(boot, seconds, price) for price in (None, errors)]
    halves = [np.log(ratio.high / ratio.low) / 2 for ratio in ratios]
    assert halves[1] == pytest.approx(np.hypot(halves[0], 1.96 * 0.05), rel=0.1)


def test_the_number_of_clusters_needed_excludes_1() -> None:
    assert clusters_needed(Ratio(1.02, 0.98, 1.06), 50) == int(np.ceil(50 * (np.log(0.98 / 1.02) / np.log(1.02)) ** 2))
    assert clusters_needed(Ratio(1.3, 1.29, 1.31), 5) == FEWEST
    assert clusters_needed(Ratio(1.0, 0.9, 1.1), 50) is None and clusters_needed(Ratio(1.1), 1) is None


def line(name: str, kind: str, rate: float) -> Line:
    one = Ratio(rate, rate, rate)
    return Line(name, kind, 100.0 * rate, one, one, one)


def policy(name: str, kind: str, rate: float, ratio: Ratio, count: int = 40, **parts: Ratio) -> Line:
    return replace(line(name, kind, rate), to_rival=ratio, verdict=verdict(ratio, count, parts), parts=parts)


def answered(policies: Sequence[Line], count: int = 40, **options: Any) -> Answer:
    """Return the answer of a report with these policies and two fixed lengths, of which `fixed:3` is the best."""
    lines = [line("plain decoding", "fixed", 1.0), line("best fixed", "fixed", 1.5), *policies]
    result = answer(lines, "fixed:3", Clusters(tuple(map(str, range(count)))), **options)
    assert result is not None
    return result


def test_the_fastest_policy_with_an_interval_above_1_is_deployed() -> None:
    quick = policy("quick", "learned", 1.62, Ratio(1.08, 0.95, 1.21))
    certain = policy("certain", "rule", 1.6, Ratio(1.07, 1.02, 1.11))
    result = answered([quick, certain])
    assert (result.verdict, result.deploy, result.use, result.candidate) == (DEPLOY, True, "certain", "certain")
    assert "1.60 times" in result.headline and "1.020 to 1.110" in result.headline
    alone = answered([quick])
    assert (alone.verdict, alone.use, alone.candidate) == (INCONCLUSIVE, "fixed:3", "quick")
    assert f"About {clusters_needed(quick.speedup, 40)} prompts" in alone.headline
    other = answered([quick, certain], primary="quick")
    assert (other.verdict, other.candidate) == (INCONCLUSIVE, "quick")


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
    result = answered([policy("x", "learned", 1.4, ratio, count, **parts)], count)
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
        lines = [replace(top, oracle_share=Ratio(share, share, share))]
        reasons = doubts(lines, below, SimpleNamespace(noise=noise))  # type: ignore[arg-type]
        result = answered(lines, doubts=reasons)
        assert (result.verdict == NOISY) == bool(word) and word in result.headline
        assert result.deploy != bool(word)


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


@pytest.mark.parametrize(("longest", "share"), [(9, 0), (60, 23), (200, 50)])
def test_a_prompt_with_most_of_the_tokens_is_reported(longest: int, share: int) -> None:
    """Above a third of the tokens there is no verdict."""
    arrays = synthetic_trace([[0] * longest, *[[1] * 9] * 20], 3)
    chosen = form_clusters(arrays.clusters, arrays.groups, arrays.text_tokens.tolist())
    warnings = findings(SimpleNamespace(noise=None), chosen, arrays.prompt_ids)  # type: ignore[arg-type]
    assert len(warnings) == bool(share) and all(f"'0' has {share}% of all tokens" in text for text in warnings)
    assert verdict(Ratio(1.1, 1.05, 1.2), 21, None, chosen.largest) == (TOO_FEW if share == 50 else DEPLOY)


STANDARD_ERRORS = 5.0  # of a simulated mean around its truth: a false alarm in two million


def test_the_mean_seconds_of_a_text_in_replay_are_their_closed_form() -> None:
    rng = np.random.default_rng(3)
    world = worlds.draw_world(rng)
    arrays = trace_arrays(worlds.sample_dense(world, 1500, rng))
    for policy in (FixedLength(0), FixedLength(3), worlds.DEEPER, worlds.LOGGING):
        seconds = replay(arrays, policy, world.profile).seconds.numpy()
        error = seconds.std() / len(seconds) ** 0.5
        assert abs(seconds.mean() - worlds.true_seconds(world, policy)) < STANDARD_ERRORS * error, policy.name


def test_intervals_cover_the_truth_of_simulated_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a coverage of 95%, 6 or fewer hits of 10 have a probability of 1 in 900."""
    monkeypatch.setattr(worlds, "LENGTHS", np.array([12, 18, 28]))
    estimates = [one for seed in range(10) for one in worlds.dense_world(seed)]
    hits = {what: [f.covered for f in estimates if f.what == what] for what in {f.what for f in estimates}}
    assert set(map(len, hits.values())) == {10}
    assert len(hits) == 4
    assert min(map(sum, hits.values())) >= 7, hits


def test_estimates_from_live_worlds_cover_the_truth_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "LIVE_SIZES", (40,))
    estimates = [one for seed in range(20) for one in worlds.live_world(seed)]
    for what in ("tokens", "seconds", "rate", "to recorded"):
        subset = [f for f in estimates if (f.method, f.what) == ("importance", what)]
        errors = np.array([f.error for f in subset])
        assert len(subset) == 20
        assert sum(f.covered for f in subset) >= 14, what
        assert abs(errors.mean()) < STANDARD_ERRORS * errors.std() / 20**0.5, what
