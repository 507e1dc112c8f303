"""Tuning: what is chosen replays fastest of all that was to choose from."""

from __future__ import annotations

import dataclasses

import pytest
from contract_policies import DEPTH
from learned_policies import Certain, with_head
from specstop.collect.store import Trace
from specstop.policies.errors import PolicyError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.rules import Derived, Threshold
from specstop.train.fit.rules import (
    FIRST,
    LOOK_AHEAD,
    MIN_GAIN,
    THRESHOLDS,
    best_of,
    derived_thresholds,
    fixed_grid,
    left_out_parts,
    replayed_rates,
    tune_confidence,
)
from specstop.train.fit.settle import retune, solve_rate
from specstop.train.heads.crossfit import prompt_folds
from specstop.train.replay.arrays import TraceArrays, trace_arrays, typical_context
from specstop.train.replay.run import replay

CLOSE = 0.005  # of a rate: what the start of the iteration may cost, as few tokens have a say


def as_they_are(policy: LearnedPolicy) -> LearnedPolicy:
    """Return a policy that takes its head's word for it."""
    parts = policy.head, Calibrator(), Calibrator(), policy.rule, policy.max_depth, policy.metadata
    return LearnedPolicy(policy.name, policy.features, *parts)


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0])


def with_draft_times(profile: Profile, factor: float) -> Profile:
    """Return the profile with draft steps `factor` times as expensive."""
    low, high = (
        dataclasses.replace(t, draft_s=(t.draft_s[0] * factor, t.draft_s[1] * factor))
        for t in (profile.low, profile.high)
    )
    return dataclasses.replace(profile, low=low, high=high)


@pytest.mark.parametrize("factor", [0.01, 1.0, 3.0])
def test_the_best_fixed_length_is_the_fastest(arrays: TraceArrays, profile: Profile, factor: float) -> None:
    costs = with_draft_times(profile, factor)
    rates = [replay(arrays, FixedLength(k), costs).rate for k in range(DEPTH + 1)]
    grid = fixed_grid(arrays, costs)
    assert [r.rate for r in grid] == rates
    assert [r.name for r in grid] == [f"fixed:{k}" for k in range(DEPTH + 1)]
    assert best_of(grid) is grid[rates.index(max(rates))]


@pytest.mark.parametrize("factor", [0.2, 1.0])
def test_the_tuned_confidence_is_the_fastest_threshold(arrays: TraceArrays, profile: Profile, factor: float) -> None:
    costs = with_draft_times(profile, factor)
    rates = {t: replay(arrays, Confidence(t, DEPTH), costs).rate for t in THRESHOLDS}
    tuned = tune_confidence(arrays, costs)
    assert rates[tuned.threshold] == max(rates.values()) > min(rates.values())
    assert tuned.max_depth == DEPTH


@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0])
def test_the_solved_rule_is_no_slower_than_any_rule_with_the_first_rho(
    arrays: TraceArrays, learned: LearnedPolicy, full_profile: Profile, factor: float
) -> None:
    costs = with_draft_times(full_profile, factor)
    acceptance = learned.metadata.acceptance
    solved, rate = solve_rate(learned, arrays, costs, acceptance)
    assert rate == replay(arrays, solved, costs).rate
    rho = max(r.rate for r in fixed_grid(arrays, costs))
    context, decision_s = typical_context(arrays), costs.decision("logistic")
    for share in LOOK_AHEAD:
        for first in FIRST:
            table = costs.chain_costs(context, decision_s, first, DEPTH)
            rule = Derived(derived_thresholds(rho, table, [share * a for a in acceptance]), first)
            other = replay(arrays, learned.with_rule(rule), costs).rate
            # The iteration begins at this rho for depth 1 only; another has to be clearly better than the best.
            assert (1 + MIN_GAIN) ** FIRST.index(first) * rate >= other * (1 if first == 1 else 1 - CLOSE)
    assert (solved.head, solved.accept, solved.next) == (learned.head, learned.accept, learned.next)
    assert isinstance(solved.rule, Derived)
    assert len(solved.rule.thresholds) == DEPTH


