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

import numpy as np

from .contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from .features import FEATURES, Kind, feature
from .features.hidden_states import HIDDEN_STATES, check_hidden, seen
from .host import PolicyHost
from .state import put, take

STREAMS = 5
ROUNDS = 3
DEEPEST = 6
HIDDEN = 16
"""Size of the hidden states that a policy is shown, unless it has `sizes`: H by name."""

Decisions = list[Array]


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
        assert check_hidden(policy.hidden) == policy.hidden, "hidden: each once, in the order of HIDDEN_STATES"

    def test_its_answers_have_the_shape_asked_for(self) -> None:
        """Each answer is a bool array of the shape of `alive`, True nowhere else."""
        for streams in (1, STREAMS):
            answers, _ = play(self.make(), range(streams), self.branches)
            for answer in answers:
                assert isinstance(answer, np.ndarray) and answer.dtype == np.bool_ and answer.shape[0] == streams

    def test_the_same_question_has_the_same_answer(self) -> None:
        """Nothing may be remembered but in the state, and no draw be made but from the key."""
        policy = self.make()
        first, _ = play(policy, range(STREAMS), self.branches)
        for other in (policy, self.make()):
            again, _ = play(other, range(STREAMS), self.branches)
            assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))

    def test_the_state_belongs_to_the_caller(self) -> None:
        """Replay keeps states and asks again: `keep` and `observe` return a new state and leave the old one as it was."""
        policy = self.make()
        state = policy.start(STREAMS, keys(range(STREAMS)))
        for depth in depths(policy):
            step = make_step(policy, depth, range(STREAMS), 0, self.branches)
            before = copy.deepcopy(state)
            answer, after = _keep(policy, step, state)
            assert same(before, state), "keep() changed the state that it was given"
            assert np.array_equal(_keep(policy, step, before)[0], answer)
            state = after
        before = copy.deepcopy(state)
        policy.observe(make_outcome(range(STREAMS), 0), state)
        assert same(before, state), "observe() changed the state that it was given"

    def test_what_it_is_shown_stays_as_it_is(self) -> None:
        """The arrays of a step and of an outcome are the caller's."""
        policy = self.make()
        state = policy.start(STREAMS, keys(range(STREAMS)))
        for depth in depths(policy):
            step = make_step(policy, depth, range(STREAMS), 0, self.branches)
            before = copy.deepcopy(step)
            _, state = policy.keep(step, state)
            assert same(before, step), "keep() wrote into the step that it was shown"
        outcome = make_outcome(range(STREAMS), 0)
        heard = copy.deepcopy(outcome)
        policy.observe(outcome, state)
        assert same(heard, outcome), "observe() wrote into the outcome that it was shown"

    def test_streams_do_not_know_of_each_other(self) -> None:
        """A stream decides as it would on its own, unless the policy says that it weighs streams against each other."""
        if self.make().joint:
            return
        together, _ = play(self.make(), range(STREAMS), self.branches)
        for stream in range(STREAMS):
            alone, _ = play(self.make(), [stream], self.branches)
            for mine, ours in zip(alone, together, strict=True):
                assert np.array_equal(mine[0], ours[stream]), f"stream {stream} decides otherwise on its own"

    def test_rows_of_its_state_can_be_taken(self) -> None:
        """Streams whose rows are taken out of a state decide as among the others: the first axis of every array is S."""
        policy, some = self.make(), [3, 0, 2]
        if policy.joint:
            return
        _, state = play(policy, range(STREAMS), self.branches)
        assert all(a.shape[:1] == (STREAMS,) for a in state_arrays(state)), (
            "the first axis of an array of the state is not S"
        )
        for depth in depths(policy):
            part = take(state, np.array(some))
            mine, _ = _keep(policy, make_step(policy, depth, some, ROUNDS, self.branches), part)
            step = make_step(policy, depth, range(STREAMS), ROUNDS, self.branches)
            ours, state = _keep(policy, step, state)
            assert np.array_equal(mine, ours[some]), f"depth {depth}: rows {some} decide otherwise on their own"

    def test_rows_of_its_state_can_be_put(self) -> None:
        """A row in whose place one of `start` is put decides as a fresh stream, and the others go on as they were."""
        policy, refilled = self.make(), [1, 4]
        if policy.joint:
            return
        _, state = play(policy, range(STREAMS), self.branches)
        fresh = policy.start(len(refilled), keys(refilled))
        for rows, whole in ((len(refilled), fresh), (STREAMS, state)):
            assert all(a.shape[:1] == (rows,) for a in state_arrays(whole)), (
                "the first axis of an array of the state is not S"
            )
        changed = put(state, np.array(refilled), fresh)
        streams = range(STREAMS)
        before, after = (play_round(policy, streams, ROUNDS, self.branches, s)[0] for s in (state, changed))
        alone, _ = play_round(policy, refilled, ROUNDS, self.branches, fresh)
        others = [s for s in streams if s not in refilled]
        for one, two, new in zip(before, after, alone, strict=True):
            assert np.array_equal(one[others], two[others]), "the rows that stay decide otherwise"
            assert np.array_equal(new, two[refilled]), "the rows that were put there do not decide as fresh ones"

    def test_the_rows_of_a_batch_do_not_matter(self) -> None:
        """Streams that share a verification decide alike in any order of the rows, others have no part in it.

        Of policies that weigh streams against each other: batches side by side decide as each would alone, and a stream
        without a round changes nothing.
        """
        policy = self.make()
        if not policy.joint:
            return
        batch, other = np.zeros(STREAMS, dtype=np.int64), range(STREAMS, STREAMS + 3)
        alone, _ = play(policy, range(STREAMS), self.branches, batch)
        order = np.array([3, 0, 4, 2, 1])
        turned, _ = play(policy, order.tolist(), self.branches, batch)
        assert same([a[order] for a in alone], turned), "in another order of the rows the streams decide otherwise"
        # Numbers of batches are names and no more: neither from 0 nor rising.
        beside, _ = play(policy, [*range(STREAMS), *other], self.branches, np.repeat([7, 2], [STREAMS, 3]))
        assert same(alone, [a[:STREAMS] for a in beside]), "another batch beside it changes what a batch decides"
        idle, _ = play(policy, [*other, *range(STREAMS)], self.branches, np.repeat([-1, 0], [3, STREAMS]))
        assert same(alone, [a[3:] for a in idle]), "streams without a round change what a batch decides"

    def test_what_is_dead_is_ignored(self) -> None:
        """The features of branches that are not alive do not matter, and none of them is kept."""
        policy = self.make()
        for depth in depths(policy):
            step = make_step(policy, depth, range(STREAMS), 0, self.branches)
            alive = step.alive.copy()
            alive[0] = False
            state = policy.start(STREAMS, keys(range(STREAMS)))
            state = reach(policy, depth, state, self.branches)
            changed = step.features.copy()
            changed[0] = 0.0
            hidden = {name: states.copy() for name, states in step.hidden.items()}
            for states in hidden.values():
                states[0] = 0.0
            step = dataclasses.replace(step, alive=alive)
            other = dataclasses.replace(step, features=changed, hidden=hidden)
            one, two = (_keep(policy, asked, copy.deepcopy(state))[0] for asked in (step, other))
            assert np.array_equal(one, two) and not one[0].any()

    def test_it_can_be_limited(self) -> None:
        """`limited` returns another policy and leaves this one as it is."""
        policy = self.make()
        limited = policy.limited(2)
        assert limited.max_depth == min(policy.max_depth, 2)
        assert policy.max_depth == self.make().max_depth, "limited() changed the policy itself"

    def test_what_it_selects_is_closed_under_parents(self) -> None:
        """A node that is verified has its parent verified."""
        policy = self.make()
        if type(policy).select is StopPolicy.select:
            return
        tree = make_tree(STREAMS, self.branches)
        mask = _select(policy, tree, policy.start(STREAMS, keys(range(STREAMS))))
        if mask is None:
            return
        rooted = np.concatenate([mask, np.ones((STREAMS, 1), dtype=np.bool_)], 1)  # the last column is the root's
        assert (~mask | np.take_along_axis(rooted, tree.parent, 1)).all(), "a node is selected whose parent is not"


