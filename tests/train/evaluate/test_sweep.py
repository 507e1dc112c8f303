"""Sweeps over the cost of a draft step: exact where costs make the answer known."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect.store import Trace
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.published.smartspec import SmartSpec
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.pricing import ProfileBootstrap, with_prices
from specstop.train.evaluate.statistics import Clusters
from specstop.train.evaluate.sweep import RATIOS, cost_ratio, sweep, with_cost_ratio
from specstop.train.fit.rules import fixed_grid
from specstop.train.replay.arrays import trace_arrays, typical_context
from specstop.train.replay.run import replay

EXACT = 1e-12
POINTS = (0.02, 0.2, 2.0)


def swept(
    trace: Trace,
    profile: Profile,
    policies: Sequence[StopPolicy],
    train: Trace | None = None,
    ratios: Sequence[float] = POINTS,
) -> dict[str, Any]:
    """Return the sweep with intervals over prompts, its lines by name."""
    arrays, costs = trace_arrays(trace), ProfileBootstrap(with_prices(profile, policies, trace.header)[0])
    tuning = None if train is None else trace_arrays(train)
    found = sweep(arrays, policies, costs, Clusters(tuple(arrays.clusters)), tuning=tuning, ratios=ratios)
    json.dumps(found, allow_nan=False)
    return {**found, "lines": {line["name"]: line for line in found["lines"]}}


def test_the_points_are_those_promised() -> None:
    assert len(RATIOS) == 9
    assert (RATIOS[0], RATIOS[-1]) == (0.01, 0.5)
    steps = [b / a for a, b in itertools.pairwise(RATIOS)]
    assert max(steps) / min(steps) < 1.03, "evenly spaced in the logarithm"


@pytest.mark.parametrize("later", [None, 2.5e-3])
def test_scaling_changes_the_draft_alone(profile: Profile, later: float | None) -> None:
    low, high = (dataclasses.replace(t, later_draft_s=later) for t in (profile.low, profile.high))
    whole = dataclasses.replace(profile, low=low, high=high)
    scaled = with_cost_ratio(whole, 0.3, 20.0)
    assert cost_ratio(scaled, 20.0) == pytest.approx(0.3)
    factor = 0.3 / cost_ratio(whole, 20.0)
    for mine, before in ((scaled.low, low), (scaled.high, high)):
        assert mine.draft_s == pytest.approx([factor * s for s in before.draft_s])
        assert mine.draft_token_s == pytest.approx(factor * before.draft_token_s)
        assert mine.later_draft_s == (None if later is None else pytest.approx(factor * later))
        assert (mine.verify_s, mine.context) == (before.verify_s, before.context)
    rest = ("step_s", "round_s", "prefill_s", "decision_s", "temperature", "facts")
    assert all(getattr(scaled, name) == getattr(whole, name) for name in rest)


def test_the_ratio_is_taken_at_the_context(profile: Profile) -> None:
    assert cost_ratio(profile, profile.low.context) == pytest.approx(1.0e-3 / 4.0e-3)
    assert cost_ratio(profile, profile.high.context) == pytest.approx(1.5e-3 / 6.0e-3)
    assert cost_ratio(profile, 24.0) == pytest.approx(1.25e-3 / 5.0e-3)


def test_each_point_is_a_replay_under_its_costs(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    arrays, rule = trace_arrays(sides[1]), Confidence(0.4, DEPTH)
    found = swept(sides[1], full_profile, [rule, FixedLength(2)])
    assert found["ratios"] == list(POINTS)
    context = typical_context(arrays)
    assert found["here"] == pytest.approx(cost_ratio(full_profile, context))
    line, fixed = (found["lines"][name] for name in (rule.name, "fixed:2"))
    for at, point in enumerate(POINTS):
        costs = with_cost_ratio(full_profile, point, context)
        grid = [r.rate for r in fixed_grid(arrays, costs)]
        assert found["best_fixed_tokens_per_s"][at] == pytest.approx(max(grid), rel=EXACT)
        assert found["best_fixed"][at] == grid.index(max(grid))
        rate = replay(arrays, rule, costs).rate
        assert line["to_best_fixed"][at]["value"] == pytest.approx(rate / max(grid), rel=EXACT)
        assert line["to_plain"][at]["value"] == pytest.approx(rate / grid[0], rel=EXACT)
        assert fixed["to_best_fixed"][at]["value"] == pytest.approx(grid[2] / max(grid), rel=EXACT)
    assert found["best_fixed"][0] > found["best_fixed"][-1] == 0, "a draft twice as expensive as the target is not used"
    assert fixed["pays"] == []
    assert all(r["low"] <= r["value"] <= 1.0 for r in fixed["to_best_fixed"])


def test_rates_are_solved_again_if_there_are_training_traces(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    saved = swept(sides[1], full_profile, [learned])["lines"]["logistic"]
    solved = swept(sides[1], full_profile, [learned], sides[0])["lines"]["logistic"]
    assert "as saved" in saved["note"]
    assert "solved at each point" in solved["note"]
    # Far from its profile the saved rule drafts as if drafts were cheap.
    assert solved["to_best_fixed"][-1]["value"] > saved["to_best_fixed"][-1]["value"]


def test_a_policy_pays_in_runs_of_points_above_1(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    found = evaluate(sides[0], full_profile, [learned, Confidence(0.6, DEPTH)], sweep=True, allow_overlap=True)
    for line in found.details["sweep"]["lines"]:
        above = [ratio for ratio, r in zip(RATIOS, line["to_best_fixed"], strict=True) if r["low"] > 1.0]
        inside = [ratio for ratio in RATIOS if any(a <= ratio <= b for a, b in line["pays"])]
        assert inside == above
        assert line["verdict"].startswith("pays " if above else "at no point above")


def test_a_policy_that_observes_seconds_is_replayed_at_each_point(
    sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    arrays, policy = trace_arrays(sides[1]), TEST_POLICIES["adaptive"]
    line = swept(sides[1], full_profile, [policy])["lines"][policy.name]
    for at, point in enumerate(POINTS):
        costs = with_cost_ratio(full_profile, point, typical_context(arrays))
        best = max(r.rate for r in fixed_grid(arrays, costs))
        expected = replay(arrays, policy, costs).rate / best
        assert line["to_best_fixed"][at]["value"] == pytest.approx(expected, rel=EXACT)


def test_a_policy_that_decides_by_costs_uses_those_of_each_point(
    sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    priced = full_profile.with_decisions({"smartspec": 1e-6})
    of_point, fixed = (
        swept(sides[1], priced, [policy], ratios=[50.0])["lines"]["smartspec:0.7"]["to_plain"][0]["value"]
        for policy in (SmartSpec(max_depth=DEPTH), SmartSpec(draft=0.11, max_depth=DEPTH))
    )
    assert of_point > 1.5 * fixed


def test_bad_sweeps_are_refused(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    with pytest.raises(InputError, match="at least one policy"):
        evaluate(sides[1], full_profile, sweep=True)
    free = dataclasses.replace(full_profile.low, draft_s=(0.0, 0.0))
    with pytest.raises(InputError, match="steps that take time"):
        swept(sides[1], dataclasses.replace(full_profile, low=free, high=free), [FixedLength(1)])