def test_a_free_draft_is_followed_to_the_end_and_a_priceless_one_never_begun(
    arrays: TraceArrays, learned: LearnedPolicy, full_profile: Profile
) -> None:
    """Where verification has one price and drafting none, stopping gains nothing; at the other end, drafting does not."""
    low = dataclasses.replace(full_profile.low, draft_s=(0.0, 0.0), draft_token_s=0.0, verify_s=(1.0,) * (DEPTH + 1))
    free = dataclasses.replace(full_profile, low=low, high=low, step_s=0.0, decision_s={})
    solved, rate = solve_rate(learned, arrays, free, learned.metadata.acceptance)
    assert rate == pytest.approx(replay(arrays, FixedLength(DEPTH), free).rate)
    costly = with_draft_times(full_profile, 1000.0)
    solved, rate = solve_rate(learned, arrays, costly, learned.metadata.acceptance)
    assert solved.first == 0
    assert int(replay(arrays, solved, costly).drafted.sum()) == 0


def test_rules_are_settled_on_prompts_that_their_heads_had_not_seen(
    arrays: TraceArrays, learned: LearnedPolicy, full_profile: Profile
) -> None:
    folds = prompt_folds(arrays, 3, 0)
    heads, policy = [Certain(0.0), Certain(30.0), Certain(-30.0)], as_they_are(learned)
    rules = [Threshold("step", threshold) for threshold in (0.3, 0.6)]
    parts = left_out_parts(arrays, folds, heads)
    found = replayed_rates(parts, full_profile)([policy.with_rule(rule) for rule in rules])
    for rule, rate in zip(rules, found, strict=True):
        played = [
            replay(arrays.subset(folds.sequences(fold)), with_head(policy.with_rule(rule), heads[fold]), full_profile)
            for fold in (0, 1, 2)
        ]
        assert played[2].drafted.double().mean() <= 1.0 < played[1].drafted.double().mean()
        tokens, seconds = (sum(float(getattr(one, of).sum()) for one in played) for of in ("tokens", "seconds"))
        assert rate == pytest.approx(tokens / seconds, rel=1e-6)  # sums of float32
    assert policy.head is learned.head
    (alone,) = left_out_parts(arrays, folds, heads[:1])
    assert alone.head is heads[0] and alone.arrays.sequences == len(folds.sequences(0))


def test_retuning_tries_the_listed_first_decisions_only_and_drops_measured_speeds(
    arrays: TraceArrays, full_profile: Profile, learned: LearnedPolicy
) -> None:
    late = learned.with_rule(Derived([0.4] * DEPTH, 2))
    late.metadata = dataclasses.replace(learned.metadata, metrics={"rows": 3, "held_out_rounds": 5})
    costs = with_draft_times(full_profile, 3.0)
    tuned = retune(late, arrays, costs, [2])
    assert tuned.rule.first == 2 and tuned.rule.to_dict() != late.rule.to_dict()
    assert tuned.metadata.metrics == {"rows": 3} and costs.same_costs(tuned.metadata.profile)
    assert tuned.metadata.rho == replay(arrays, tuned, costs).rate
    assert late.metadata.rho == learned.metadata.rho, "the policy itself does not change"


def test_a_policy_that_lacks_the_mean_acceptance_is_refused(
    arrays: TraceArrays, learned: LearnedPolicy, full_profile: Profile
) -> None:
    with pytest.raises(PolicyError, match="mean acceptance"):
        solve_rate(learned, arrays, full_profile, learned.metadata.acceptance[:1])


@pytest.mark.parametrize("before", [0, 1])
def test_a_depth_where_nothing_was_ever_accepted_has_no_decision_after_it(
    arrays: TraceArrays, learned: LearnedPolicy, full_profile: Profile, before: int
) -> None:
    acceptance = [*learned.metadata.acceptance[:before], *[0.0] * (DEPTH - before)]
    solved, rate = solve_rate(learned, arrays, full_profile, acceptance)
    assert rate == replay(arrays, solved, full_profile).rate > 0.0
    assert solved.rule.first <= before + 1
