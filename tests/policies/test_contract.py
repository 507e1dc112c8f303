"""The contract's helpers: a checked answer, a policy held to a depth, rows of a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from asking import ask
from specstop.policies.contract import Array, DraftStep, State, StopPolicy, checked_keep, checked_select
from specstop.policies.errors import PolicyFailure
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.state import put, take
from specstop.policies.testing import make_tree, same


def step(depth: int, *probabilities: float) -> DraftStep:
    return ask(depth, np.reshape(probabilities, (-1, 1, 1)))


class Answers(StopPolicy):
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return self.answer  # type: ignore[return-value]

    def select(self, tree: Any, state: State) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.ones((2, 1), dtype=bool), "must return (mask, state), not ndarray"),
        ((1, 2, 3), "must return (mask, state), not tuple"),
        ((True, None), "must return a bool array, not bool"),
        ((np.ones((2, 1)), None), "must return a bool array, not float64"),
        ((torch.ones(2, 1).bool(), None), "must return a bool array, not Tensor"),
        (([[True], [True]], None), "must return a bool array, not list"),
        ((np.ones(2, dtype=bool), None), "must return shape (2, 1), not (2,)"),
    ],
)
def test_an_answer_out_of_contract_is_told_what_was_expected(answer: object, message: str) -> None:
    with pytest.raises(PolicyFailure) as caught:
        checked_keep(Answers(answer), step(1, 0.5, 0.5), None)
    assert str(caught.value) == f"policy: keep() {message}"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.ones(2, 3).bool(), "must return a bool array, not Tensor"),
        (np.ones((2, 3), dtype=np.int64), "must return a bool array, not int64"),
        (np.ones((1, 3), dtype=bool), "must return shape (2, 3), not (1, 3)"),
    ],
)
def test_so_is_a_selection(answer: object, message: str) -> None:
    with pytest.raises(PolicyFailure) as caught:
        checked_select(Answers(answer), make_tree(2, 1), None)
    assert str(caught.value) == f"policy: select() {message}"


def test_a_dead_branch_is_never_kept() -> None:
    mask, state = checked_keep(Answers((np.ones((2, 1), dtype=bool), 7)), ask(1, np.ones((2, 1, 1)), [[1], [0]]), None)
    assert mask.tolist() == [[True], [False]]
    assert state == 7


def test_what_a_plugin_writes_into_the_step_revives_no_branch() -> None:
    class Writes(StopPolicy):
        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            step.alive[:] = True
            return step.alive, state

    mask, _ = checked_keep(Writes(), ask(1, np.ones((2, 1, 1)), [[1], [0]]), None)
    assert mask.tolist() == [[True], [False]]


def test_confidence_stops_below_its_threshold() -> None:
    keep, _ = Confidence(0.5).keep(step(3, 0.49, 0.5, 0.51), None)
    assert keep[:, 0].tolist() == [False, True, True]


def test_limited_is_a_copy_that_drafts_no_deeper() -> None:
    policy = Confidence(0.3)
    assert (policy.limited(3).max_depth, policy.max_depth) == (3, 20)
    assert policy.limited(30) is policy
    assert FixedLength(8).limited(5).max_depth == 5


def test_a_policy_without_keep_says_so() -> None:
    with pytest.raises(TypeError, match=r"StopPolicy does not implement keep\(\)"):
        StopPolicy().keep(step(1, 0.5), None)


@dataclass(frozen=True)
class Memory:
    count: Array
    seen: Array


def memory(*counts: int, width: int = 2) -> State:
    values = np.array(counts)
    return None, (Memory(values, np.tile(values[:, None], (1, width)) + 0.5), values > 1)


def test_rows_of_a_state_are_taken() -> None:
    assert same(take(memory(1, 2, 3), np.array([2, 0])), memory(3, 1))
    assert same(take(memory(1, 2, 3), slice(1, None)), memory(2, 3))
    assert same(take(memory(1, 2, 3), np.array([True, False, True])), memory(1, 3))
    assert take(None, np.array([0])) is None


def test_rows_of_a_state_are_put_and_both_stay_as_they_were() -> None:
    state, other = memory(1, 2, 3), memory(7, 8)
    assert same(put(state, np.array([2, 0]), other), memory(8, 2, 7))
    assert same(state, memory(1, 2, 3)) and same(other, memory(7, 8))


def test_memories_of_another_width_are_filled_up() -> None:
    wide = put(np.ones((2, 1)), np.array([1]), np.full((1, 3), 5.0))
    assert wide.tolist() == [[1.0, 0.0, 0.0], [5.0, 5.0, 5.0]]
    assert put(np.ones((2, 1)), np.array([1]), None).tolist() == [[1.0], [0.0]]
    narrow = put(np.ones((2, 3), dtype=np.int64), np.array([0]), np.full((1, 1), 5))
    assert narrow.tolist() == [[5, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("state", "other", "message"),
    [
        ([1, 2], [3], "a state must be None, an array, or tuples or dataclasses of arrays, not list"),
        ({"a": np.ones(2)}, {"a": np.ones(1)}, "dataclasses of arrays, not dict"),
        (None, np.ones(1), "states of one policy, but a NoneType and a ndarray"),
        ((), (np.ones(1),), "from different depths of a round"),
    ],
)
def test_what_is_no_state_is_told(state: State, other: State, message: str) -> None:
    with pytest.raises(PolicyFailure, match=message):
        put(state, np.array([0]), other)
