"""Conformance tests for policies: subclass one, return your policy from `make`, and run pytest.

    from specstop.policies.testing import PolicyTests

    class TestPatience(PolicyTests):
        def make(self):
            return Patience(2)

`PolicyTests` checks a policy against the contract as replay and the live loop use it, on chains. `TreePolicyTests` calls it
with several branches of a depth as well. The built-in policies pass the same tests. pytest itself is not imported here.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from .features import FEATURES, HIDDEN_STATES, Kind, check_hidden, feature
from .state import put, take

STREAMS, ROUNDS, DEPTH = 5, 3, 6  # of the tests
HIDDEN = 16  # size H of the hidden states, unless the policy has `sizes`: H by name


class PolicyTests:
    """What every policy must do, on chains."""

    branches = 1

    def make(self) -> StopPolicy:
        """Return the policy under test. Each call returns an equal one."""
        raise NotImplementedError("return your policy from make()")

    def test_attributes(self) -> None:
        """Name, depths and features have the right types, and every feature exists."""
        policy = self.make()
        assert isinstance(policy, StopPolicy)
        assert isinstance(policy.name, str) and policy.name and "\n" not in policy.name
        assert isinstance(policy.max_depth, int) and 0 <= policy.first <= policy.max_depth
        assert isinstance(policy.features, tuple) and len(set(policy.features)) == len(policy.features)
        for name in policy.features:
            feature(name)
        assert check_hidden(policy.hidden) == policy.hidden, "hidden: each once, in the order of HIDDEN_STATES"

    def test_answers(self) -> None:
        """Each answer is a bool array of the shape of `alive`, and False where that is False."""
        for streams in (1, STREAMS):
            play(self.make(), range(streams), self.branches)  # `keep` and `select` validate every answer

    def test_deterministic(self) -> None:
        """The same calls have the same answers: nothing is stored outside the state, and random numbers depend on the key."""
        policy = self.make()
        first, _ = play(policy, range(STREAMS), self.branches)
        for other in (policy, self.make()):
            assert same(first, play(other, range(STREAMS), self.branches)[0])

    def test_arguments_are_unchanged(self) -> None:
        """`keep` and `observe` return a new state and do not change their arguments."""
        policy = self.make()
        state = policy.start(STREAMS, keys(range(STREAMS)))
        for depth in depths(policy):
            step = make_step(policy, depth, range(STREAMS), 0, self.branches)
            before = copy.deepcopy((step, state))
            answer, new = keep(policy, step, state)
            assert same(before, (step, state)), "keep() changed its arguments"
            assert same(answer, keep(policy, *before)[0])
            state = new
        outcome = make_outcome(range(STREAMS), 0)
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
        check_first_axis(state, STREAMS)
        mine, _ = play_round(policy, rows, ROUNDS, self.branches, take(state, np.array(rows)))
        ours, _ = play_round(policy, range(STREAMS), ROUNDS, self.branches, state)
        assert same(mine, [answer[rows] for answer in ours]), f"rows {rows} have other answers on their own"

    def test_state_rows_can_be_replaced(self) -> None:
        """A row that is replaced by one of `start` acts as a new stream, and the other rows are unaffected."""
        policy, rows = self.make(), [1, 4]
        if policy.joint:
            return
        _, state = play(policy, range(STREAMS), self.branches)
        fresh = policy.start(len(rows), keys(rows))
        check_first_axis(state, STREAMS)
        check_first_axis(fresh, len(rows))
        before, _ = play_round(policy, range(STREAMS), ROUNDS, self.branches, state)
        after, _ = play_round(policy, range(STREAMS), ROUNDS, self.branches, put(state, np.array(rows), fresh))
        alone, _ = play_round(policy, rows, ROUNDS, self.branches, fresh)
        others = [stream for stream in range(STREAMS) if stream not in rows]
        assert same([a[others] for a in before], [a[others] for a in after]), "the other rows have other answers"
        assert same(alone, [a[rows] for a in after]), "the replaced rows do not act as new streams"

    def test_rows_of_a_batch(self) -> None:
        """A `joint` policy has the same answers for any order of rows, beside other batches and beside idle streams."""
        policy = self.make()
        if not policy.joint:
            return
        batch, other = np.zeros(STREAMS, dtype=np.int64), range(STREAMS, STREAMS + 3)
        alone, _ = play(policy, range(STREAMS), self.branches, batch)
        order = [3, 0, 4, 2, 1]
        reordered, _ = play(policy, order, self.branches, batch)
        assert same([a[order] for a in alone], reordered), "another order of the rows changes the answers"
        # Numbers of batches are only names: they need not start at 0 or increase.
        beside, _ = play(policy, [*range(STREAMS), *other], self.branches, np.repeat([7, 2], [STREAMS, 3]))
        assert same(alone, [a[:STREAMS] for a in beside]), "another batch changes the answers"
        idle, _ = play(policy, [*other, *range(STREAMS)], self.branches, np.repeat([-1, 0], [3, STREAMS]))
        assert same(alone, [a[3:] for a in idle]), "idle streams change the answers"

    def test_dead_branches_are_ignored(self) -> None:
        """The features of branches that are not alive have no effect."""
        policy = self.make()
        state = policy.start(STREAMS, keys(range(STREAMS)))
        for depth in depths(policy):
            step = make_step(policy, depth, range(STREAMS), 0, self.branches)
            alive, features = step.alive.copy(), step.features.copy()
            alive[0], features[0] = False, 0.0
            hidden = {name: np.concatenate([0 * values[:1], values[1:]]) for name, values in step.hidden.items()}
            one = keep(policy, dataclasses.replace(step, alive=alive), copy.deepcopy(state))[0]
            two = keep(policy, dataclasses.replace(step, alive=alive, features=features, hidden=hidden), state)[0]
            assert same(one, two)
            state = keep(policy, step, state)[1]

    def test_limited(self) -> None:
        """`limited` returns another policy and does not change this one."""
        policy = self.make()
        assert policy.limited(2).max_depth == min(policy.max_depth, 2)
        assert policy.max_depth == self.make().max_depth, "limited() changed the policy"

    def test_selection_is_closed_under_parents(self) -> None:
        """The parent of a node that is verified is verified."""
        policy, tree = self.make(), make_tree(STREAMS, self.branches)
        mask = select(policy, tree, policy.start(STREAMS, keys(range(STREAMS))))
        if mask is not None:
            rooted = np.concatenate([mask, np.ones((STREAMS, 1), dtype=np.bool_)], 1)  # the last column is the root's
            assert (~mask | np.take_along_axis(rooted, tree.parent, 1)).all(), "a node without its parent is selected"


class TreePolicyTests(PolicyTests):
    """The same with three branches at each depth below the root."""

    branches = 3


def keys(streams: Sequence[int]) -> Array:
    """Return [S] noise keys, one for each stream number."""
    return np.array([7919 * stream + 1 for stream in streams], dtype=np.int64)


def depths(policy: StopPolicy) -> range:
    """Return the depths at which `keep` is called."""
    return range(policy.first, min(policy.max_depth, DEPTH))


def make_step(
    policy: StopPolicy, depth: int, streams: Sequence[int], round: int, branches: int, batch: Array | None = None
) -> DraftStep:
    """Return a step of streams, each verified alone unless `batch` [S] is given. It depends on their numbers alone."""
    width = branches if depth else 1
    batch = np.arange(len(streams)) if batch is None else batch
    alive = np.ones((len(streams), width), dtype=np.bool_) & (batch >= 0)[:, None]
    draws = [np.random.default_rng((stream, round, depth)) for stream in streams]
    uniform = np.stack([rng.random((width, len(policy.features)), dtype=np.float32) for rng in draws])  # [S, B, F]
    for column, name in enumerate(policy.features):
        uniform[..., column] = _feature_values(name, uniform[..., column], depth)
    parent = np.stack([rng.integers(0, branches if depth > 1 else 1, width) for rng in draws])
    hidden = {}
    for name in policy.hidden:
        shape = (width, getattr(policy, "sizes", {}).get(name, HIDDEN))
        is_anchor = HIDDEN_STATES[name].kind is Kind.ANCHOR
        seeds = [(s, round) if is_anchor else (s, round, depth, 1) for s in streams]
        states = np.stack([np.random.default_rng(seed).standard_normal(shape) for seed in seeds])
        states = states[:, :1].repeat(width, 1) if is_anchor else states * (depth > 0)
        hidden[name] = states.astype(np.float16).astype(np.float32)  # as in a trace
    return DraftStep(depth, alive, parent, uniform, hidden, batch)


def _feature_values(name: str, uniform: Array, depth: int) -> Array:
    definition = FEATURES[name]
    if depth == 0 and definition.kind in (Kind.PRE, Kind.POST):
        return np.zeros_like(uniform)
    if name == "depth":
        return np.full_like(uniform, depth)
    # An interval of length 6 of an unbounded range.
    low = definition.low if math.isfinite(definition.low) else min(definition.high, 0.0) - 6.0
    high = definition.high if math.isfinite(definition.high) else low + 6.0
    return low + (high - low) * uniform


def make_outcome(streams: Sequence[int], round: int) -> RoundOutcome:
    """Return the outcome of a round, which differs between streams."""
    number = np.array(streams, dtype=np.int64)
    drafted = 1 + (number + round) % DEPTH
    accepted = np.minimum(drafted, (3 * number + 2 * round) % DEPTH)
    active = (number + round) % 4 != 3
    return RoundOutcome(active, drafted, drafted.copy(), accepted, active & False, 1e-3 * (4 + (number + round) % 3))


def make_tree(streams: int, branches: int) -> DraftTree:
    """Return trees of `branches` chains of depth 3, all drawn."""
    nodes = 3 * branches
    depth = np.tile(np.arange(1, 4).repeat(branches), (streams, 1))
    parent = np.tile(np.maximum(np.arange(nodes) - branches, -1), (streams, 1))
    tokens = (np.arange(streams)[:, None] * 31 + np.arange(nodes) * 7) % 50
    return DraftTree(tokens, parent, depth, np.ones((streams, nodes), dtype=np.bool_))


def keep(policy: StopPolicy, step: DraftStep, state: State) -> tuple[Array, State]:
    """Return the validated answer of `policy.keep` and the new state."""
    answer, new = policy.keep(step, state)
    assert isinstance(answer, np.ndarray) and answer.dtype == np.bool_ and answer.shape == step.alive.shape, (
        f"keep() must return a bool array of shape {step.alive.shape}"
    )
    return answer & step.alive, new


def select(policy: StopPolicy, tree: DraftTree, state: State) -> Array | None:
    """Return the validated answer of `policy.select`."""
    mask = policy.select(tree, state)
    assert mask is None or (mask.dtype == np.bool_ and mask.shape == tree.drawn.shape), (
        f"select() must return None or a bool array of shape {tree.drawn.shape}"
    )
    return mask


def play(
    policy: StopPolicy, streams: Sequence[int], branches: int, batch: Array | None = None
) -> tuple[list[Array], State]:
    """Return the answers [S, B] of a few rounds, in order, and the last state; see `play_round`."""
    state, answers = policy.start(len(streams), keys(streams)), []
    for round in range(ROUNDS):
        more, state = play_round(policy, streams, round, branches, state, batch)
        answers += more
    return answers, state


def play_round(
    policy: StopPolicy, streams: Sequence[int], round: int, branches: int, state: State, batch: Array | None = None
) -> tuple[list[Array], State]:
    """Return the answers [S, B] by depth, with `batch` [S] also those of `select` [S, N], and the state after the round."""
    answers, outcome = [], make_outcome(streams, round)
    for depth in depths(policy):
        answer, state = keep(policy, make_step(policy, depth, streams, round, branches, batch), state)
        answers.append(answer)
    if batch is not None:
        mask = select(policy, make_tree(len(streams), branches), state)
        answers += [] if mask is None else [mask]
        outcome = dataclasses.replace(outcome, active=batch >= 0)
    return answers, policy.observe(outcome, state)


def check_first_axis(state: State, streams: int) -> None:
    """Check that a state consists of arrays whose first axis is S."""
    try:
        rows = take(state, np.arange(streams))
    except IndexError:
        rows = None
    assert same(state, rows), "the first axis of an array of the state is not S"


def _plain(value: Any) -> Any:
    """Return a value as nested lists of arrays and numbers."""
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return [[key, _plain(item)] for key, item in sorted(value.items())]
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two states or other values are equal: arrays and numbers in tuples, lists, dicts and dataclasses."""
    try:
        np.testing.assert_equal(_plain(one), _plain(other))
    except AssertionError:
        return False
    return type(one) is type(other)
