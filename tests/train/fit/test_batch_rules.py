"""Rules settled for batches: by replayed rates, on prompts that the heads had not seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from batch_profile import with_batches
from contract_policies import DEPTH
from joint_policies import batch_policy
from learned_policies import Certain, learned, with_head
from specstop.collect.store import Trace
from specstop.policies.batch_rules import BatchStop, for_batches
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.policies.rules import BatchRule, Derived
from specstop.policies.storage import load_policy_folder, save_policy
from specstop.train.fit.batch_rules import SCALES, batch_rate, settle_batch, settle_lengths
from specstop.train.fit.rules import Part
from specstop.train.fit.run import train
from specstop.train.fit.settle import MIN_GAIN_IN_SAMPLE, settle_for
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.batch import at_once, deal, replay_batch

EXACT = 1e-9


@pytest.fixture(scope="module")
def arrays(traces: dict[float, Trace]) -> dict[float, TraceArrays]:
    return {t: trace_arrays(trace) for t, trace in traces.items()}


@pytest.fixture(scope="module")
def timed(profile: Profile) -> Profile:
    return with_batches(profile)


def test_decisions_that_cost_more_than_they_gain_are_left_out(arrays: dict[float, TraceArrays], timed: Profile) -> None:
    held, free = arrays[0.7], batch_policy(names=("top1", "mean_accepted", "noisy_margin"), depth=DEPTH)
    name = for_batches(free, profile=timed).cost_name
    settled = settle_batch(free, [Part(held)], timed.with_decisions({name: 3.0}))
    assert [size for size, _ in settled.rule.lengths] == [2, 4] and sorted(settled.unasked) == [1, 2, 3, 4]
    for size, length in settled.rule.lengths:
        played = replay_batch(held, settled, settled.profile, size, at_once(held.sequences))
        fixed = [
            replay_batch(held, FixedLength(k), settled.profile, size, at_once(held.sequences)) for k in range(DEPTH + 1)
        ]
        assert float(played.seconds.sum()) == pytest.approx(float(fixed[length].seconds.sum()), rel=EXACT)
        assert not played.decisions.any()


def test_what_was_settled_stays_where_only_decisions_have_another_price(
    arrays: dict[float, TraceArrays], timed: Profile
) -> None:
    held, free = arrays[0.7], batch_policy(names=("top1", "mean_accepted", "noisy_margin"), depth=DEPTH)
    name = for_batches(free, profile=timed).cost_name
    settled = settle_batch(free, [Part(held)], timed.with_decisions({name: 3.0}))
    cheap = timed.with_decisions({name: 1e-9})
    kept, told = settle_for(settled, None, cheap)
    assert isinstance(kept, BatchStop) and (kept.unasked, told) == (settled.unasked, "")
    assert kept.profile.decision(name) == cheap.decision(name)
    again, told = settle_for(settled, held, cheap)
    assert "on the training traces" in told
    assert again.rule.to_dict() == settle_batch(settled, [Part(held)], cheap, MIN_GAIN_IN_SAMPLE).rule.to_dict()  # type: ignore[attr-defined]
    everything = for_batches(settled, "all")
    assert for_batches(everything, profile=cheap).rule.send == "all" != for_batches(settled, profile=cheap).rule.send


def test_a_rule_for_one_text_decides_nothing_in_batches_where_that_loses(
    arrays: dict[float, TraceArrays], timed: Profile, tmp_path: Path
) -> None:
    held, policy = arrays[0.7], learned(rule=Derived([0.1, 0.2, 0.3, 0.2], 1))
    paid = timed.with_decisions({policy.cost_name: 3.0})
    settled = settle_lengths(policy, [Part(held)], paid)
    (alone, none), *lengths = settled.rule.lengths
    assert (alone, none) == (1, None) and [size for size, _ in lengths] == [2, 4]
    assert isinstance(settled.rule, Derived) and settled.rule.thresholds == policy.rule.thresholds
    assert sorted(settled.unasked) == [2, 3, 4], "it was solved for one text"
    for size, length in lengths:
        played = replay_batch(held, settled, paid, size, at_once(held.sequences))
        fixed = replay_batch(held, FixedLength(length), paid, size, at_once(held.sequences))
        decided = played.decisions > 0
        streams = played.call.bincount()[played.call]
        assert not decided[streams > 1].any()
        shared = int((streams > 1).sum())
        assert torch.equal(played.log[streams > 1], fixed.log[:shared])
        assert torch.equal(played.committed[streams > 1], fixed.committed[:shared])
    save_policy(settled, tmp_path / "p")
    assert load_policy_folder(tmp_path / "p").unasked == settled.unasked
    drafts = ", ".join(f"{size} (drafts {length})" for size, length in lengths)
    assert f"| batches without decisions | {drafts} |" in (tmp_path / "p" / "README.md").read_text()
    free = timed.with_decisions({policy.cost_name: 0.0})
    never = policy.with_rule(Derived([2.0] * 4, 1))  # drafts one token always
    best = int(np.argmax([batch_rate(FixedLength(k), [Part(held)], free, 4) for k in range(DEPTH + 1)]))
    assert best == 1 or settle_lengths(never, [Part(held)], free).unasked[4] == best
    once = settle_lengths(policy, [Part(held)], free)
    assert isinstance(once.rule, Derived) and [size for size, _ in once.rule.scales] == [1, 2, 4]
    for size, factor in once.rule.scales[1:]:
        tried = {
            times: batch_rate(
                policy.with_rule(Derived([0.1, 0.2, 0.3, 0.2], 1, scales=[(size, times)])), [Part(held)], free, size
            )
            for times in SCALES
        }
        assert tried[factor] == max(tried.values())
    assert settle_lengths(settled, [Part(held)], free).unasked == once.unasked, (
        "what it was settled for before is forgotten"
    )
    assert settle_lengths(policy, [Part(held)], dataclasses.replace(timed, batch=None)) is policy


def test_rules_for_batches_are_settled_on_prompts_that_their_heads_had_not_seen(
    arrays: dict[float, TraceArrays], timed: Profile
) -> None:
    held, policy = arrays[0.7], learned(rule=Derived([0.3] * DEPTH, 1))
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
    assert batch_rate(policy, apart, free, 4) == pytest.approx(tokens / seconds, rel=EXACT)
    # On prompts that were left out the heads know nothing, whatever the policy's own head may know of its own prompts.
    unaware = [Part(held, Certain(30.0)), Part(held, Certain(30.0))]
    costly = free.with_decisions({name: 2e-4 for name in free.decision_s})
    for settled in (settle_lengths(policy, unaware, costly), settle_batch(policy, unaware, costly)):
        assert settled.head is policy.head
        assert {2, 4} <= {size for size, length in settled.rule.lengths if length is not None}  # type: ignore[attr-defined]


def test_the_rule_for_batches_is_worth_the_rate_of_its_fastest_replay(
    sides: tuple[Trace, Trace], timed: Profile, tmp_path: Path
) -> None:
    made = train(sides[0], timed, rule="batch", out=tmp_path / "p").policy
    assert isinstance(made, BatchStop) and [size for size, _ in made.rule.rates] == [2, 4]
    assert made.profile.decision(made.cost_name) > 0.0 and made.profile.same_costs(timed.to_dict())
    assert load_policy_folder(tmp_path / "p").rule.to_dict() == made.rule.to_dict()
    seen = trace_arrays(sides[0])
    again = settle_batch(made, [Part(seen)], made.profile)
    bare = for_batches(made, rule=BatchRule(made.rule.send))
    for size, times in again.rule.rates:
        mine, theirs = (batch_rate(policy, [Part(seen)], made.profile, size) for policy in (again, bare))
        assert mine >= theirs if times == 1.0 else mine > 0.99 * theirs
