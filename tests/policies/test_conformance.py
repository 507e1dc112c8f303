"""Every policy and head passes the tests that plugin authors subclass; policies that break the contract do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from contract_policies import TEST_POLICIES
from head_tensors import RANDOM_HEADS, random_policy
from joint_policies import batch_policy
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.fixed import Confidence
from specstop.policies.host import validate_policy
from specstop.policies.published.adaptive_verification import AdaptiveVerification
from specstop.policies.registry import BUILTINS, load_policy
from specstop.policies.testing import PolicyTests, TreePolicyTests
from trees import make_tree_policy


def learning_early() -> StopPolicy:
    """Return a policy that fits within the rounds of the tests."""
    policy = AdaptiveVerification(5)
    policy.interval = 2
    return policy


TREES: dict[str, Callable[[], StopPolicy]] = {
    **{name: partial(load_policy, name) for name in BUILTINS},
    **{name: partial(random_policy, name) for name in RANDOM_HEADS},
    **{
        f"tree from {first}, floor {floor}": partial(make_tree_policy, first=first, floor=floor)
        for first, floor in ((0, 0.0), (1, 0.1), (2, 0.0))
    },
    "batch": partial(batch_policy, "stepped", depth=5),
    "batch, all sent": partial(batch_policy, "linear", "all", depth=5),
    "adaptive verification that learns": learning_early,
}
CHAINS = {**TREES, **{f"contract {name}": partial(TEST_POLICIES.get, name) for name in TEST_POLICIES}}
CHECKS = [name for name in dir(PolicyTests) if name.startswith("test_")]


@pytest.mark.parametrize(
    ("kind", "name"), [(TreePolicyTests if name in TREES else PolicyTests, name) for name in CHAINS]
)
def test_a_policy_conforms(kind, name):
    class Case(kind):  # type: ignore[misc, valid-type]
        def make(self) -> StopPolicy:
            return CHAINS[name]()

    for check in CHECKS:
        getattr(Case(), check)()
    policy = CHAINS[name]()
    assert validate_policy(policy) is policy


class StoresCalls(Confidence):
    calls = 0

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.calls += 1
        return step.alive & (self.calls % 4 != 0), state


class ChangesState(Confidence):
    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        state += 1
        return step.alive, state


class ReadsOtherStreams(Confidence):
    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[..., 0] >= step.features[..., 0].mean()), state


class SelectsOrphans(Confidence):
    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.depth != 2


class SharesOneState(Confidence):
    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(1)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < state + 1)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + 1


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (SelectsOrphans, "answers"), (StoresCalls, "deterministic"),
        (ChangesState, "arguments_are_unchanged"), (ReadsOtherStreams, "streams_are_independent"),
        (SharesOneState, "state_rows_can_be_taken"), (SharesOneState, "state_rows_can_be_replaced"),
    ],
)  # fmt: skip
def test_a_policy_that_breaks_the_contract_fails(kind, check):
    class Case(PolicyTests):
        def make(self) -> StopPolicy:
            return kind()

    with pytest.raises((AssertionError, TypeError, ValueError)):
        getattr(Case(), f"test_{check}")()
