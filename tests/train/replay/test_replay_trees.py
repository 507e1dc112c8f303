"""Replay of trees: round for round what the live loop does, in the seconds of the profile; carrying policies too."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES, SelectingByToken
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.records import Generation
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.replay import run
from specstop.train.replay.run import Replayed, replay
from specstop.train.replay.arrays import TraceArrays, trace_arrays

TREES = {"widths": "3,2,1,1,1", "fork": "fork:2x5", "odd": "parents:-1,-1,-1,0,0,1,3,3,4,6,9"}
"""The last one is not closed: a branch is wider below than its like is at the root."""


class Siblings(StopPolicy):
    """Reads what tells siblings apart, and keeps the second only where it is near."""

    name, features, max_depth = "siblings", ("branch_rank", "noisy_lead", "noisy_margin", "mean_accepted"), DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        rank, lead, margin, mean = np.moveaxis(step.features, -1, 0)
        assert not step.features[~step.alive].any()
        return step.alive & ((rank == 0) | (lead > -0.8)) & (margin < 2.5 + mean), state


class ByParent(StopPolicy):
    """Passes a number from parent to child, and trims what it does not keep."""

    name, features, trims, max_depth = "by-parent", ("drawn_prob",), True, DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        chance = step.features[..., 0]
        if step.depth > 1:
            chance = chance * np.take_along_axis(state, step.parent, 1)
        return step.alive & (chance > 0.05), chance


class Pruning(StopPolicy):
    """Drafts all, and verifies the nodes whose path has no token divisible by three."""

    name, max_depth = "pruning", DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        kept = tree.drawn & (tree.tokens % 3 != 0)
        for node in range(kept.shape[1]):
            parent = tree.parent[:, node : node + 1]
            kept[:, node] &= (parent[:, 0] < 0) | np.take_along_axis(kept, np.maximum(parent, 0), 1)[:, 0]
        return kept


class Carrying(StopPolicy):
    """Drafts deeper after each round, across texts."""

    name, carries, max_depth = "carrying", True, DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth <= state // 9)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + outcome.active


POLICIES = {
    **TEST_POLICIES,
    **{p.name: p for p in (SelectingByToken(), Siblings(), ByParent(), Pruning(), Carrying())},
}

Live = Callable[[str, str | None, float], list[Generation]]


@pytest.fixture(scope="module")
def forests(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[object, TraceArrays]:
    folder = tmp_path_factory.mktemp("forests")
    made: dict[object, TraceArrays] = {}
    for name, tree in TREES.items():
        for t in (0.0, 0.7):
            trace = collect(pair, prompts, folder / f"{name}{t}", tree=tree, temperature=t, max_new_tokens=NEW)
            made[name, t] = trace_arrays(trace)
    return made


@pytest.fixture(scope="module")
def live(pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile) -> Live:
    done: dict[object, list[Generation]] = {}

    def run(policy: str, tree: str | None, temperature: float) -> list[Generation]:
        if (policy, tree, temperature) not in done:
            settings = Settings(temperature, NEW, tree=tree, verification="match")
            speculator = Speculator(pair, POLICIES[policy], settings, profile)
            done[policy, tree, temperature] = [
                speculator.generate(ids, stream_key(0, p.id)) for p, ids in zip(prompts, prompt_ids, strict=True)
            ]
        return done[policy, tree, temperature]

    return run


def rounds(generations: list[Generation]) -> list[list[list[int]]]:
    return [[[r.anchor, r.drafted, r.verified, r.accepted] for r in g.rounds] for g in generations]


def rounds_of(replayed: Replayed) -> list[list[list[int]]]:
    sequences = range(len(replayed.tokens))
    return [replayed.log[replayed.log[:, 0] == s, 1:].tolist() for s in sequences]


CASES = [
    # Each at one temperature, in turn: what policies decide is compared at both on chains, and in `benchmarks/replay.py`.
    *((name, "odd", (0.7, 0.0)[at % 2]) for at, name in enumerate(POLICIES)),
    *((name, tree, 0.7) for name in ("fixed:4", "trimming", "siblings", "adaptive") for tree in ("widths", "fork")),
]


@pytest.mark.parametrize(("name", "tree", "temperature"), CASES)
def test_rounds_are_those_of_the_live_loop(
    forests: dict[object, TraceArrays], live: Live, profile: Profile, name: str, tree: str, temperature: float
) -> None:
    replayed = replay(forests[tree, temperature], POLICIES[name], profile)
    assert rounds_of(replayed) == rounds(live(name, TREES[tree], temperature))


@pytest.mark.parametrize("name", ["fixed:4", "siblings", "by-parent"])
def test_the_cases_tell_trees_from_chains(live: Live, name: str) -> None:
    """Some rounds draft several branches, some stop some of them early, and the second candidate is accepted now and then."""
    played = [r for g in live(name, TREES["odd"], 0.7) for r in g.rounds]
    chains = [r for g in live(name, None, 0.7) for r in g.rounds]
    assert len({r.drafted for r in played}) > 3
    assert len(played) < len(chains)


@pytest.mark.parametrize("name", ["fixed:0", "fixed:4", "by-parent", "siblings", "adaptive"])
def test_seconds_are_those_of_the_live_rounds_under_the_profile(
    pair: Pair, prompt_ids: list[list[int]], forests: dict[object, TraceArrays], profile: Profile, name: str
) -> None:
    """The loop hands the modelled seconds to `observe`."""
    heard: list[float] = []
    policy = POLICIES[name]

    class Listening(type(policy)):  # type: ignore[misc]
        def observe(self, outcome: RoundOutcome, state: State) -> State:
            heard.append(outcome.seconds.item())
            return super().observe(outcome, state)

    listening = copy.copy(policy)
    listening.__class__ = Listening
    replayed = replay(forests["odd", 0.7], policy, profile)
    for s, prompt in enumerate(prompt_ids):
        heard.clear()
        Speculator(pair, listening, Settings(0.7, NEW, tree=TREES["odd"], verification="match"), profile).generate(
            prompt, stream_key(0, f"p{s}")
        )
        total = sum(heard) + profile.prefill_seconds(np.array([len(prompt)])).item()
        assert float(replayed.seconds[s]) == pytest.approx(total, rel=1e-12)


def test_a_sequence_is_replayed_alike_in_any_company(forests: dict[object, TraceArrays], profile: Profile) -> None:
    arrays = forests["widths", 0.7]
    for name in ("reads-history", "adaptive", "by-parent", "randomised"):
        whole, part = (replay(a, POLICIES[name], profile) for a in (arrays, arrays.subset([5, 2])))
        assert rounds_of(part) == [rounds_of(whole)[s] for s in (5, 2)]
        assert torch.equal(part.seconds, whole.seconds[[5, 2]])


def test_a_chain_is_the_tree_of_width_one(traces: dict[float, Trace], profile: Profile) -> None:
    """A chain whose accepted nodes are told one by one, as those of a tree are, is replayed as one whose length is told."""
    arrays = trace_arrays(traces[0.7])
    path = torch.arange(arrays.depth) < arrays.accepted[:, None]
    for policy in POLICIES.values():
        one, other = (replay(told, policy, profile) for told in (arrays, dataclasses.replace(arrays, path=path)))
        assert torch.equal(one.log, other.log), policy.name
        assert torch.equal(one.seconds, other.seconds), policy.name


def test_streams_that_take_several_texts_decode_them_as_streams_of_one_do(
    forests: dict[object, TraceArrays], profile: Profile
) -> None:
    """A stream that goes on to the next text gets a fresh state and history, the others keep theirs."""
    arrays = forests["odd", 0.7]
    for name in ("reads-history", "adaptive", "randomised", "by-parent", "tree"):
        whole = replay(arrays, POLICIES[name], profile)
        queues = np.arange(arrays.sequences).reshape(-1, 2)[:, ::-1]
        part = run._played(arrays, POLICIES[name], profile, queues, [POLICIES[name]])[0]
        assert torch.equal(part.log, whole.log) and torch.equal(part.history, whole.history), name
        assert part.seconds.tolist() == pytest.approx(whole.seconds.tolist(), rel=1e-12)


def test_a_policy_deeper_than_the_tree_is_refused(forests: dict[object, TraceArrays], profile: Profile) -> None:
    from specstop.policies.errors import TraceError

    with pytest.raises(TraceError, match="recorded to depth"):
        replay(forests["odd", 0.7], FixedLength(DEPTH + 1), profile)
