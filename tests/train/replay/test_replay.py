"""Replay has the rounds of the live loop, in the seconds of the profile."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES, ReadsDraftStates, ReadsStates, SelectingByToken
from learned_policies import learned as learned_policy
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.records import Generation
from specstop.decode.topology import Topology
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.errors import PolicyFailure
from specstop.policies.features import HIDDEN_STATES
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.published.kangaroo import MaxProb
from specstop.policies.published.online import Online
from specstop.policies.registry import load_policy
from specstop.policies.rules import Threshold
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.arrays import TraceArrays, policy_features, trace_arrays
from specstop.train.replay.bounds import StaticTree
from specstop.train.replay.rounds import BY_ROUND, Rounds, scale_costs
from specstop.train.replay.run import replay, replay_lengths, replay_many
from synthetic import synthetic_trace

TREES = {
    None: None,
    "widths": "3,2,1,1,1",
    "fork": "fork:2x5",
    # Not closed: a branch is wider than the corresponding one at the root.
    "odd": "parents:-1,-1,-1,0,0,1,3,3,4,6,9",
}


POLICIES: dict[str, StopPolicy] = {
    **TEST_POLICIES,
    **{p.name: p for p in (SelectingByToken(), ReadsStates(), ReadsDraftStates())},
    "confidence:0.1": Confidence(0.1).limited(DEPTH),
}
SPECS = (
    "heuristic:2",
    "heuristic-transient:2",
    "roc:0.2?samples=3",
    "entropy:2.5",
    "adaedl:0.3?eps=0.2",
    "maxprob:0.2",
    "product:0.03",
    "online:0.1?prior=2",
    "bandit:0.5?arms=fixed:0,fixed:2,confidence:0.2,heuristic:1",
    "bandit?kind=thompson&arms=fixed:1,product:0.05,roc",
    "ddd:-1.5?begin=1&every=1",
    "eagle:3?top=2",
    "opt:0.2?nodes=6",
    "c2t:3",
    "gain:0.2?power=0.5",
)
"""Published rules, with settings that stop now and then on the tiny pair."""
FOR_TREES = ("ddd", "eagle", "opt", "c2t", "gain")
CASES = [
    # Each policy on a chain at one temperature, and on a tree at the other one.
    *((name, None, (0.0, 0.7)[at % 2]) for at, name in enumerate(POLICIES)),
    *((name, "odd", (0.7, 0.0)[at % 2]) for at, name in enumerate(POLICIES)),
    *((name, tree, 0.7) for name in ("trimming", "adaptive") for tree in ("widths", "fork")),
    # Rules for trees likewise, the others on a chain or on a tree in turn.
    *((spec, (None, "odd")[at % 2], (0.0, 0.7)[at // 2 % 2]) for at, spec in enumerate(SPECS)),
    *((s, ("odd", None)[at % 2], (0.7, 0.0)[at // 2 % 2]) for at, s in enumerate(SPECS) if s.startswith(FOR_TREES)),
]
Trees = Callable[[str | None, float], TraceArrays]
Live = Callable[[StopPolicy, str | None, float], list[Generation]]


@pytest.fixture(scope="module")
def recorded(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Trees:
    """Collect a dense trace with hidden states, once for each tree and temperature."""
    folder, done = tmp_path_factory.mktemp("recorded"), {}

    def run(tree: str | None, temperature: float) -> TraceArrays:
        if (tree, temperature) not in done:
            options = {"depth": DEPTH, "tree": TREES[tree], "temperature": temperature, "verification": "match"}
            out = folder / f"{tree}-{temperature}"
            trace = collect(pair, prompts, out, **options, max_new_tokens=NEW, shards=2, hidden=tuple(HIDDEN_STATES))
            done[tree, temperature] = trace_arrays(trace)
        return done[tree, temperature]

    return run


@pytest.fixture(scope="module")
def live(pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile) -> Live:
    """Run a policy live on the prompts of the trace."""

    def run(policy: StopPolicy, tree: str | None, temperature: float) -> list[Generation]:
        settings = Settings(temperature, NEW, tree=TREES[tree], verification="match")
        speculator = Speculator(pair, policy, settings, profile)
        texts = [speculator.generate(ids, stream_key(0, p.id)) for p, ids in zip(prompts, prompt_ids, strict=True)]
        assert speculator.policy is policy, "the policy failed and was replaced"
        return texts

    return run


def live_rounds(generations: list[Generation]) -> list[list[list[int]]]:
    return [[[r.anchor, r.drafted, r.verified, r.accepted] for r in g.rounds] for g in generations]


def by_text(rounds: Rounds) -> list[list[list[int]]]:
    return [rounds.log[rounds.sequence == s, 1:].tolist() for s in range(len(rounds.tokens))]


@pytest.mark.parametrize(("name", "tree", "temperature"), CASES)
def test_rounds_and_seconds_are_those_of_the_live_loop(
    recorded: Trees, live: Live, profile: Profile, name: str, tree: str | None, temperature: float
) -> None:
    arrays = recorded(tree, temperature)
    policy = POLICIES.get(name) or load_policy(name).limited(DEPTH)
    played, generations = replay(arrays, policy, profile), live(policy, tree, temperature)
    assert by_text(played) == live_rounds(generations)
    assert [g.prompt_tokens for g in generations] == arrays.prompt_tokens.tolist()
    rounds = [r for g in generations for r in g.rounds]
    for column in ("context", "backlog", "decisions", "committed"):
        assert getattr(played, column).tolist() == [getattr(r, column) for r in rounds], column
    if name in SPECS or name.startswith("reads-"):
        assert len({r.verified for r in rounds}) > 1, "the policy decides something"
    if tree is None:
        columns = [np.array([getattr(r, n) for r in rounds]) for n in ("context", "drafted", "verified", "backlog")]
        decisions = np.array([r.decisions for r in rounds])
        seconds = profile.round_seconds(*columns, decisions, profile.decision(policy.cost_name))
        owner = np.repeat(np.arange(len(generations)), [len(g.rounds) for g in generations])
        total = profile.prefill_seconds(arrays.prompt_tokens.numpy()) + np.bincount(owner, seconds, len(generations))
        assert played.seconds.tolist() == pytest.approx(total.tolist(), rel=1e-12)


@pytest.mark.parametrize("name", ["fixed:0", "trimming", "adaptive"])
def test_seconds_of_trees_are_those_that_a_live_policy_observes(
    recorded: Trees, live: Live, profile: Profile, name: str
) -> None:
    observed: list[float] = []

    class Listening(type(POLICIES[name])):  # type: ignore[misc]
        def observe(self, outcome: RoundOutcome, state: State) -> State:
            observed.append(outcome.seconds.item())
            return super().observe(outcome, state)

    listening = copy.copy(POLICIES[name])
    listening.__class__ = Listening
    played = replay(recorded("odd", 0.7), POLICIES[name], profile)
    live(listening, "odd", 0.7)
    prompts = profile.prefill_seconds(played.prompt_tokens.numpy())
    by_text = played.by_sequence(torch.tensor(observed, dtype=torch.float64)) + torch.from_numpy(prompts)
    torch.testing.assert_close(played.seconds, by_text, rtol=1e-12, atol=0.0)


def test_a_static_tree_is_drafted_live_as_in_replay(recorded: Trees, live: Live, profile: Profile) -> None:
    arrays = recorded("widths", 0.7)
    policy, children = StaticTree(arrays.tree, [0, 1, 3, 4, 9]), arrays.tree.children
    assert policy.shape.parent == Topology([-1, 0, 0, 1, 1, 3]).parent
    assert policy.drawn.nodes == sum(len(children[row]) for row in (0, 1, 4))
    played = replay(arrays, policy, profile)
    assert by_text(played) == live_rounds(live(policy, "widths", 0.7)) and int(played.verified.max()) <= 5


@pytest.mark.parametrize(("name", "tree"), [("reads-states", None), ("reads-draft-states", "odd")])
def test_replay_of_a_live_trace_under_its_policy_has_its_rounds(
    pair: Pair, prompts: list[Prompt], recorded: Trees, profile: Profile, tmp_path: Path, name: str, tree: str | None
) -> None:
    options = {"depth": DEPTH, "tree": TREES[tree], "temperature": 0.7, "max_new_tokens": NEW, "verification": "match"}
    live = {"collector": "live", "policy": POLICIES[name], "hidden": tuple(HIDDEN_STATES)}
    arrays = trace_arrays(collect(pair, prompts, tmp_path / "t", **options, **live))
    dense = replay(recorded(tree, 0.7), POLICIES[name], profile)
    assert by_text(replay(arrays, POLICIES[name], profile)) == by_text(dense)


@pytest.mark.parametrize("tree", [None, "widths"])
def test_rounds_of_a_text_do_not_depend_on_the_other_texts(recorded: Trees, profile: Profile, tree: str | None) -> None:
    arrays = recorded(tree, 0.7)
    for name in ("reads-history", "adaptive", "randomised", "reads-states"):
        whole, part = (replay(a, POLICIES[name], profile) for a in (arrays, arrays.subset([2, 5]).subset([1, 0])))
        assert by_text(part) == [by_text(whole)[s] for s in (5, 2)]
        assert torch.equal(part.seconds, whole.seconds[[5, 2]])
        assert by_text(whole.subset([5, 2])) == by_text(part)
        assert torch.equal(whole.subset([5, 2]).seconds, part.seconds)


class Recording(StopPolicy):
    """Drafts to full depth and records the features by depth."""

    features = ("anchor_margin", "mean_full", "top3", "noisy_margin", "last_verified", "depth")
    name, first, max_depth = "recording", 0, DEPTH

    def __init__(self) -> None:
        self.seen: dict[int, list[list[float]]] = {depth: [] for depth in range(DEPTH)}

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.seen[step.depth] += step.features[step.alive].tolist()
        return step.alive, state


def test_seen_features_are_what_a_policy_receives(recorded: Trees, profile: Profile) -> None:
    arrays, policy = recorded(None, 0.7), Recording()
    played = replay(arrays, policy, profile)
    row = torch.from_numpy(arrays.find(played.sequence.numpy(), played.anchor.numpy()))
    table = policy_features(arrays, policy.features, row, played.history)
    assert table.shape == (len(played), DEPTH + 1, len(policy.features))
    for depth, features in policy.seen.items():
        assert sorted(features) == sorted(table[played.decisions > depth, depth].tolist())
    assert bool((table[:, 0, [1, 4]] > 0).any())
    assert not table[:, 0, [2, 3, 5]].any(), "depth 0 has ANCHOR and HISTORY features only"


EXACT = 1e-12


def equal(one: Rounds, other: Rounds) -> bool:
    """Return whether all columns and prices are equal."""
    names = [name for name in (*BY_ROUND, "tokens", "seconds") if getattr(one, name) is not None]
    return one.name == other.name and all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("tree", [None, "widths"])
def test_prices_are_linear_in_the_costs_of_a_profile(recorded: Trees, profile: Profile, tree: str | None) -> None:
    rounds = replay(recorded(tree, 0.7), Confidence(0.3, DEPTH), profile)
    spent = rounds.price(profile)
    decided = profile.with_decisions({rounds.cost_name: 2.0 * profile.decision(rounds.cost_name)})
    changed = scale_costs(profile, draft=2.0), scale_costs(profile, verify=2.0), decided
    doubled = [rounds.price(one) - spent for one in changed]
    assert all(float(more.sum()) > 0 for more in doubled)
    torch.testing.assert_close(doubled[2], rounds.decision_seconds(profile), rtol=1e-9, atol=EXACT)
    everything = rounds.price(scale_costs(decided, draft=2.0, verify=2.0))
    torch.testing.assert_close(everything, spent + sum(doubled), rtol=1e-9, atol=EXACT)
    bare = rounds.price(profile, bare=True) + rounds.decision_seconds(profile)
    assert bool((bare <= spent + EXACT).all()), "a larger backlog is not cheaper"
    one = rounds.backlog == 1
    torch.testing.assert_close(bare[one], spent[one], rtol=1e-9, atol=EXACT)
    no_prompts = dataclasses.replace(rounds, prompt_tokens=torch.zeros_like(rounds.prompt_tokens))
    torch.testing.assert_close(no_prompts.seconds, rounds.by_sequence(spent), rtol=1e-9, atol=EXACT)


SWEEP = [
    *(Confidence(t, DEPTH) for t in (0.1, 0.4, 0.4, 0.8)),
    FixedLength(2),
    *(Online(t, prior, max_depth=DEPTH) for t, prior in ((0.1, 2.0), (0.3, 2.0), (0.02, 2.0), (0.3, 9.0))),
    Confidence(0.3, 2),
]


@pytest.mark.parametrize("tree", [None, "widths"])
def test_policies_replayed_side_by_side_have_the_rounds_of_each_alone(
    recorded: Trees, profile: Profile, tree: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep with hidden states is divided into parts."""
    monkeypatch.setattr(sys.modules["specstop.train.replay.run"], "MAX_HIDDEN_BYTES", 16 * 4 * 2 * 8)
    arrays, learned = recorded(tree, 0.7), learned_policy()
    rules = [learned.with_rule(Threshold("survival", t)) for t in (0.1, 0.3, 0.5)]
    for sweep in ([*SWEEP, *rules], [ReadsStates(), ReadsStates(), Confidence(0.3, DEPTH)]):
        for policy, rounds in zip(sweep, replay_many(arrays, sweep, profile), strict=True):
            assert equal(rounds, replay(arrays, policy, profile)), policy.name


