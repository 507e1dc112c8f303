"""Conformance tests for policies: subclass one, return your policy from `make`, and run pytest.

    from specstop.policies.testing import PolicyTests

    class TestPatience(PolicyTests):
        def make(self):
            return Patience(2)

`PolicyTests` checks a policy against the contract as replay and the live loop use it, on chains. `TreePolicyTests` calls it
with several branches per depth. The built-in policies pass the same tests. pytest itself is not imported here.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from .features import HIDDEN_STATES, Kind, check_hidden, feature
from .host import put, take, validate_policy

STREAMS, ROUNDS, DEPTH = 5, 3, 6  # of the tests
HIDDEN = 16  # size H of the hidden states, unless the policy has `sizes`: H by name


class PolicyTests:
    """The contract of every policy, on chains."""

    branches = 1

    def make(self) -> StopPolicy:
        """Return the policy under test. Each call returns an equal one."""
        raise NotImplementedError("return your policy from make()")

    def test_attributes(self) -> None:
        """Name, depths and features have the right types, and every feature exists."""
        policy = validate_policy(self.make())
        assert policy.first <= policy.max_depth
        assert check_hidden(policy.hidden) == policy.hidden, "hidden: each once, in the order of HIDDEN_STATES"
        assert policy.limited(2).max_depth == min(policy.max_depth, 2)
        assert policy.max_depth == self.make().max_depth, "limited() changed the policy"

    def test_answers(self) -> None:
        """Each answer is a bool array of the right shape, and the parent of a node that is verified is verified."""
        for streams in (1, STREAMS):
            play(self.make(), range(streams), self.branches)
        policy, tree = self.make(), make_tree(STREAMS, self.branches)
        mask = policy.select(tree, policy.start(STREAMS, keys(range(STREAMS))))
        if mask is not None:
            root = np.ones((STREAMS, 1), dtype=np.bool_)  # parent -1 is the last column
            rooted = np.concatenate([_mask("select()", mask, tree.drawn), root], 1)
            assert (~mask | np.take_along_axis(rooted, tree.parent, 1)).all(), "a node without its parent is selected"

    def test_deterministic(self) -> None:
        """The same calls have the same answers: nothing is stored outside the state, and random numbers depend on the key."""
        policy = self.make()
        first, again, other = (play(each, range(STREAMS), self.branches)[0] for each in (policy, policy, self.make()))
        assert same(first, again) and same(first, other)

    def test_arguments_are_unchanged(self) -> None:
        """`keep` and `observe` return a new state and do not change their arguments."""
        policy = self.make()
        state = policy.start(STREAMS, keys(range(STREAMS)))
        for depth in _depths(policy):
            step = make_step(policy, depth, range(STREAMS), 0, self.branches)
            before = copy.deepcopy((step, state))
            answer, new = _keep(policy, step, state)
            assert same(before, (step, state)), "keep() changed its arguments"
            assert same(answer, _keep(policy, *before)[0])
            state = new
        outcome = _outcome(range(STREAMS), 0)
        before_outcome = copy.deepcopy((outcome, state))
        policy.observe(outcome, state)
        assert same(before_outcome, (outcome, state)), "observe() changed its arguments"

    def test_streams_are_independent(self) -> None:
        """A stream has the same answers in a batch and alone, unless the policy is `joint`."""
        if self.make().joint:
            return
        together, _ = play(self.make(), range(STREAMS), self.branches)
        for stream in range(STREAMS):
            alone, _ = play(self.make(), [stream], self.branches)
            assert same(alone, [answer[[stream]] for answer in together]), f"stream {stream} has other answers alone"

    def test_state_rows_can_be_taken(self) -> None:
        """With rows taken from a state, streams have the same answers: the first axis of every array is S."""
        policy, rows = self.make(), [3, 0, 2]
        if policy.joint:
            return
        _, state = play(policy, range(STREAMS), self.branches)
        _check_first_axis(state, STREAMS)
        part, _ = _play_round(policy, rows, ROUNDS, self.branches, take(state, np.array(rows)))
        whole, _ = _play_round(policy, range(STREAMS), ROUNDS, self.branches, state)
        assert same(part, [answer[rows] for answer in whole]), f"rows {rows} have other answers without the other rows"

    def test_state_rows_can_be_replaced(self) -> None:
        """A row that is replaced by one of `start` acts as a new stream, and the other rows are unaffected."""
        policy, rows = self.make(), [1, 4]
        if policy.joint:
            return
        _, state = play(policy, range(STREAMS), self.branches)
        fresh = policy.start(len(rows), keys(rows))
        _check_first_axis(state, STREAMS)
        _check_first_axis(fresh, len(rows))
        before, _ = _play_round(policy, range(STREAMS), ROUNDS, self.branches, state)
        after, _ = _play_round(policy, range(STREAMS), ROUNDS, self.branches, put(state, np.array(rows), fresh))
        alone, _ = _play_round(policy, rows, ROUNDS, self.branches, fresh)
        others = [stream for stream in range(STREAMS) if stream not in rows]
        assert same([a[others] for a in before], [a[others] for a in after]), "the other rows have other answers"
        assert same(alone, [a[rows] for a in after]), "the replaced rows do not act as new streams"

    def test_rows_of_a_batch(self) -> None:
        """A `joint` policy has the same answers for any order of rows, with other batches and with idle streams."""
        policy = self.make()
        if not policy.joint:
            return
        batch, other = np.zeros(STREAMS, dtype=np.int64), range(STREAMS, STREAMS + 3)
        alone, _ = play(policy, range(STREAMS), self.branches, batch)
        order = [3, 0, 4, 2, 1]
        reordered, _ = play(policy, order, self.branches, batch)
        assert same([a[order] for a in alone], reordered), "the order of the rows changes the answers"
        # Batch numbers need not start at 0 or increase.
        two, _ = play(policy, [*range(STREAMS), *other], self.branches, np.repeat([7, 2], [STREAMS, 3]))
        assert same(alone, [a[:STREAMS] for a in two]), "another batch changes the answers"
        idle, _ = play(policy, [*other, *range(STREAMS)], self.branches, np.repeat([-1, 0], [3, STREAMS]))
        assert same(alone, [a[3:] for a in idle]), "idle streams change the answers"

    def test_dead_branches_are_ignored(self) -> None:
        """The features of branches that are not alive have no effect."""
        policy = self.make()
        state = policy.start(STREAMS, keys(range(STREAMS)))
        for depth in _depths(policy):
            step = make_step(policy, depth, range(STREAMS), 0, self.branches)
            alive, features = step.alive.copy(), step.features.copy()
            alive[0], features[0] = False, 0.0
            hidden = {name: np.concatenate([0 * values[:1], values[1:]]) for name, values in step.hidden.items()}
            one = _keep(policy, dataclasses.replace(step, alive=alive), copy.deepcopy(state))[0]
            two = _keep(policy, dataclasses.replace(step, alive=alive, features=features, hidden=hidden), state)[0]
            assert same(one, two)
            state = _keep(policy, step, state)[1]


class TreePolicyTests(PolicyTests):
    """`PolicyTests` with three branches at each depth below the root."""

    branches = 3


def keys(streams: Sequence[int]) -> Array:
    """Return [S] noise keys, one for each stream number."""
    return np.array([7919 * stream + 1 for stream in streams], dtype=np.int64)


def make_step(
    policy: StopPolicy, depth: int, streams: Sequence[int], round: int, branches: int, batch: Array | None = None
) -> DraftStep:
    """Return a step that depends on the stream numbers only; `batch` [S], by default each stream is verified alone."""
    width = branches if depth else 1
    batch = np.arange(len(streams)) if batch is None else batch
    alive = np.ones((len(streams), width), dtype=np.bool_) & (batch >= 0)[:, None]
    draws = [np.random.default_rng((stream, round, depth)) for stream in streams]
    features = np.stack([rng.random((width, len(policy.features)), dtype=np.float32) for rng in draws])  # [S, B, F]
    for column, name in enumerate(policy.features):
        definition = feature(name)
        # An interval of length 6 of an unbounded range.
        low = definition.low if math.isfinite(definition.low) else min(definition.high, 0.0) - 6.0
        high = definition.high if math.isfinite(definition.high) else low + 6.0
        features[..., column] = low + (high - low) * features[..., column]
        if name == "depth" or (depth == 0 and definition.kind in (Kind.PRE, Kind.POST)):
            features[..., column] = depth
    parent = np.stack([rng.integers(0, branches if depth > 1 else 1, width) for rng in draws])
    hidden = {}
    for name in policy.hidden:
        shape = (width, getattr(policy, "sizes", {}).get(name, HIDDEN))
        is_anchor = HIDDEN_STATES[name] is Kind.ANCHOR
        seeds = [(s, round) if is_anchor else (s, round, depth, 1) for s in streams]
        states = np.stack([np.random.default_rng(seed).standard_normal(shape) for seed in seeds])
        states = states[:, :1].repeat(width, 1) if is_anchor else states * (depth > 0)
        hidden[name] = states.astype(np.float16).astype(np.float32)  # as in a trace
    return DraftStep(depth, alive, parent, features, hidden, batch)


def make_tree(streams: int, branches: int) -> DraftTree:
    """Return trees of `branches` chains of depth 3, all drawn."""
    nodes = 3 * branches
    depth = np.tile(np.arange(1, 4).repeat(branches), (streams, 1))
    parent = np.tile(np.maximum(np.arange(nodes) - branches, -1), (streams, 1))
    tokens = (np.arange(streams)[:, None] * 31 + np.arange(nodes) * 7) % 50
    return DraftTree(tokens, parent, depth, np.ones((streams, nodes), dtype=np.bool_))


def play(
    policy: StopPolicy, streams: Sequence[int], branches: int, batch: Array | None = None
) -> tuple[list[Array], State]:
    """Return the answers [S, B] of a few rounds, with `batch` [S] also those of `select` [S, N], and the last state."""
    state, answers = policy.start(len(streams), keys(streams)), []
    for round in range(ROUNDS):
        more, state = _play_round(policy, streams, round, branches, state, batch)
        answers += more
    return answers, state


def _play_round(
    policy: StopPolicy, streams: Sequence[int], round: int, branches: int, state: State, batch: Array | None = None
) -> tuple[list[Array], State]:
    answers, outcome = [], _outcome(streams, round)
    for depth in _depths(policy):
        answer, state = _keep(policy, make_step(policy, depth, streams, round, branches, batch), state)
        answers.append(answer)
    if batch is not None:
        tree = make_tree(len(streams), branches)
        mask = policy.select(tree, state)
        answers += [] if mask is None else [_mask("select()", mask, tree.drawn)]
        outcome = dataclasses.replace(outcome, active=batch >= 0)
    return answers, policy.observe(outcome, state)


def _depths(policy: StopPolicy) -> range:
    return range(policy.first, min(policy.max_depth, DEPTH))


def _outcome(streams: Sequence[int], round: int) -> RoundOutcome:
    """Return the outcome of a round, which differs between streams."""
    number = np.array(streams, dtype=np.int64)
    drafted = 1 + (number + round) % DEPTH
    accepted = np.minimum(drafted, (3 * number + 2 * round) % DEPTH)
    active = (number + round) % 4 != 3
    return RoundOutcome(active, drafted, drafted.copy(), accepted, active & False, 1e-3 * (4 + (number + round) % 3))


def _keep(policy: StopPolicy, step: DraftStep, state: State) -> tuple[Array, State]:
    answer, new = policy.keep(step, state)
    return _mask("keep()", answer, step.alive) & step.alive, new


def _mask(method: str, value: Any, like: Array) -> Array:
    is_mask = isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == like.shape
    assert is_mask, f"{method} must return a bool array of shape {like.shape}"
    return np.asarray(value)


def _check_first_axis(state: State, streams: int) -> None:
    try:
        rows = take(state, np.arange(streams))
    except IndexError:
        rows = None
    assert same(state, rows), "the first axis of an array of the state is not S"


def same(one: Any, other: Any) -> bool:
    """Whether two states or other values are equal: arrays and numbers in tuples, lists, dicts and dataclasses."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value

    try:
        np.testing.assert_equal(plain(one), plain(other))
    except AssertionError:
        return False
    return type(one) is type(other)
