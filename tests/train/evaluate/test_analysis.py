"""Sections of a report: costs of wrong stops, time by cause, groups, calibration, trees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.batch_rules import for_batches
from specstop.policies.errors import SpecstopWarning
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.evaluate.analysis import (
    Replays,
    acceptance_bands,
    by_group,
    by_prompt,
    calibration,
    reliability,
    time_share,
)
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.pricing import ProfileBootstrap
from specstop.train.evaluate.statistics import Resamples
from specstop.train.fit.run import train
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.bounds import oracle_plan
from specstop.train.replay.run import replay

EXACT = 1e-12  # the same sums, in another order
SUMS = 1e-9  # seconds: differences of sums of some hundred rounds


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
    found: TraceArrays = request.getfixturevalue(request.param)
    return found


# Rounds


# The oracle's plan


# Where time goes


def test_parts_of_the_time_add_up(arrays: TraceArrays, profile: Profile) -> None:
    played = replay(arrays, Confidence(0.4, DEPTH), profile)
    share = time_share("x", arrays, played, profile)
    parts = [share[f"{part}_ms"] for part in ("draft", "verify", "decision", "outside", "prompt")]
    assert min(parts) > 0
    tokens = int(arrays.text_tokens.sum())
    assert sum(parts) == pytest.approx(share["total_ms"], rel=1e-9)
    assert share["total_ms"] == pytest.approx(1e3 * float(played.seconds.sum()) / tokens, rel=1e-9)
    decisions = int(played.decisions.sum())
    assert share["decision_ms"] == pytest.approx(1e3 * 6.0e-5 * decisions / tokens)
    plain = time_share("plain", arrays, replay(arrays, FixedLength(0), profile), profile)
    assert plain["draft_ms"] == pytest.approx(0.0, abs=1e-9)
    assert plain["decision_ms"] == 0.0


# Groups, prompts, latencies


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


def test_acceptance_bands_contain_the_share(chains: TraceArrays) -> None:
    bands = acceptance_bands(chains, Resamples(chains.prompt_ids, 0))
    lengths_ = chains.accepted[~chains.cut]
    for k, band in enumerate(bands, 1):
        assert band.value == pytest.approx(float((lengths_ >= k).double().mean()))
        assert band.low <= band.value <= band.high
    assert bands[0].low < bands[0].high


# Predictions


@pytest.mark.parametrize("rule", ["derived", "batch"])
def test_calibration_counts_accepted_tokens(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, rule: str
) -> None:
    arrays = trace_arrays(sides[1])
    learned = for_batches(learned, profile=full_profile) if rule == "batch" else learned
    played = replay(arrays, learned, full_profile)
    found = reliability("x", arrays, played, 0)
    log = played.log
    row = arrays.offset[log[:, 0]] + log[:, 1] - arrays.first_anchor[log[:, 0]]
    length = arrays.accepted[row][~arrays.cut[row]]
    assert found["rounds"] == len(length)
    first = max(learned.first, 1)
    for depth in found["depths"]:
        known = length >= first - 1
        every, bins = depth["all"], depth["bins"]
        assert every["count"] == int(known.sum())
        assert every["observed"] == pytest.approx(float((length[known] >= depth["depth"]).double().mean()))
        assert sum(b["count"] for b in bins) == every["count"]
        assert sum(b["count"] * b["predicted"] for b in bins) == pytest.approx(every["count"] * every["predicted"])
        assert all(b["low"] <= b["observed"] <= b["high"] for b in bins)


def test_calibration_error_separates_calibrated_from_wrong_predictions() -> None:
    """20,000 made-up candidates: true ones err as a perfect predictor does, within its own chance; squared ones do not."""
    generator = np.random.default_rng(0)
    chance = generator.random(20_000)
    accepted = generator.random(20_000) < chance
    true = calibration(1, chance, accepted, 0)
    wrong = calibration(1, chance**2, accepted, 0)
    assert 0.3 * true["ece_perfect"] < true["ece"] < 2.5 * true["ece_perfect"]
    assert wrong["ece"] > 5 * wrong["ece_perfect"]
    assert wrong["ece"] == pytest.approx(1 / 2 - 1 / 3, abs=0.02)
    assert true["ece"] < 0.02


# Trees


def test_a_policy_of_another_tree_says_which_to_draft(tree_trace: Trace, profile: Profile) -> None:
    policy = train(tree_trace, profile, head="logistic", rule="gain", nodes=[1]).policy
    with pytest.warns(
        SpecstopWarning, match=r"trained for another tree \(1\) than these traces .*; `tree` 1 drafts it"
    ):
        evaluate(tree_trace, profile.with_decisions({policy.cost_name: 1e-5}), [policy], allow_overlap=True)


def test_a_report_on_trees_has_their_best_static_tree(tree_trace: Trace, profile: Profile, tmp_path: Path) -> None:
    report = evaluate(tree_trace, profile, [Confidence(0.4, DEPTH)], out=tmp_path / "out")
    static = next(line for line in report.lines if line.kind == "static")
    assert static.name == "best static tree"
    assert static.to_best_fixed.value >= 1.0
    bound = next(line for line in report.lines if line.kind == "bound")
    assert bound.tokens_per_s >= max(line.tokens_per_s for line in report.lines)
    assert report.answer is not None
    assert not report.answer.deploy
    fixed = f"fixed:{report.fixed.index(max(report.fixed))}"
    assert report.answer.use == ("best static tree" if static.tokens_per_s > max(report.fixed) else fixed)
    assert all("oracle" not in finding for finding in report.findings)
    assert {stop["name"] for stop in report.details["stops"]} >= {"best static tree", "confidence:0.4", "best fixed"}
