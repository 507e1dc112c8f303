"""Replay has the rounds of the live loop, in the seconds of the profile."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import warnings
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW, make_prompts
from contract_policies import DEPTH, TEST_POLICIES, ReadsDraftStates, ReadsStates, SelectingByToken
from head_tensors import learned as learned_policy
from specstop.collect import Trace, collect, load_trace
from specstop.decode import Generation, Settings, Speculator, Topology, stream_key
from specstop.policies import Confidence, FixedLength, PolicyError, State, TraceError
from specstop.policies.features import HIDDEN_STATES
from specstop.policies.published.online import Online
from specstop.policies.rules import Threshold
from specstop.policies.storage import load_policy_folder
from specstop.train import Rounds, trace_arrays, train
from specstop.train.heads.crossfit import prompt_folds
from specstop.train.replay.arrays import joined_arrays, policy_features
from specstop.train.replay.bounds import StaticTree
from specstop.train.replay.checks import check_fit
from specstop.train.replay.rounds import BY_ROUND, scale_costs
from specstop.train.replay.run import replay, replay_many
from synthetic import synthetic_trace

from specstop import RoundOutcome, SpecstopWarning, StopPolicy, load_policy

Traces = dict[float, Trace]
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
    "heuristic:2", "heuristic-transient:2", "roc:0.2?samples=3", "entropy:2.5", "adaedl:0.3?eps=0.2", "maxprob:0.2",
    "product:0.03", "online:0.1?prior=2", "bandit:0.5?arms=fixed:0,fixed:2,confidence:0.2,heuristic:1",
    "bandit?kind=thompson&arms=fixed:1,product:0.05,roc", "ddd:-1.5?begin=1&every=1", "eagle:3?top=2", "opt:0.2?nodes=6",
    "c2t:3",
)  # fmt: skip
"""Published rules, with settings that stop now and then on the tiny pair."""
FOR_TREES = ("ddd", "eagle", "opt", "c2t")
CASES = [
    # Each policy on a chain at one temperature, and on a tree at the other one.
    *((name, None, (0.0, 0.7)[at % 2]) for at, name in enumerate(POLICIES)),
    *((name, "odd", (0.7, 0.0)[at % 2]) for at, name in enumerate(POLICIES)),
    *((name, tree, 0.7) for name in ("trimming", "adaptive") for tree in ("widths", "fork")),
    # Rules for trees likewise, the others on a chain or on a tree in turn.
    *((spec, (None, "odd")[at % 2], (0.0, 0.7)[at // 2 % 2]) for at, spec in enumerate(SPECS)),
    *((s, ("odd", None)[at % 2], (0.7, 0.0)[at // 2 % 2]) for at, s in enumerate(SPECS) if s.startswith(FOR_TREES)),
]


@pytest.fixture(scope="module")
def recorded(pair, prompts, tmp_path_factory):
    """Collect a dense trace with hidden states, once for each tree and temperature."""
    folder = tmp_path_factory.mktemp("recorded")

    @functools.cache
    def run(tree: str | None, temperature: float) -> Trace:
        options = {"depth": DEPTH, "tree": TREES[tree], "temperature": temperature, "verification": "match"}
        out = folder / f"{tree}-{temperature}"
        return collect(pair, prompts[1::2], out, **options, max_new_tokens=NEW, shards=2, hidden=tuple(HIDDEN_STATES))

    return run


@pytest.fixture(scope="module")
def by_tree(recorded):
    """The same traces as arrays."""
    return functools.cache(lambda tree, temperature: trace_arrays(recorded(tree, temperature)))


@pytest.fixture(scope="module")
def live(pair, prompts, prompt_ids, profile):
    """Run a policy live on the prompts of the trace."""
    requests = [(ids, stream_key(0, p.id)) for p, ids in zip(prompts, prompt_ids, strict=True)][1::2]

    def run(policy: StopPolicy, tree: str | None, temperature: float) -> list[Generation]:
        settings = Settings(temperature, NEW, tree=TREES[tree], verification="match")
        speculator = Speculator(pair, policy, settings, profile)
        texts = [speculator.generate(*request) for request in requests]
        assert speculator.policy is policy, "the policy failed and was replaced"
        return texts

    return run


def live_rounds(generations: list[Generation]) -> list[list[list[int]]]:
    return [[[r.anchor, r.drafted, r.verified, r.accepted] for r in g.rounds] for g in generations]


def by_text(rounds: Rounds) -> list[list[list[int]]]:
    return [rounds.log[rounds.sequence == s, 1:].tolist() for s in range(len(rounds.tokens))]


@pytest.mark.parametrize(("name", "tree", "temperature"), CASES)
def test_rounds_and_seconds_are_those_of_the_live_loop(by_tree, live, profile, name, tree, temperature):
    arrays = by_tree(tree, temperature)
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
def test_a_live_policy_observes_the_seconds_of_trees(by_tree, live, profile, name):
    observed: list[float] = []

    class Listening(type(POLICIES[name])):  # type: ignore[misc]
        def observe(self, outcome: RoundOutcome, state: State) -> State:
            observed.append(outcome.seconds.item())
            return super().observe(outcome, state)

    listening = copy.copy(POLICIES[name])
    listening.__class__ = Listening
    played = replay(by_tree("odd", 0.7), POLICIES[name], profile)
    live(listening, "odd", 0.7)
    prompts = profile.prefill_seconds(played.prompt_tokens.numpy())
    by_text = played.by_sequence(torch.tensor(observed, dtype=torch.float64)) + torch.from_numpy(prompts)
    torch.testing.assert_close(played.seconds, by_text, rtol=1e-12, atol=0.0)


def test_a_static_tree_is_drafted_live_as_in_replay(by_tree, live, profile):
    arrays = by_tree("widths", 0.7)
    policy, children = StaticTree(arrays.tree, [0, 1, 3, 4, 9]), arrays.tree.children
    assert policy.shape.parent == Topology([-1, 0, 0, 1, 1, 3]).parent
    assert policy.drawn.nodes == sum(len(children[row]) for row in (0, 1, 4))
    played = replay(arrays, policy, profile)
    assert by_text(played) == live_rounds(live(policy, "widths", 0.7)) and int(played.verified.max()) <= 5


@pytest.mark.parametrize("tree", [None, "widths"])
def test_rounds_of_a_text_do_not_depend_on_the_other_texts(recorded, by_tree, profile, tree):
    """The same in memory and read from files."""
    arrays, from_files = by_tree(tree, 0.7), trace_arrays(load_trace(recorded(tree, 0.7).folder))
    for name in ("reads-history", "adaptive", "randomised", "reads-states", "reads-draft-states"):
        whole = replay(arrays, POLICIES[name], profile)
        assert len({tuple(r[1:]) for rounds in by_text(whole) for r in rounds}) > 2, "the policy decides something"
        for other in (whole.subset([3, 1]), *(a.subset([1, 3]).subset([1, 0]) for a in (arrays, from_files))):
            part = other if isinstance(other, Rounds) else replay(other, POLICIES[name], profile)
            assert by_text(part) == [by_text(whole)[s] for s in (3, 1)]
            assert torch.equal(part.seconds, whole.seconds[[3, 1]])


EXACT = 1e-12


@pytest.mark.parametrize("tree", [None, "widths"])
def test_prices_are_linear_in_the_costs_of_a_profile(by_tree, profile, tree):
    rounds = replay(by_tree(tree, 0.7), Confidence(0.3, DEPTH), profile)
    spent = rounds.price(profile)
    costly = profile.with_decisions({"confidence": 2.0 * profile.decision("confidence")})
    scaled = scale_costs(profile, draft=2.0), scale_costs(profile, verify=2.0), costly
    doubled = [rounds.price(costs) - spent for costs in scaled]
    assert all(float(more.sum()) > 0 for more in doubled)
    torch.testing.assert_close(doubled[2], rounds.decision_seconds(profile), rtol=1e-9, atol=EXACT)
    everything = rounds.price(scale_costs(costly, draft=2.0, verify=2.0))
    torch.testing.assert_close(everything, spent + sum(doubled), rtol=1e-9, atol=EXACT)
    bare = rounds.price(profile, bare=True) + rounds.decision_seconds(profile)
    assert bool((bare <= spent + EXACT).all()), "a larger backlog is not cheaper"
    one = rounds.backlog == 1
    torch.testing.assert_close(bare[one], spent[one], rtol=1e-9, atol=EXACT)


@pytest.mark.parametrize("tree", [None, "widths"])
def test_policies_replayed_side_by_side_have_the_rounds_of_each_alone(by_tree, profile, tree, monkeypatch):
    """A sweep with hidden states is divided into parts."""
    monkeypatch.setattr(sys.modules["specstop.train.replay.run"], "MAX_HIDDEN_BYTES", 16 * 4 * 2 * 8)
    arrays, learned = by_tree(tree, 0.7), learned_policy()
    scalar = [
        *(Confidence(t, DEPTH) for t in (0.1, 0.4, 0.4, 0.8)), FixedLength(2), Confidence(0.3, 2),
        *(Online(t, prior, max_depth=DEPTH) for t, prior in ((0.1, 2.0), (0.3, 2.0), (0.02, 2.0), (0.3, 9.0))),
        *(learned.with_rule(Threshold("survival", t)) for t in (0.1, 0.3, 0.5)),
    ]  # fmt: skip
    for sweep in (scalar, [ReadsStates(), ReadsStates(), Confidence(0.3, DEPTH)]):
        for policy, rounds in zip(sweep, replay_many(arrays, sweep, profile), strict=True):
            alone = replay(arrays, policy, profile)
            for name in (*BY_ROUND, "tokens", "seconds"):
                assert getattr(alone, name) is None or torch.equal(getattr(rounds, name), getattr(alone, name)), name


# Traces as arrays: what is read, joined and removed, and what is refused.

TEMPERATURES = (0.0, 0.7)


@pytest.fixture(scope="module")
def arrays(traces):
    return trace_arrays(traces[0.7])


@pytest.fixture(scope="module")
def both(pair, sides, tmp_path_factory):
    """Traces of the training prompts at temperatures 0.7 and 0."""
    folder = tmp_path_factory.mktemp("cold")
    return [sides[0], collect(pair, make_prompts(24, "fit", 21), folder, depth=DEPTH, max_new_tokens=NEW, shards=2)]


class ReadsClock(FixedLength):
    reads_clock = True


class OtherSize(ReadsDraftStates):
    sizes = MappingProxyType({"draft_hidden": 8})


def test_policies_that_a_trace_cannot_replay_are_refused(arrays, traces, recorded, profile):
    few = trace_arrays(traces[0.7], ["entropy"])
    whole = synthetic_trace([[1, 0, 1], [0, 1]], depth=1)
    mixed = dataclasses.replace(whole, header=dataclasses.replace(whole.header, mix=0.5))
    some_states = trace_arrays(recorded(None, 0.7), hidden=["target_hidden"])
    for trace, policy, error, noun in (
        (arrays, FixedLength(DEPTH + 1), TraceError, "depth"),
        (arrays, ReadsClock(2), TraceError, "clock"),
        (few, Confidence(0.4, DEPTH), TraceError, "'drawn_prob'"),
        (mixed, FixedLength(1), TraceError, "mix"),
        (arrays, ReadsStates(), TraceError, "draft_hidden, target_hidden"),
        (some_states, ReadsDraftStates(), TraceError, "draft_hidden"),
        (trace_arrays(recorded(None, 0.7)), OtherSize(), PolicyError, r"draft_hidden of 8 .*16"),
    ):
        with pytest.raises(error, match=noun):
            replay(trace, policy, profile)
    with pytest.raises(TraceError, match="'top1'"):
        policy_features(few, ["top1"], torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4))
    with pytest.raises(TraceError, match="no draft_hidden"):
        trace_arrays(traces[0.7], hidden=["draft_hidden"])


@pytest.mark.parametrize(
    ("column", "value", "noun"),
    [
        ("anchor", None, "misses anchors"),
        ("accepted_length", -1, "accepted lengths"),  # would commit nothing, forever
        ("accepted_length", DEPTH + 1, "accepted lengths"),
        ("tokens", None, "without tokens"),
        ("top1", None, "without top1"),
    ],
)
def test_an_impossible_trace_is_refused(traces, column, value, noun):
    trace = traces[0.0]
    if column == "anchor":
        rows = trace.rows.select([i for i in range(len(trace.rows)) if i != 3])
    else:
        rows = trace.rows.map(lambda row, at: {column: value if at == 3 else row[column]}, with_indices=True)
    with pytest.raises(TraceError, match=f"traces.*{noun}"):
        trace_arrays(Trace(trace.folder, trace.header, rows))


def test_joined_traces_are_replayed_as_each_alone(both, profile):
    joined, alone = joined_arrays(both), [trace_arrays(trace) for trace in both]
    assert joined.sequences == sum(part.sequences for part in alone) > 40
    together, parts = replay(joined, FixedLength(3), profile), [replay(part, FixedLength(3), profile) for part in alone]
    for name in ("tokens", "seconds", "anchor", "accepted", "committed", "backlog"):
        assert torch.equal(getattr(together, name), torch.cat([getattr(part, name) for part in parts])), name
    folds = prompt_folds(joined, 4, 0)
    owner: dict[str, int] = {}
    assert all(owner.setdefault(n, f) == f for n, f in zip(joined.prompt_ids, folds.of.tolist(), strict=True))
    assert joined.sequences > len(owner) > 20, "a prompt is in one fold at all temperatures"


def changed(trace: Trace, **entries: Any) -> Trace:
    """Return a trace with other entries in its header."""
    return Trace(trace.folder, dataclasses.replace(trace.header, **entries), trace.rows)


def test_a_policy_that_reads_the_temperature_decides_live_as_in_replay(pair, both, full_profile, tmp_path):
    options = {"features": ("temperature", "depth"), "rule": "step", "threshold": 0.55}
    train(both, full_profile, **options, out=tmp_path / "p")
    policy = load_policy_folder(tmp_path / "p")
    assert policy.metadata.temperature == TEMPERATURES
    for trace in both:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_fit(policy, trace)
        log, arrays = replay(trace, policy, full_profile).log.tolist(), trace_arrays(trace)
        speculator = Speculator(pair, policy, Settings(trace.header.temperature, NEW, verification="match"))
        for prompt in make_prompts(24, "fit", 21)[:4]:
            text = speculator.generate(pair.tokenizer(prompt.text)["input_ids"], stream_key(0, prompt.id))
            s = arrays.prompt_ids.index(prompt.id)
            live = [[s, r.anchor, r.drafted, r.verified, r.accepted] for r in text.rounds]
            assert live == [line for line in log if line[0] == s]
    for entries in ({"temperature": 1.3}, {"verification": "rejection"}, {"pair": {"target": "0"}}):
        with pytest.warns(SpecstopWarning, match=f"trained for another {next(iter(entries))}"):
            check_fit(policy, changed(both[0], **entries))