class TreePolicyTests(PolicyTests):
    """The same with three branches at each depth below the root."""

    branches = 3


def keys(streams: Sequence[int]) -> Array:
    """Return [S] noise keys, one for each stream number."""
    return np.array([7919 * s + 1 for s in streams], dtype=np.int64)  # all different, none 0


def _keep(policy: StopPolicy, step: DraftStep, state: State) -> tuple[Array, State]:
    """Return the validated answer of `keep`, and the state after it."""
    host = PolicyHost(policy)
    host.state = state
    return host.keep(step), host.state


def _select(policy: StopPolicy, tree: DraftTree, state: State) -> Array | None:
    """Return the validated answer of `select`."""
    host = PolicyHost(policy)
    host.state = state
    return host.select(tree)


def state_arrays(state: State) -> list[Array]:
    """Return the arrays of a state."""
    if state is None or isinstance(state, np.ndarray):
        return [] if state is None else [state]
    fields = state if isinstance(state, tuple) else [getattr(state, f.name) for f in dataclasses.fields(state)]
    return [array for part in fields for array in state_arrays(part)]


def depths(policy: StopPolicy) -> range:
    """Return the depths at which a short run asks the policy."""
    return range(policy.first, min(policy.max_depth, DEEPEST))


def make_step(
    policy: StopPolicy, depth: int, streams: Sequence[int], round: int, branches: int, batch: Array | None = None
) -> DraftStep:
    """Return a question about these streams, each a batch of its own unless `batch` [S] says otherwise: features drawn within
    their ranges, whoever else is asked."""
    width = branches if depth else 1
    rows, parents = [], []
    for stream in streams:
        # Not by row: a stream is shown the same in whatever row it stands and whoever stands beside it.
        dice = np.random.default_rng((stream, round, depth))
        values = dice.random((width, len(policy.features)), dtype=np.float32)
        for at, name in enumerate(policy.features):
            values[:, at] = _in_range(name, values[:, at], depth)
        rows.append(values)
        parents.append(dice.integers(0, branches if depth > 1 else 1, width))  # depth 1 has one parent, the root
    hidden = {name: np.stack([_states(policy, name, depth, s, round, width) for s in streams])
              for name in policy.hidden}  # fmt: skip
    alive = np.ones((len(streams), width), dtype=np.bool_)
    if batch is None:
        batch = np.arange(len(streams))
    alive[batch < 0] = False
    return DraftStep(depth, alive, np.stack(parents), np.stack(rows), hidden, batch)


