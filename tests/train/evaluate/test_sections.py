"""Sections of a report: time, groups, calibration, resampled prices, and the comparison with an earlier report."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect import collect
from specstop.policies import Confidence, FixedLength, load_policy_folder
from specstop.policies.batch_rules import for_batches
from specstop.policies.measurements import DECISIONS
from specstop.train import TraceArrays, compare_reports, read_report, trace_arrays, train
from specstop.train.evaluate import pricing as prices
from specstop.train.evaluate.analysis import Replays, by_group, by_prompt, reliability, stop_cost, survival, time_share
from specstop.train.evaluate.pricing import TIMED, TRAINED, Priced, ProfileBootstrap, ResampleSource, with_prices
from specstop.train.evaluate.records import REPORT_SCHEMA
from specstop.train.evaluate.statistics import Resamples
from specstop.train.replay.bounds import judge, oracle_plan
from timed import timed_profile

from specstop import LearnedPolicy, Pair, Profile, Prompt, Trace, evaluate, replay, save_policy

EXACT = 1e-12  # the same sums, in another order


@pytest.fixture(scope="module")
def chains(traces: dict[float, Trace]) -> TraceArrays:
    return trace_arrays(traces[0.7])


@pytest.fixture(scope="module")
def tree_trace(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("tree")
    return collect(pair, prompts, folder, tree="3,2,1,1,1", temperature=0.7, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def trees(tree_trace: Trace) -> TraceArrays:
    return trace_arrays(tree_trace)


@pytest.fixture(scope="module", params=["chains", "trees"])
def arrays(request: pytest.FixtureRequest) -> TraceArrays:
    result: TraceArrays = request.getfixturevalue(request.param)
    return result


def test_parts_of_the_time_and_losses_to_the_bound_add_up(arrays: TraceArrays, profile: Profile) -> None:
    played = replay(arrays, Confidence(0.4, DEPTH), profile)
    share = time_share("x", arrays, played, profile)
    parts = [share[f"{part}_ms"] for part in ("draft", "verify", "decision", "outside", "prompt")]
    tokens = int(arrays.text_tokens.sum())
    assert min(parts) > 0 and sum(parts) == pytest.approx(share["total_ms"], rel=1e-9)
    assert share["total_ms"] == pytest.approx(1e3 * float(played.seconds.sum()) / tokens, rel=1e-9)
    assert share["decision_ms"] == pytest.approx(1e3 * 6.0e-5 * int(played.decisions.sum()) / tokens)
    plain = time_share("plain", arrays, replay(arrays, FixedLength(0), profile), profile)
    assert plain["draft_ms"] == pytest.approx(0.0, abs=1e-9) and plain["decision_ms"] == 0.0
    plan = oracle_plan(arrays, profile)
    lost = stop_cost("x", judge(arrays, played, plan, profile), tokens)
    assert lost["total_s"] == pytest.approx(float((played.seconds - plan.seconds).sum()), abs=1e-9)
    assert sum(lost["ms_per_token"]) == pytest.approx(1e3 * lost["total_s"] / tokens, abs=1e-6)


def test_groups_and_prompts_are_ratios_of_sums(chains: TraceArrays, profile: Profile) -> None:
    fixed = [replay(chains, FixedLength(k), profile) for k in range(DEPTH + 1)]
    played, best = replay(chains, Confidence(0.4, DEPTH), profile), max(fixed, key=lambda one: one.rate)
    replays = Replays(chains, ProfileBootstrap(profile), {"mine": played}, fixed, best, oracle_plan(chains, profile))
    groups = by_group(replays, 0)
    assert sorted(group["name"] for group in groups) == ["g0", "g1"]
    for group in groups:
        at = [i for i, name in enumerate(chains.groups) if name == group["name"]]
        expected = float(best.seconds[at].sum() / played.seconds[at].sum())
        ratio = group["ratios"]["mine"]
        assert ratio["value"] == pytest.approx(expected)
        assert ratio["low"] <= expected <= ratio["high"]
        assert (group["prompts"], group["tokens"]) == (4, int(chains.text_tokens[at].sum()))
    points = by_prompt(replays, played, 0)
    assert [point["prompt"] for point in points] == chains.prompt_ids
    assert points[2]["policy"] == pytest.approx(float(fixed[0].seconds[2] / played.seconds[2]))


def test_survival_is_the_state_of_the_policy_in_replay(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    states: dict[int, set[float]] = {}

    class Watched(LearnedPolicy):
        def keep(self, step, state):  # type: ignore[no-untyped-def]
            keep, product = super().keep(step, state)
            states.setdefault(step.depth, set()).update(product[step.alive[:, 0], 0].tolist())
            return keep, product

    watched, arrays = copy.copy(learned), trace_arrays(sides[1])
    watched.__class__ = Watched
    rounds = replay(arrays, watched, full_profile)
    row = torch.from_numpy(arrays.find(rounds.sequence.numpy(), rounds.anchor.numpy()))
    products = survival(learned, arrays, row, rounds.history)
    for depth in range(max(learned.first, 1), DEPTH):
        assert states.get(depth, set()) <= set(products[:, depth - 1].tolist())
    assert sum(map(len, states.values())) > 20


@pytest.mark.parametrize("rule", ["derived", "batch"])
def test_calibration_counts_accepted_tokens(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, rule: str
) -> None:
    arrays = trace_arrays(sides[1])
    policy = for_batches(learned, profile=full_profile) if rule == "batch" else learned
    played = replay(arrays, policy, full_profile)
    result = reliability("x", arrays, played, 0)
    row = arrays.find(played.sequence.numpy(), played.anchor.numpy())
    length = arrays.accepted[row][~arrays.cut[row]]
    assert result["rounds"] == len(length)
    for depth in result["depths"]:
        known = length >= max(policy.first, 1) - 1
        total, bins = depth["all"], depth["bins"]
        assert total["count"] == int(known.sum()) == sum(b["count"] for b in bins)
        assert total["observed"] == pytest.approx(float((length[known] >= depth["depth"]).double().mean()))
        assert sum(b["count"] * b["predicted"] for b in bins) == pytest.approx(total["count"] * total["predicted"])
        assert all(b["low"] <= b["observed"] <= b["high"] for b in bins)


def test_a_report_on_trees_has_their_best_static_tree(tree_trace: Trace, profile: Profile, tmp_path: Path) -> None:
    report = evaluate(tree_trace, profile, [Confidence(0.4, DEPTH)], out=tmp_path / "out")
    static = report["best static tree"]
    assert static.kind == "static" and static.to_best_fixed.value >= 1.0
    assert report["oracle bound"].tokens_per_s >= max(line.tokens_per_s for line in report.lines)
    assert report.answer is not None and not report.answer.deploy
    fixed = f"fixed:{report.fixed.index(max(report.fixed))}"
    assert report.answer.use == ("best static tree" if static.tokens_per_s > max(report.fixed) else fixed)
    assert {stop["name"] for stop in report.details["stops"]} >= {"best static tree", "confidence:0.4", "best fixed"}


REPLICATES, DRAWS = 30, 7


def test_every_resample_is_priced_by_its_profile(arrays: TraceArrays, full_profile: Profile) -> None:
    """The resamples share D draws of the profile in turn. Prompts and profile are also resampled alone."""
    noisy = timed_profile(full_profile, ["confidence", "trimming"], pace=0.1, jitter=0.2, seed=1)
    depth = min(arrays.depth, noisy.max_depth)
    policies = [FixedLength(0), FixedLength(2), Confidence(0.4, depth), TEST_POLICIES["trimming"].limited(depth)]
    replays = [replay(arrays, policy, noisy) for policy in policies]
    boot, draws = Resamples(arrays.prompt_ids, 0, REPLICATES), ProfileBootstrap(noisy, 3, DRAWS)
    priced = Priced(boot, draws, replays, arrays.prompt_tokens)
    spent, prompts, profile = map(priced.seconds, ResampleSource)
    assert spent.shape == (1 + REPLICATES, len(policies)) and profile.shape == (1 + DRAWS, len(policies))
    for at, rounds in enumerate(replays):
        assert prompts[:, at] == pytest.approx(boot.total(rounds.seconds), rel=EXACT)
        seconds = [rounds.text_seconds(costs) for costs in (noisy, *draws.profiles)]
        assert profile[:, at] == pytest.approx([float(one.sum()) for one in seconds], rel=EXACT)
        assert spent[0, at] == pytest.approx(float(seconds[0].sum()), rel=EXACT)
        for row in (1, DRAWS, DRAWS + 1, REPLICATES):
            assert spent[row, at] == pytest.approx(boot.total(seconds[1 + (row - 1) % DRAWS])[row], rel=EXACT)


def test_noise_of_the_profile_widens_intervals_and_is_shown(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    reports, widths = [], []
    for noise in (0.001, 0.6):
        profile = timed_profile(full_profile, ["confidence"], pace=noise, jitter=noise, seed=2)
        reports.append(evaluate(sides[1], profile, [Confidence(0.7, DEPTH)], out=tmp_path / str(noise)))
        line = reports[-1]["confidence:0.7"]
        assert line.parts["all"] == line.to_best_fixed
        widths.append({part: ratio.high - ratio.low for part, ratio in line.parts.items()})
    assert widths[0]["profile"] < 0.1 * widths[0]["prompts"]
    assert widths[1]["all"] > widths[1]["profile"] > 10 * widths[0]["profile"]
    assert reports[0].findings == () and "this machine was busy" in reports[1].findings[0]
    assert "this machine was busy" in (tmp_path / "0.6" / "report.md").read_text()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decisions"


@pytest.fixture(scope="module")
def bare(full_profile: Profile) -> Profile:
    """A noisy profile without any decision."""
    return timed_profile(dataclasses.replace(full_profile, decision_s={}), pace=0.1, jitter=0.1)


@pytest.fixture
def forbid_measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(prices, "measure_decision", mock.Mock(side_effect=AssertionError("measured")))


def test_measured_decisions_are_cached_by_profile_and_policy(
    cache: Path, bare: Profile, sides: tuple[Trace, Trace], forbid_measuring: Callable[[], None]
) -> None:
    header, policies = sides[1].header, [FixedLength(2), Confidence(0.4, DEPTH), TEST_POLICIES["trimming"]]
    first, unpriced = with_prices(bare, policies, header)
    assert unpriced == {"confidence": ("confidence:0.4", TIMED), "trimming": ("trimming", TIMED)}
    assert len(list(cache.iterdir())) == 2 and "fixed" not in first.decision_s
    assert first.decision("confidence") > 0
    forbid_measuring()
    assert with_prices(bare, policies, header) == (first, unpriced)
    assert with_prices(first, policies, header) == (first, {})
    other_costs = dataclasses.replace(bare, step_s=2 * bare.step_s)
    other_device = dataclasses.replace(bare, facts={"device": "another"})
    for profile, policy in ((other_costs, policies[1]), (other_device, policies[1]), (bare, Confidence(0.5, DEPTH))):
        with pytest.raises(AssertionError, match="measured"):
            with_prices(profile, [policy], header)


def test_a_policy_trained_for_the_profile_contains_its_timings(
    cache: Path, bare: Profile, sides: tuple[Trace, Trace], tmp_path: Path, forbid_measuring: Callable[[], None]
) -> None:
    policy = load_policy_folder(save_policy(train(sides[0], bare).policy, tmp_path / "policy"))
    forbid_measuring()
    priced, unpriced = with_prices(bare, [policy], sides[1].header)
    assert unpriced == {"logistic": (str(tmp_path / "policy"), TRAINED)} and not cache.exists()
    assert priced.decision("logistic") == Profile.from_dict(policy.metadata.profile, "").decision("logistic")
    assert any(key[:2] == (DECISIONS, "logistic") for key in priced.measurements.series), "timings, not only their mean"
    with pytest.raises(AssertionError, match="measured"):
        with_prices(dataclasses.replace(bare, step_s=2 * bare.step_s), [policy], sides[1].header)


PROMPTS = [f"p{i}" for i in range(20)]
LINES = ("plain decoding", "best fixed", "mine", "oracle bound")
Data = dict[str, Any]


def report(details: Data | None = None, scale: float = 1.0, **facts: Any) -> Data:
    """Return a report with lines of the ratio `scale` to the best fixed length."""
    ratio = {"value": scale, "low": 0.9 * scale, "high": 1.1 * scale}
    lines = [{"name": name, "tokens_per_s": 100.0, "to_best_fixed": ratio} for name in LINES]
    base = {"traces": "a", "temperature": 0.7, "pair": {}, "profile": {"device": "cpu"}}
    details = {} if details is None else {"per_prompt": details}
    return {"schema": REPORT_SCHEMA, "kind": "report", "lines": lines, "facts": base | facts, "details": details}


def figures(prompts: list[str], seed: int, speed: float = 1.0, profile: str = "one", pace: float = 0.0) -> Data:
    """Return seconds by prompt; draws of the profile share a factor of standard deviation `pace`."""
    cost = dict(zip(PROMPTS, np.random.default_rng(0).uniform(1.0, 3.0, len(PROMPTS)), strict=True))
    rng = np.random.default_rng(seed)
    seconds = {name: [cost[p] / speed * float(rng.uniform(0.98, 1.02)) for p in prompts] for name in LINES[:3]}
    factors = np.exp(pace * np.random.default_rng([len(profile), seed]).standard_normal(200)).tolist()
    timings = {"fingerprint": profile, "is_timed": True, "pace_error": 0.0, "factors": dict.fromkeys(seconds, factors)}
    tokens = [60.0] * len(prompts)
    return {"clusters": prompts, "units": prompts, "tokens": tokens, "seconds": seconds, "profile": timings}


def speed(before: Data, after: Data) -> tuple[float, float, float]:
    """Return value and interval of tokens/s now / before."""
    ratio = next(row[1] for row in compare_reports(report(before), report(after))["rows"] if row[0] == "mine")
    return ratio["value"], ratio["low"], ratio["high"]


def test_the_change_is_the_ratio_of_rates_over_common_prompts() -> None:
    before, after = figures(PROMPTS[:15], 1), figures(PROMPTS[5:][::-1], 2, speed=1.1)
    spent = [
        sum(s for p, s in zip(f["clusters"], f["seconds"]["mine"], strict=True) if p in PROMPTS[5:15])
        for f in (before, after)
    ]
    value, low, high = speed(before, after)
    assert value == pytest.approx(spent[0] / spent[1])
    assert 1.07 < low < value < high < 1.13 and high - low < 0.06, "paired: prompts differ threefold"


def test_without_common_prompts_there_is_no_interval_and_other_settings_are_named() -> None:
    after = report(figures(PROMPTS[11:], 1), 1.5, temperature=0.0, profile={"device": "cuda"})
    for before in (report(), report(figures(PROMPTS[:10], 1))):
        section = compare_reports(before, after)
        assert ("mine", "-", {"value": pytest.approx(1.5), "low": None, "high": None}) in section["rows"]
        nouns = ("no common prompts", "temperature (0.7", "profile: device (cpu")
        assert all(noun in section["text"] for noun in nouns)


def test_the_error_of_one_profile_cancels_and_that_of_two_does_not() -> None:
    """With an error of 4%, prompts alone determine the interval on one profile, and 4% times root 2 adds on two."""

    def change(profile: str, pace: float) -> tuple[float, float, float]:
        after = figures(PROMPTS, 1, 1.01, profile=profile, pace=pace)
        noise = np.random.default_rng(5).uniform(0.98, 1.02, len(PROMPTS))
        after["seconds"]["mine"] = (np.array(after["seconds"]["mine"]) * noise).tolist()
        return speed(figures(PROMPTS, 1, pace=pace), after)

    exact, shared, two = change("one", 0.0), change("one", 0.04), change("another", 0.04)
    assert shared == pytest.approx(exact)
    assert np.log(two[2] / two[1]) == pytest.approx(2 * 1.96 * 0.04 * 2**0.5, rel=0.2)
    assert np.log(exact[2] / exact[1]) < 0.25 * np.log(two[2] / two[1])


def test_reports_on_one_profile_share_its_draws(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, few_draws: None
) -> None:
    """Equal lines differ in nothing, whatever the seed. The factors are those of the texts, priced round by round."""
    machine = full_profile.with_decisions({"confidence": 5e-5})
    timed_profile(machine, ["confidence"], pace=0.06, jitter=0.1, seed=1).save(tmp_path / "profile.json")
    for seed, name in enumerate(("one", "again")):
        evaluate(sides[1], tmp_path / "profile.json", [Confidence(0.6, DEPTH)], out=tmp_path / name, seed=seed)
    one, again = (read_report(tmp_path / name) for name in ("one", "again"))
    for _, ratio, _ in compare_reports(one, again)["rows"]:
        assert tuple(ratio.values()) == pytest.approx((1.0, 1.0, 1.0), abs=1e-8)
    profile, arrays = Profile.load(tmp_path / "profile.json"), trace_arrays(sides[1])
    factors = one["details"]["per_prompt"]["profile"]["factors"]
    assert set(factors) == {line["name"] for line in one["lines"]}
    draws = ProfileBootstrap(profile).profiles
    for name, policy in (("plain decoding", FixedLength(0)), ("confidence:0.6", Confidence(0.6, DEPTH))):
        rounds = replay(arrays, policy, profile)
        measured, *drawn = (float(rounds.text_seconds(costs).sum()) for costs in (profile, *draws))
        assert factors[name] == pytest.approx([seconds / measured for seconds in drawn], abs=1e-8)
