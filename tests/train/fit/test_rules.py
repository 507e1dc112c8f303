"""Rules tuned on replays, for one text and for batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from contract_policies import DEPTH
from joint_policies import batch_policy
from learned_policies import Certain, learned, with_head
from specstop.policies import Confidence, FixedLength, PolicyError, load_policy_folder
from specstop.policies.batch_rules import BatchStop, for_batches
from specstop.policies.rules import Derived, Threshold
from specstop.train import TraceArrays, trace_arrays
from specstop.train.fit.batch_rules import SCALES, batch_rate, settle_batch, settle_lengths
from specstop.train.fit.rules import (
    FIRST,
    LOOK_AHEAD,
    MIN_GAIN,
    THRESHOLDS,
    Part,
    best_of,
    derived_thresholds,
    fixed_grid,
    left_out_parts,
    replayed_rates,
    tune_confidence,
)
from specstop.train.fit.settle import MIN_GAIN_IN_SAMPLE, retune, settle_for, solve_rate
from specstop.train.heads.crossfit import prompt_folds
from specstop.train.replay.arrays import typical_context
from specstop.train.replay.batch import at_once, deal, replay_batch
from specstop.train.replay.rounds import scaled
from synthetic import with_batches

from specstop import LearnedPolicy, Profile, Trace, replay, save_policy

CLOSE = 0.005  # of a rate: what the start of the iteration may cost, as few tokens have a say


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0])


@pytest.mark.parametrize("factor", [0.01, 1.0, 3.0])
def test_the_best_fixed_length_is_the_fastest(arrays: TraceArrays, profile: Profile, factor: float) -> None:
    costs = scaled(profile, draft=factor)
    rates = [replay(arrays, FixedLength(k), costs).rate for k in range(DEPTH + 1)]
    grid = fixed_grid(arrays, costs)
    assert [r.rate for r in grid] == rates
    assert [r.name for r in grid] == [f"fixed:{k}" for k in range(DEPTH + 1)]
    assert best_of(grid) is grid[rates.index(max(rates))]


@pytest.mark.parametrize("factor", [0.2, 1.0])
def test_the_tuned_confidence_is_the_fastest_threshold(arrays: TraceArrays, profile: Profile, factor: float) -> None:
    costs = scaled(profile, draft=factor)
    rates = {t: replay(arrays, Confidence(t, DEPTH), costs).rate for t in THRESHOLDS}
    tuned = tune_confidence(arrays, costs)
    assert rates[tuned.threshold] == max(rates.values()) > min(rates.values())
    assert tuned.max_depth == DEPTH


@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0])
def test_the_solved_rule_is_no_slower_than_any_rule_with_the_first_rho(
    arrays: TraceArrays, learned: LearnedPolicy, full_profile: Profile, factor: float
) -> None:
    costs = scaled(full_profile, draft=factor)
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
    costly = scaled(full_profile, draft=1000.0)
    solved, rate = solve_rate(learned, arrays, costly, learned.metadata.acceptance)
    assert solved.first == 0
    assert int(replay(arrays, solved, costly).drafted.sum()) == 0


def test_rules_are_settled_on_prompts_that_their_heads_had_not_seen(
    arrays: TraceArrays, learned: LearnedPolicy, full_profile: Profile
) -> None:
    folds, heads = prompt_folds(arrays, 3, 0), [Certain(0.0), Certain(30.0), Certain(-30.0)]
    rules = [learned.with_rule(Threshold("step", threshold)) for threshold in (0.3, 0.6)]
    result = replayed_rates(left_out_parts(arrays, folds, heads), full_profile)(rules)
    for policy, rate in zip(rules, result, strict=True):
        played = [
            replay(arrays.subset(folds.sequences(fold)), with_head(policy, head), full_profile)
            for fold, head in enumerate(heads)
        ]
        assert played[2].drafted.double().mean() <= 1.0 < played[1].drafted.double().mean()
        tokens, seconds = (sum(float(getattr(one, of).sum()) for one in played) for of in ("tokens", "seconds"))
        assert rate == pytest.approx(tokens / seconds, rel=1e-6)  # sums of float32


def test_retuning_tries_the_listed_first_decisions_only_and_drops_measured_speeds(
    arrays: TraceArrays, full_profile: Profile, learned: LearnedPolicy
) -> None:
    late = learned.with_rule(Derived([0.4] * DEPTH, 2))
    late.metadata = dataclasses.replace(learned.metadata, metrics={"rows": 3, "held_out_rounds": 5})
    costs = scaled(full_profile, draft=3.0)
    tuned = retune(late, arrays, costs, [2])
    assert tuned.rule.first == 2 and tuned.rule.to_dict() != late.rule.to_dict()
    assert tuned.metadata.metrics == {"rows": 3} and costs.same_costs(tuned.metadata.profile)
    assert tuned.metadata.rho == replay(arrays, tuned, costs).rate
    assert late.metadata.rho == learned.metadata.rho, "the policy itself does not change"


@pytest.mark.parametrize("before", [0, 1])
def test_a_depth_where_nothing_was_ever_accepted_has_no_decision_after_it(
    arrays: TraceArrays, learned: LearnedPolicy, full_profile: Profile, before: int
) -> None:
    acceptance = [*learned.metadata.acceptance[:before], *[0.0] * (DEPTH - before)]
    solved, rate = solve_rate(learned, arrays, full_profile, acceptance)
    assert rate == replay(arrays, solved, full_profile).rate > 0.0
    assert solved.rule.first <= before + 1
    with pytest.raises(PolicyError, match="mean acceptance"):
        solve_rate(learned, arrays, full_profile, acceptance[:1])


EXACT = 1e-9


@pytest.fixture(scope="module")
def held(traces: dict[float, Trace]) -> TraceArrays:
    return trace_arrays(traces[0.7])


@pytest.fixture(scope="module")
def timed(profile: Profile) -> Profile:
    return with_batches(profile)


def test_decisions_that_cost_more_than_they_gain_are_left_out(held: TraceArrays, timed: Profile) -> None:
    free = batch_policy(names=("top1", "mean_accepted", "noisy_margin"), depth=DEPTH)
    name = for_batches(free, profile=timed).cost_name
    settled = settle_batch(free, [Part(held)], timed.with_decisions({name: 3.0}))
    assert [size for size, _ in settled.rule.lengths] == [2, 4] and sorted(settled.unasked) == [1, 2, 3, 4]
    for size, length in settled.rule.lengths:
        played, fixed = (
            replay_batch(held, policy, settled.profile, size, at_once(held.sequences))
            for policy in (settled, FixedLength(length))
        )
        assert float(played.seconds.sum()) == pytest.approx(float(fixed.seconds.sum()), rel=EXACT)
        assert not played.decisions.any()
    # Where only decisions have another price, what was settled stays, unless there are traces to settle it again.
    cheap = timed.with_decisions({name: 1e-9})
    kept, note = settle_for(settled, None, cheap)
    assert isinstance(kept, BatchStop) and (kept.unasked, note) == (settled.unasked, "")
    assert kept.profile.decision(name) == cheap.decision(name)
    again, note = settle_for(settled, held, cheap)
    assert "on the training traces" in note
    assert again.rule.to_dict() == settle_batch(settled, [Part(held)], cheap, MIN_GAIN_IN_SAMPLE).rule.to_dict()  # type: ignore[attr-defined]
    everything = for_batches(settled, "all")
    assert for_batches(everything, profile=cheap).rule.send == "all" != for_batches(settled, profile=cheap).rule.send


def test_a_rule_for_one_text_decides_nothing_in_batches_where_that_loses(
    held: TraceArrays, timed: Profile, tmp_path: Path
) -> None:
    policy = learned(rule=Derived([0.1, 0.2, 0.3, 0.2], 1))
    paid = timed.with_decisions({policy.cost_name: 3.0})
    settled = settle_lengths(policy, [Part(held)], paid)
    (alone, none), *lengths = settled.rule.lengths
    assert (alone, none) == (1, None) and [size for size, _ in lengths] == [2, 4]
    assert isinstance(settled.rule, Derived) and settled.rule.thresholds == policy.rule.thresholds
    assert sorted(settled.unasked) == [2, 3, 4], "it was solved for one text"
    for size, length in lengths:
        played = replay_batch(held, settled, paid, size, at_once(held.sequences))
        fixed = replay_batch(held, FixedLength(length), paid, size, at_once(held.sequences))
        is_shared = played.call.bincount()[played.call] > 1
        assert not played.decisions[is_shared].any()
        assert torch.equal(played.log[is_shared], fixed.log[: int(is_shared.sum())])
    assert load_policy_folder(save_policy(settled, tmp_path / "p")).unasked == settled.unasked
    free = timed.with_decisions({policy.cost_name: 0.0})
    never = policy.with_rule(Derived([2.0] * 4, 1))  # drafts one token always
    best = int(np.argmax([batch_rate(FixedLength(k), [Part(held)], free, 4) for k in range(DEPTH + 1)]))
    assert best == 1 or settle_lengths(never, [Part(held)], free).unasked[4] == best
    once = settle_lengths(policy, [Part(held)], free)
    assert isinstance(once.rule, Derived) and [size for size, _ in once.rule.scales] == [1, 2, 4]
    for size, factor in once.rule.scales[1:]:
        rules = {times: Derived([0.1, 0.2, 0.3, 0.2], 1, scales=[(size, times)]) for times in SCALES}
        tried = {times: batch_rate(policy.with_rule(rule), [Part(held)], free, size) for times, rule in rules.items()}
        assert tried[factor] == max(tried.values())
    assert settle_lengths(settled, [Part(held)], free).unasked == once.unasked, "it is settled from the start"
    assert settle_lengths(policy, [Part(held)], dataclasses.replace(timed, batch=None)) is policy


def test_rules_for_batches_are_settled_on_prompts_that_their_heads_had_not_seen(
    held: TraceArrays, timed: Profile
) -> None:
    policy = learned(rule=Derived([0.3] * DEPTH, 1))
    policy.metadata = dataclasses.replace(policy.metadata, acceptance=(0.8,) * DEPTH)
    free = timed.with_decisions({policy.cost_name: 0.0, for_batches(policy, profile=timed).cost_name: 0.0})
    halves, heads = [held.subset([*range(at, held.sequences, 2)]) for at in (0, 1)], [Certain(-30.0), Certain(30.0)]
    apart = [Part(half, head) for half, head in zip(halves, heads, strict=True)]
    tokens = seconds = 0.0
    for half, head in zip(halves, heads, strict=True):
        order = deal(half.sequences, 4, 0)[:24]
        played = replay_batch(half, with_head(policy, head), free, 4, at_once(len(order)), order)
        tokens += float(played.committed.sum())
        seconds += float(played.seconds.sum()) - free.prefill_seconds(half.prompt_tokens.numpy()[order]).sum()
    assert batch_rate(policy, apart, free, 4) == pytest.approx(float(tokens / seconds), rel=EXACT)
    # On prompts that were left out the heads know nothing, whatever the policy's own head may know of its own prompts.
    unaware = [Part(held, Certain(30.0)), Part(held, Certain(30.0))]
    costly = free.with_decisions({name: 2e-4 for name in free.decision_s})
    for settled in (settle_lengths(policy, unaware, costly), settle_batch(policy, unaware, costly)):
        assert settled.head is policy.head
        assert {2, 4} <= {size for size, length in settled.rule.lengths if length is not None}  # type: ignore[attr-defined]
