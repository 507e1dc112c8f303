"""Sections of a report: time, groups, calibration, resampled prices, and the comparison with an earlier report."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from contract_policies import DEPTH, TEST_POLICIES
from specstop.policies import Confidence, FixedLength
from specstop.policies.batch_rules import for_batches
from specstop.train import TraceArrays, compare_reports, read_report, trace_arrays
from specstop.train.evaluate import pricing as prices
from specstop.train.evaluate.analysis import Replays, by_group, by_prompt, reliability, stop_cost, survival, time_share
from specstop.train.evaluate.pricing import TIMED, PricedReplays, ProfileBootstrap, ResampleSource, with_prices
from specstop.train.evaluate.statistics import Resamples
from specstop.train.replay.bounds import oracle_plan, round_regret
from timed import timed_profile

from specstop import LearnedPolicy, Trace, evaluate, replay

EXACT = 1e-12  # the same sums, in another order


@pytest.fixture(scope="module")
def chains(traces):
    return trace_arrays(traces[0.7])


@pytest.fixture(scope="module")
def trees(forest):
    return trace_arrays(forest[0.7])


@pytest.fixture(scope="module", params=["chains", "trees"])
def arrays(request):
    result: TraceArrays = request.getfixturevalue(request.param)
    return result


def test_parts_of_the_time_and_losses_to_the_bound_add_up(arrays, profile):
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
    lost = stop_cost("x", round_regret(arrays, played, plan, profile), tokens)
    assert lost["total_s"] == pytest.approx(float((played.seconds - plan.seconds).sum()), abs=1e-9)
    assert sum(lost["ms_per_token"]) == pytest.approx(1e3 * lost["total_s"] / tokens, abs=1e-6)


def test_groups_and_prompts_are_ratios_of_sums(chains, profile):
    fixed = [replay(chains, FixedLength(k), profile) for k in range(DEPTH + 1)]
    played, best = replay(chains, Confidence(0.4, DEPTH), profile), max(fixed, key=lambda one: one.rate)
    replays = Replays(chains, ProfileBootstrap(profile), {"mine": played}, fixed, best, oracle_plan(chains, profile))
    groups = by_group(replays, 0)
    assert sorted(group["name"] for group in groups) == ["g0", "g1"]
    for group in groups:
        at = [i for i, name in enumerate(chains.groups) if name == group["name"]]
        fastest = min(float(one.seconds[at].sum()) for one in fixed)
        expected = fastest / float(played.seconds[at].sum())
        assert group["ratios"]["best fixed"]["value"] == pytest.approx(fastest / float(best.seconds[at].sum()))
        assert group["ratios"]["oracle bound"]["value"] == pytest.approx(
            fastest / float(replays.plan.seconds[at].sum())
        )
        ratio = group["ratios"]["mine"]
        assert ratio["value"] == pytest.approx(expected)
        assert ratio["low"] <= expected <= ratio["high"]
        assert (group["prompts"], group["tokens"]) == (4, int(chains.text_tokens[at].sum()))
    points = by_prompt(replays, played, 0)
    assert [point["prompt"] for point in points] == chains.prompt_ids
    assert points[2]["policy"] == pytest.approx(float(fixed[0].seconds[2] / played.seconds[2]))


def test_survival_is_the_state_in_replay(sides, full_profile, learned):
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
def test_calibration_counts_accepted(sides, full_profile, learned, rule):
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


def test_a_report_on_trees_has_their_best_static_tree(forest, profile, tmp_path):
    report = evaluate(forest[0.7], profile, [Confidence(0.4, DEPTH)], out=tmp_path / "out")
    static = report["best static tree"]
    assert static.kind == "static" and static.to_best_fixed.value >= 1.0
    assert report["oracle bound"].tokens_per_s >= max(line.tokens_per_s for line in report.lines)
    assert report.answer is not None and not report.answer.deploy
    fixed = f"fixed:{report.fixed.index(max(report.fixed))}"
    assert report.answer.use == ("best static tree" if static.tokens_per_s > max(report.fixed) else fixed)
    assert {stop["name"] for stop in report.details["stops"]} >= {"best static tree", "confidence:0.4", "best fixed"}


REPLICATES, DRAWS = 30, 7


def test_every_resample_is_priced_by_its_profile(arrays, full_profile):
    """The resamples share D draws of the profile in turn. Prompts and profile are also resampled alone."""
    noisy = timed_profile(full_profile, ["confidence", "trimming"], pace=0.1, jitter=0.2, seed=1)
    depth = min(arrays.depth, noisy.max_depth)
    policies = [FixedLength(0), FixedLength(2), Confidence(0.4, depth), TEST_POLICIES["trimming"].limited(depth)]
    replays = [replay(arrays, policy, noisy) for policy in policies]
    boot, draws = Resamples(arrays.prompt_ids, 0, REPLICATES), ProfileBootstrap(noisy, 3, DRAWS)
    priced = PricedReplays(boot, draws, replays, arrays.prompt_tokens)
    spent, prompts, profile = map(priced.seconds, ResampleSource)
    assert spent.shape == (1 + REPLICATES, len(policies)) and profile.shape == (1 + DRAWS, len(policies))
    for at, rounds in enumerate(replays):
        assert prompts[:, at] == pytest.approx(boot.total(rounds.seconds), rel=EXACT)
        seconds = [rounds.text_seconds(costs) for costs in (noisy, *draws.profiles)]
        assert profile[:, at] == pytest.approx([float(one.sum()) for one in seconds], rel=EXACT)
        assert spent[0, at] == pytest.approx(float(seconds[0].sum()), rel=EXACT)
        for row in (1, DRAWS, DRAWS + 1, REPLICATES):
            assert spent[row, at] == pytest.approx(boot.total(seconds[1 + (row - 1) % DRAWS])[row], rel=EXACT)


def test_noise_of_a_profile_widens_intervals_and_is_shown(sides, full_profile, tmp_path):
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


def test_measured_decisions_are_cached_by_profile_and_policy(full_profile, sides, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path))
    bare = timed_profile(dataclasses.replace(full_profile, decision_s={}), pace=0.1, jitter=0.1)
    header, policies = sides[1].header, [FixedLength(2), Confidence(0.4, DEPTH), TEST_POLICIES["trimming"]]
    first, unpriced = with_prices(bare, policies, header)
    assert unpriced == {"confidence": ("confidence:0.4", TIMED), "trimming": ("trimming", TIMED)}
    assert len(list((tmp_path / "decisions").iterdir())) == 2 and "fixed" not in first.decision_s
    assert first.decision("confidence") > 0
    monkeypatch.setattr(prices, "measure_decision", mock.Mock(side_effect=AssertionError("measured")))
    assert with_prices(bare, policies, header) == (first, unpriced)
    assert with_prices(first, policies, header) == (first, {})
    other_costs = dataclasses.replace(bare, step_s=2 * bare.step_s)
    other_device = dataclasses.replace(bare, facts={"device": "another"})
    for profile, policy in ((other_costs, policies[1]), (other_device, policies[1]), (bare, Confidence(0.5, DEPTH))):
        with pytest.raises(AssertionError, match="measured"):
            with_prices(profile, [policy], header)


def test_reports_are_compared_over_their_common_prompts(sides, full_profile, tmp_path, few_draws):
    """Reports on one profile share its draws: equal lines differ in nothing. Errors of two profiles do not cancel."""
    held, policy = sides[1], Confidence(0.6, DEPTH)
    machine = full_profile.with_decisions({"confidence": 5e-5})
    profiles = [timed_profile(machine, ["confidence"], pace=0.06, jitter=0.1, seed=seed) for seed in (1, 2)]
    names = sorted(set(held.rows["prompt_id"]))

    def part(kept: list[str], **changes: Any) -> Trace:
        rows = held.rows.filter(lambda name: name in kept, input_columns="prompt_id")
        return Trace(held.folder, dataclasses.replace(held.header, **changes), rows)

    few, others = part(names[:8]), part(names[8:], temperature=0.9)
    runs = ((held, profiles[0]), (held, profiles[0]), (few, profiles[1]), (others, profiles[0]))
    for seed, (trace, profile) in enumerate(runs):
        evaluate(trace, profile, [policy], out=tmp_path / str(seed), seed=seed)
    one, again, other_profile, other_prompts = (read_report(tmp_path / str(seed)) for seed in range(4))
    for _, ratio, _ in compare_reports(one, again)["rows"]:
        assert tuple(ratio.values()) == pytest.approx((1.0, 1.0, 1.0), abs=1e-8)
    change = next(row[1] for row in compare_reports(one, other_profile)["rows"] if row[0] == policy.name)
    before, after = (replay(few, policy, profile).rate for profile in profiles)
    assert change["value"] == pytest.approx(after / before)
    assert change["low"] < change["value"] < change["high"] and change["high"] / change["low"] > 1.05
    section = compare_reports(other_profile, other_prompts)
    assert all(ratio == "-" for _, ratio, _ in section["rows"])
    assert "no common prompts" in section["text"] and "temperature (0.7" in section["text"]
