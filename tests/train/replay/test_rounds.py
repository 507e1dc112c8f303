"""Rounds as a result: sums, prices under any profile, sweeps side by side, and rules without a policy."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch
from contract_policies import DEPTH, ReadsStates
from learned_policies import learned as learned_policy
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.published.kangaroo import MaxProb
from specstop.policies.published.online import Online
from specstop.policies.rules import Threshold
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.rounds import BY_ROUND, Rounds, RoundTypes, count_rounds, scaled
from specstop.train.replay.run import replay, replay_lengths, replay_many
from synthetic import synthetic_trace

EXACT = 1e-12


@pytest.fixture(scope="module")
def chains(sides: tuple[Trace, Trace]) -> TraceArrays:
    """With ends of text and length limits, sampled at 0.7."""
    arrays = trace_arrays(sides[0])
    assert bool(arrays.ends.any())
    return arrays


@pytest.fixture(scope="module")
def trees(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> TraceArrays:
    folder = tmp_path_factory.mktemp("trees")
    options = {
        "tree": "3,2,1,1,1",
        "temperature": 0.7,
        "max_new_tokens": 16,
        "hidden": ("draft_hidden", "target_hidden"),
    }
    return trace_arrays(collect(pair, prompts, folder, **options))


def equal(one: Rounds, other: Rounds) -> bool:
    """Whether all columns and prices are equal."""
    names = [name for name in (*BY_ROUND, "tokens", "seconds") if getattr(one, name) is not None]
    return one.name == other.name and all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_prices_are_linear_in_the_costs_of_a_profile(
    request: pytest.FixtureRequest, profile: Profile, kind: str
) -> None:
    rounds = replay(request.getfixturevalue(kind), Confidence(0.3, DEPTH), profile)
    spent = rounds.price(profile)
    doubled = [rounds.price(scaled(profile, **{part: 2.0})) - spent for part in ("draft", "verify", "decision")]
    assert all(float(more.sum()) > 0 for more in doubled)
    torch.testing.assert_close(doubled[2], rounds.decision_seconds(profile), rtol=1e-9, atol=EXACT)
    everything = rounds.price(scaled(profile, draft=2.0, verify=2.0, decision=2.0))
    torch.testing.assert_close(everything, spent + sum(doubled), rtol=1e-9, atol=EXACT)
    bare = rounds.price(profile, bare=True) + rounds.decision_seconds(profile)
    assert bool((bare <= spent + EXACT).all()), "a larger backlog is not cheaper"
    one = rounds.backlog == 1
    torch.testing.assert_close(bare[one], spent[one], rtol=1e-9, atol=EXACT)
    assert rounds.text_seconds(profile).tolist() == rounds.seconds.tolist()
    no_prompts = dataclasses.replace(rounds, prompt_tokens=torch.zeros_like(rounds.prompt_tokens))
    torch.testing.assert_close(no_prompts.seconds, rounds.by_sequence(spent), rtol=1e-9, atol=EXACT)


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_rounds_counted_by_type_cost_what_they_cost_one_by_one(
    request: pytest.FixtureRequest, profile: Profile, kind: str
) -> None:
    replays = [
        replay(request.getfixturevalue(kind), policy, profile) for policy in (Confidence(0.3, DEPTH), FixedLength(2))
    ]
    assert max(int(rounds.backlog.max()) for rounds in replays) > 3, "long backlogs are priced token by token"
    counted = [count_rounds(rounds) for rounds in replays]
    types, begins = RoundTypes.joined([one for one, _ in counted])
    assert len(types.drafted) < len(replays[0])
    by_type = types.seconds(profile, np.concatenate([counts for _, counts in counted], 2))
    for rounds, seconds in zip(replays, np.add.reduceat(by_type, begins, 1).T, strict=True):
        calls = rounds.by_sequence(rounds.price(profile) - rounds.decision_seconds(profile))
        assert seconds == pytest.approx(calls.numpy(), rel=1e-9)


SWEEP = [
    *(Confidence(t, DEPTH) for t in (0.1, 0.4, 0.4, 0.8)),
    FixedLength(2),
    *(Online(t, prior, max_depth=DEPTH) for t, prior in ((0.1, 2.0), (0.3, 2.0), (0.02, 2.0), (0.3, 9.0))),
    Confidence(0.3, 2),
]


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_thresholds_replayed_side_by_side_are_those_replayed_alone(
    request: pytest.FixtureRequest, profile: Profile, kind: str
) -> None:
    arrays = request.getfixturevalue(kind)
    learned = learned_policy()
    sweep = [*SWEEP, *(learned.with_rule(Threshold("survival", t)) for t in (0.1, 0.3, 0.5))]
    for policy, rounds in zip(sweep, replay_many(arrays, sweep, profile), strict=True):
        assert equal(rounds, replay(arrays, policy, profile)), policy.name


def test_a_sweep_of_policies_with_hidden_states_runs_in_parts(
    trees: TraceArrays, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["specstop.train.replay.run"], "MOST_HIDDEN_BYTES", 16 * 4 * 2 * 8)
    policies = [ReadsStates(), ReadsStates(), Confidence(0.3, DEPTH)]
    for policy, rounds in zip(policies, replay_many(trees, policies, profile), strict=True):
        assert equal(rounds, replay(trees, policy, profile))


def test_known_lengths_have_the_rounds_of_the_policy(chains: TraceArrays, profile: Profile) -> None:
    thresholds, length = (0.2, 0.35, 0.6), min(chains.depth, profile.max_depth)
    certain = [(chains.column("top1") >= threshold).long().cumprod(1).sum(1) for threshold in thresholds]
    drafted = torch.stack([(count + 1).clamp_max(length) for count in certain])
    for threshold, rounds in zip(thresholds, replay_lengths(chains, drafted, drafted, profile), strict=True):
        policy = replay(chains, MaxProb(threshold, max_depth=length), profile)
        assert torch.equal(rounds.log, policy.log) and torch.equal(rounds.backlog, policy.backlog)
        torch.testing.assert_close(rounds.seconds, policy.seconds, rtol=EXACT, atol=0.0)


def test_dropped_tokens_are_drafted_and_not_verified(profile: Profile) -> None:
    arrays = synthetic_trace([[3, 3, 3, 3, 3, 3, 3]], depth=3)
    (rounds,) = replay_lengths(arrays, torch.full((1, 7), 2), torch.full((1, 7), 1), profile)
    assert rounds.committed.tolist() == [2, 2, 2, 1] and rounds.accepted.tolist() == [1, 1, 1, 1]
    assert rounds.drafted.tolist() == [2, 2, 2, 2] and rounds.verified.tolist() == [1, 1, 1, 1]
    assert rounds.backlog[1:].tolist() == [1, 1, 1], "the draft has read the accepted token"


def test_texts_that_end_with_their_first_token_have_no_rounds(profile: Profile) -> None:
    arrays = synthetic_trace([[2, 2, 2], [2]], depth=2)
    short = dataclasses.replace(arrays, text_tokens=torch.tensor([4, 1]))
    rounds = replay(short, FixedLength(2), profile)
    assert rounds.sequence.tolist() == [0] and rounds.tokens.tolist() == [4, 1]
    empty = replay(short.subset([1]), FixedLength(2), profile)
    assert len(empty) == 0 and empty.tokens.tolist() == [1] and empty.history.shape == (0, 4)
    assert empty.seconds.tolist() == pytest.approx(profile.prefill_seconds(np.array([7])).tolist())