def _states(policy: StopPolicy, name: str, depth: int, stream: int, round: int, width: int) -> Array:
    """Return hidden states [B, H] of one stream, as the loop would hand them over."""
    size = getattr(policy, "sizes", {}).get(name, HIDDEN)
    if HIDDEN_STATES[name].kind is Kind.ANCHOR:
        anchor = np.random.default_rng((stream, round)).standard_normal((1, size))
        return seen(anchor).repeat(width, 0)
    drawn = np.random.default_rng((stream, round, depth, 1)).standard_normal((width, size))
    return seen(drawn * (depth > 0))


def _in_range(name: str, uniform: Array, depth: int) -> Array:
    known = FEATURES[name]
    if depth == 0 and known.kind in (Kind.PRE, Kind.POST):
        return np.zeros_like(uniform)
    if name == "depth":
        return np.full_like(uniform, depth)
    # Of a range without an end a piece 6 wide is taken.
    low = known.low if math.isfinite(known.low) else (known.high if math.isfinite(known.high) else 0.0) - 6.0
    high = known.high if math.isfinite(known.high) else low + 6.0
    return low + (high - low) * uniform


def make_outcome(streams: Sequence[int], round: int) -> RoundOutcome:
    """Return how a round went: differently for each stream."""
    drafted = np.array([1 + (s + round) % DEEPEST for s in streams], dtype=np.int64)
    accepted = np.minimum(drafted, np.array([(3 * s + 2 * round) % DEEPEST for s in streams], dtype=np.int64))
    seconds = np.array([1e-3 * (4 + (s + round) % 3) for s in streams])
    active = np.array([(s + round) % 4 != 3 for s in streams])
    return RoundOutcome(active, drafted, drafted.copy(), accepted, np.zeros_like(active), seconds)


def make_tree(streams: int, branches: int) -> DraftTree:
    """Return a forest of `branches` chains of depth 3, all drawn."""
    nodes = 3 * branches
    depth = np.tile(np.arange(1, 4).repeat(branches), (streams, 1))
    parent = np.tile(np.maximum(np.arange(nodes) - branches, -1), (streams, 1))
    tokens = (np.arange(streams)[:, None] * 31 + np.arange(nodes) * 7) % 50
    return DraftTree(tokens, parent, depth, np.ones((streams, nodes), dtype=np.bool_))


def reach(policy: StopPolicy, depth: int, state: State, branches: int) -> State:
    """Return the state of a round that has been asked about all depths before `depth`."""
    for earlier in range(policy.first, depth):
        state = _keep(policy, make_step(policy, earlier, range(STREAMS), 0, branches), state)[1]
    return state


def play(
    policy: StopPolicy, streams: Sequence[int], branches: int, batch: Array | None = None
) -> tuple[Decisions, State]:
    """Return the answers [S, B] of a few rounds, in order, and the last state; see `play_round`."""
    state, answers = policy.start(len(streams), keys(streams)), []
    for round in range(ROUNDS):
        said, state = play_round(policy, streams, round, branches, state, batch)
        answers += said
    return answers, state


def play_round(
    policy: StopPolicy, streams: Sequence[int], round: int, branches: int, state: State, batch: Array | None = None
) -> tuple[Decisions, State]:
    """Return the answers [S, B] by depth, and the state after the round; of streams that share verifications as `batch` [S]
    says, the nodes that are selected too."""
    answers, outcome = [], make_outcome(streams, round)
    for depth in depths(policy):
        answer, state = _keep(policy, make_step(policy, depth, streams, round, branches, batch), state)
        answers.append(answer)
    if batch is not None:
        mask = _select(policy, make_tree(len(streams), branches), state)
        answers += [] if mask is None else [mask]
        outcome = dataclasses.replace(outcome, active=batch >= 0)
    return answers, policy.observe(outcome, state)


def same(one: Any, other: Any) -> bool:
    """Whether two states hold the same: arrays and numbers, in tuples, lists, dicts, dataclasses and objects."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and same(vars(one), vars(other))
    return bool(one == other)
