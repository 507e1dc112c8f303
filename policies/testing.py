"""Conformance tests for policies: subclass one, say how your policy is made, and run pytest.

    from specstop.policies.testing import PolicyTests

    class TestPatience(PolicyTests):
        def make(self):
            return Patience(2)

`PolicyTests` holds a policy to the contract as replay and the live loop use it, on chains. `TreePolicyTests` asks it about
several branches at a time as well. The built-in policies run through the same classes. Nothing here needs pytest itself.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .contract import DraftStep, DraftTree, RoundOutcome, State, StopPolicy, checked_keep, checked_select
from .features import FEATURES, Kind, feature
from .vectors import VECTORS, check_vectors, seen

STREAMS = 5
ROUNDS = 3
DEEPEST = 6
HIDDEN = 16
"""Size of the hidden states that a policy is shown, unless it has `sizes`: H by name."""

Decisions = list[Tensor]


class PolicyTests:
    """What every policy must do, on chains."""

    branches = 1

    def make(self) -> StopPolicy:
        """Return the policy under test; each call returns an equal one."""
        raise NotImplementedError("return your policy from make()")

    def test_it_says_what_it_is(self) -> None:
        """Name, depths and features are of the right kind; every feature is known."""
        policy = self.make()
        assert isinstance(policy, StopPolicy)
        assert isinstance(policy.name, str) and policy.name and "\n" not in policy.name
        assert isinstance(policy.max_depth, int) and 0 <= policy.first <= policy.max_depth
        assert isinstance(policy.features, tuple) and len(set(policy.features)) == len(policy.features)
        for name in policy.features:
            feature(name)
        assert check_vectors(policy.vectors) == policy.vectors, "vectors: each once, in the order of VECTORS"

    def test_its_answers_have_the_shape_asked_for(self) -> None:
        """`checked_keep` is what the loop asks through: it raises where the contract is broken."""
        for streams in (1, STREAMS):
            answers, _ = play(self.make(), range(streams), self.branches)
            for answer in answers:
                assert answer.dtype == torch.bool and answer.shape[0] == streams

    def test_the_same_question_has_the_same_answer(self) -> None:
        """Nothing may be remembered but in the state, and no draw be made but from the key."""
        policy = self.make()
        first, _ = play(policy, range(STREAMS), self.branches)
        for other in (policy, self.make()):
            again, _ = play(other, range(STREAMS), self.branches)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    def test_the_state_belongs_to_the_caller(self) -> None:
        """Replay keeps states and asks again: `keep` and `observe` return a new state and leave the old one as it was."""
        policy = self.make()
        state = policy.start(STREAMS, keys(range(STREAMS)))
        for depth in depths(policy):
            step = make_step(policy, depth, range(STREAMS), 0, self.branches)
            before = copy.deepcopy(state)
            answer, after = checked_keep(policy, step, state)
            assert same(before, state), "keep() changed the state that it was given"
            assert torch.equal(checked_keep(policy, step, before)[0], answer)
            state = after
        before = copy.deepcopy(state)
        policy.observe(make_outcome(range(STREAMS), 0), state)
        assert same(before, state), "observe() changed the state that it was given"

    def test_streams_do_not_know_of_each_other(self) -> None:
        """A stream decides as it would on its own."""
        together, _ = play(self.make(), range(STREAMS), self.branches)
        for stream in range(STREAMS):
            alone, _ = play(self.make(), [stream], self.branches)
            for mine, ours in zip(alone, together, strict=True):
                assert torch.equal(mine[0], ours[stream]), f"stream {stream} decides otherwise on its own"

    def test_what_is_dead_is_ignored(self) -> None:
        """The features of branches that are not alive do not matter, and none of them is kept."""
        policy = self.make()
        for depth in depths(policy):
            step = make_step(policy, depth, range(STREAMS), 0, self.branches)
            alive = step.alive.clone()
            alive[0] = False
            state = policy.start(STREAMS, keys(range(STREAMS)))
            state = reach(policy, depth, state, self.branches)
            changed = step.features.clone()
            changed[0] = 0.0
            hidden = {name: states.clone() for name, states in step.vectors.items()}
            for states in hidden.values():
                states[0] = 0.0
            step = dataclasses.replace(step, alive=alive)
            other = dataclasses.replace(step, features=changed, vectors=hidden)
            one, two = (checked_keep(policy, asked, copy.deepcopy(state))[0] for asked in (step, other))
            assert torch.equal(one, two) and not bool(one[0].any())

    def test_it_can_be_limited(self) -> None:
        """`limited` returns another policy and leaves this one as it is."""
        policy = self.make()
        limited = policy.limited(2)
        assert limited.max_depth == min(policy.max_depth, 2)
        assert policy.max_depth == self.make().max_depth, "limited() changed the policy itself"

    def test_deciding_alone_is_deciding_among_many(self) -> None:
        """`keep_one`, where there is one, is what the live loop asks; replay asks `keep`."""
        policy = self.make()
        decide = policy.keep_one
        if decide is None:
            return
        for stream in range(STREAMS):
            key = keys([stream])
            many, alone = policy.start(1, key), policy.start(1, key)
            for depth in depths(policy):
                step = make_step(policy, depth, [stream], 0, 1)
                answer, many = checked_keep(policy, step, many)
                hidden = {name: states[0, 0].numpy() for name, states in step.vectors.items()}
                one, alone = decide(depth, step.features[0, 0].tolist(), alone, *([hidden] if hidden else []))
                assert isinstance(one, bool), "keep_one() must return a plain bool"
                assert one == bool(answer), f"stream {stream}, depth {depth}: keep_one() and keep() differ"

    def test_deciding_in_plain_numbers_is_deciding_in_tensors(self) -> None:
        """`keep_few`, where there is one, is what the live loop asks on trees; replay asks `keep`."""
        policy = self.make()
        decide = policy.keep_few
        if decide is None:
            return
        for stream in range(STREAMS):
            tensors, plain = (policy.start(2, keys([stream, stream])), policy.start(1, keys([stream])))
            for depth in depths(policy):
                step = make_step(policy, depth, [stream, stream], 0, self.branches)
                answer, tensors = checked_keep(policy, step, tensors)
                numbers = (values.tolist() for values in (step.alive[0], step.parent[0], step.features[0].T))
                kept, plain = decide(depth, *numbers, plain)
                assert kept == answer[0].tolist(), f"stream {stream}, depth {depth}: keep_few() and keep() differ"

    def test_forgetting_a_round_is_observing_it(self) -> None:
        """`forget`, where there is one, is what the live loop calls; replay calls `observe`."""
        policy = self.make()
        if policy.forget is None:
            return
        state = reach(policy, min(policy.first + 2, policy.max_depth), policy.start(1, keys([0])), self.branches, [0])
        for round in range(ROUNDS):
            heard = policy.observe(make_outcome([0], round), state)
            assert same(heard, policy.forget(state)), f"round {round}: forget() and observe() differ"

    def test_what_it_selects_is_closed_under_parents(self) -> None:
        """A node that is verified has its parent verified."""
        policy = self.make()
        if type(policy).select is StopPolicy.select:
            return
        tree = make_tree(STREAMS, self.branches)
        mask = checked_select(policy, tree, policy.start(STREAMS, keys(range(STREAMS))))
        if mask is None:
            return
        above = torch.cat([mask, torch.ones(STREAMS, 1, dtype=torch.bool)], 1).gather(
            1, tree.parent % (mask.shape[1] + 1)
        )
        assert bool((~mask | above).all()), "a node is selected whose parent is not"


class TreePolicyTests(PolicyTests):
    """The same with three branches at each depth below the root."""

    branches = 3


def keys(streams: Sequence[int]) -> Tensor:
    """Return [S] noise keys, one for each stream number."""
    return torch.tensor([7919 * s + 1 for s in streams])


def depths(policy: StopPolicy) -> range:
    """Return the depths at which a short run asks the policy."""
    return range(policy.first, min(policy.max_depth, DEEPEST))


def make_step(policy: StopPolicy, depth: int, streams: Sequence[int], round: int, branches: int) -> DraftStep:
    """Return a question about these streams: features drawn within their ranges, whoever else is asked."""
    width = branches if depth else 1
    rows, parents = [], []
    for stream in streams:
        generator = torch.Generator().manual_seed(1000 * stream + 10 * round + depth)
        values = torch.rand(width, len(policy.features), generator=generator)
        for at, name in enumerate(policy.features):
            values[:, at] = _in_range(name, values[:, at], depth)
        rows.append(values)
        parents.append(torch.randint(0, branches if depth > 1 else 1, (width,), generator=generator))
    alive = torch.ones(len(streams), width, dtype=torch.bool)
    vectors = {name: torch.stack([_states(policy, name, depth, s, round, width) for s in streams])
               for name in policy.vectors}  # fmt: skip
    return DraftStep(depth, alive, torch.stack(parents), torch.stack(rows), vectors)


def _states(policy: StopPolicy, name: str, depth: int, stream: int, round: int, width: int) -> Tensor:
    """Return hidden states [B, H] of one stream, as the loop would hand them over."""
    size = getattr(policy, "sizes", {}).get(name, HIDDEN)
    if VECTORS[name].kind is Kind.ANCHOR:
        generator = torch.Generator().manual_seed(1000 * stream + 10 * round + 7)
        return seen(torch.randn(1, size, generator=generator)).expand(width, -1)
    generator = torch.Generator().manual_seed(1000 * stream + 10 * round + depth)
    return seen(torch.randn(width, size, generator=generator)) * (depth > 0)


def _in_range(name: str, uniform: Tensor, depth: int) -> Tensor:
    known = FEATURES[name]
    if depth == 0 and known.kind in (Kind.PRE, Kind.POST):
        return torch.zeros_like(uniform)
    if name == "depth":
        return torch.full_like(uniform, float(depth))
    low = known.low if math.isfinite(known.low) else (known.high if math.isfinite(known.high) else 0.0) - 6.0
    high = known.high if math.isfinite(known.high) else low + 6.0
    return low + (high - low) * uniform


def make_outcome(streams: Sequence[int], round: int) -> RoundOutcome:
    """Return how a round went: another way for each stream."""
    drafted = torch.tensor([1 + (s + round) % DEEPEST for s in streams])
    accepted = torch.minimum(drafted, torch.tensor([(3 * s + 2 * round) % DEEPEST for s in streams]))
    seconds = torch.tensor([1e-3 * (4 + (s + round) % 3) for s in streams], dtype=torch.float64)
    active = torch.tensor([(s + round) % 4 != 3 for s in streams])
    return RoundOutcome(active, drafted, drafted.clone(), accepted, torch.zeros_like(active), seconds)


def make_tree(streams: int, branches: int) -> DraftTree:
    """Return a forest of `branches` chains of depth 3, all drawn."""
    depth = torch.arange(1, 4).repeat_interleave(branches)
    parent = torch.arange(3 * branches) - branches
    parent[:branches] = -1
    tokens = (torch.arange(streams)[:, None] * 31 + torch.arange(3 * branches) * 7) % 50
    drawn = torch.ones(streams, 3 * branches, dtype=torch.bool)
    return DraftTree(tokens, parent.expand(streams, -1), depth.expand(streams, -1), drawn)


def reach(
    policy: StopPolicy, depth: int, state: State, branches: int, streams: Sequence[int] = range(STREAMS)
) -> State:
    """Return the state of a round that has been asked about all depths above `depth`."""
    for above in range(policy.first, depth):
        state = checked_keep(policy, make_step(policy, above, streams, 0, branches), state)[1]
    return state


def play(policy: StopPolicy, streams: Sequence[int], branches: int) -> tuple[Decisions, State]:
    """Return the answers [S, B] of a few rounds, in order, and the last state."""
    state = policy.start(len(streams), keys(streams))
    answers = []
    for round in range(ROUNDS):
        for depth in depths(policy):
            answer, state = checked_keep(policy, make_step(policy, depth, streams, round, branches), state)
            answers.append(answer)
        state = policy.observe(make_outcome(streams, round), state)
    return answers, state


def same(one: Any, other: Any) -> bool:
    """Whether two states hold the same: tensors and numbers, in tuples, lists, dicts and objects."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and same(vars(one), vars(other))
    return bool(one == other)
