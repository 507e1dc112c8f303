"""Every built-in policy and every head goes through the classes that plugin authors subclass; broken ones do not pass."""

from __future__ import annotations

import numpy as np
import pytest
from contract_policies import TEST_POLICIES
from head_tensors import knots
from random_heads import RANDOM_HEADS, random_head
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.fixed import Confidence
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.registry import BUILTINS, load_policy
from specstop.policies.rules import Derived, Rule, Threshold
from specstop.policies.testing import PolicyTests, TreePolicyTests

RULES: dict[str, Rule] = {
    "mlp": Threshold("survival", 0.2),
    "specdec": Threshold("survival", 0.1),
    "dynasd-soft": Threshold("any", 0.4),
    "dynasd-hard": Threshold("any", 0.4),
}


def learned(name: str) -> StopPolicy:
    maps = Calibrator("isotonic", knots=knots()), Calibrator("temperature", 1.5)
    features, head = random_head(name)
    return LearnedPolicy("mine", features, head, *maps, RULES.get(name, Derived([0.1, 0.2, 0.3, 0.2])), 5)


CHECKS = [name for name in dir(PolicyTests) if name.startswith("test_")]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [*BUILTINS, *RANDOM_HEADS, *(f"contract {name}" for name in TEST_POLICIES)])
def test_a_policy_of_ours_conforms(name: str, check: str) -> None:
    class Case(PolicyTests):
        def make(self) -> StopPolicy:
            if name.startswith("contract "):
                return TEST_POLICIES[name.removeprefix("contract ")]
            return learned(name) if name in RANDOM_HEADS else load_policy(name)

    getattr(Case(), check)()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [*BUILTINS, *RANDOM_HEADS])
def test_a_policy_of_ours_conforms_on_trees(name: str, check: str) -> None:
    class Case(TreePolicyTests):
        def make(self) -> StopPolicy:
            return learned(name) if name in RANDOM_HEADS else load_policy(name)

    getattr(Case(), check)()


class WrongShape(Confidence):
    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive[:, 0], state


class Remembers(Confidence):
    asked = 0

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.asked += 1
        return step.alive & (self.asked % 4 != 0), state


class ChangesItsState(Confidence):
    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        state += 1
        return step.alive, state


class LooksAside(Confidence):
    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[..., 0] >= step.features[..., 0].mean()), state


class Scribbles(Confidence):
    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        answer, state = super().keep(step, state)
        step.features[:] = 0.0
        return answer, state


class Orphans(Confidence):
    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.depth != 2


class Unknown(Confidence):
    features = ("drawn_probability",)


class Peeks(Confidence):
    """Decides by how the others fared."""

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < state + 1)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return np.full_like(state, outcome.accepted.mean())


class OneForAll(Peeks):
    """Keeps one memory for all streams."""

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(1)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + 1


class InAList(Peeks):
    def start(self, streams: int, keys: Array) -> State:
        return [0.0] * streams

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return super().keep(step, np.array(state))[0], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return [count + 1.0 for count in state]


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (WrongShape, "test_answers"),
        (Remembers, "deterministic"),
        (ChangesItsState, "unchanged"),
        (LooksAside, "independent"),
        (Peeks, "independent"),
        (Scribbles, "unchanged"),
        (OneForAll, "can_be_taken"),
        (OneForAll, "can_be_replaced"),
        (InAList, "can_be_taken"),
        (InAList, "can_be_replaced"),
        (Orphans, "test_answers"),
        (Unknown, "attributes"),
    ],
)
def test_a_policy_that_breaks_the_contract_does_not_pass(kind: type[StopPolicy], check: str) -> None:
    class Case(PolicyTests):
        def make(self) -> StopPolicy:
            return kind()

    (name,) = (n for n in CHECKS if check in n)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        getattr(Case(), name)()