def test_known_lengths_have_the_rounds_of_the_policy(recorded: Trees, profile: Profile) -> None:
    arrays, thresholds = recorded(None, 0.7), (0.2, 0.35, 0.6)
    assert bool(arrays.ends.any())
    certain = [(arrays.column("top1") >= threshold).long().cumprod(1).sum(1) for threshold in thresholds]
    drafted = torch.stack([(count + 1).clamp_max(DEPTH) for count in certain])
    for threshold, rounds in zip(thresholds, replay_lengths(arrays, drafted, drafted, profile), strict=True):
        policy = replay(arrays, MaxProb(threshold, max_depth=DEPTH), profile)
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


class Failing(StopPolicy):
    name, max_depth = "mine", DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        raise SystemExit("bye")


def test_a_failure_of_a_policy_names_it_and_the_other_policies_are_reported(
    traces: dict[float, Trace], profile: Profile
) -> None:
    with pytest.raises(PolicyFailure, match=r"^mine: keep\(\) failed: SystemExit: bye$"):
        replay(traces[0.7], Failing(), profile)
    report = evaluate(traces[0.7], profile.with_decisions({"mine": 1e-5}), [Failing(), FixedLength(2)])
    (failure,) = report.failed
    assert failure.policy == "mine" and failure.file == __file__ and failure.line
    assert report["fixed:2"].tokens_per_s > 0
