"""The host of a policy: plugins are validated and contained, streams come and go, failures are replaced or raised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import PolicyError, PolicyFailure, SpecstopWarning
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.host import PolicyHost, is_trusted, take, validate_policy
from specstop.policies.published.bandit import Bandit
from specstop.policies.testing import keys, make_step, make_tree
from steps import draft_step, round_outcome


class Plugin(StopPolicy):
    """Calls `action` in every method."""

    features, name, max_depth = ("top1",), "plugin", 4

    def __init__(self, action: Callable[[], Any] = lambda: None) -> None:
        self.action = action

    def start(self, streams: int, keys: Array) -> State:
        self.action()

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.action()
        return step.alive, state

    def select(self, tree: Any, state: State) -> Any:
        self.action()

    def observe(self, outcome: Any, state: State) -> State:
        self.action()


CALLS: dict[str, Callable[[PolicyHost], Any]] = {
    "start": lambda host: host.start(keys([0, 1])),
    "keep": lambda host: host.keep(make_step(host.policy, 1, [0, 1], 0, 1)),
    "select": lambda host: host.select(make_tree(2, 1)),
    "observe": lambda host: host.observe(round_outcome([1, 1], [2, 2])),
}


def call(method: str, policy: StopPolicy) -> Any:
    host = PolicyHost(policy)
    host.history = take(PolicyHost(FixedLength()).history, slice(0)).start(2)
    return CALLS[method](host)


def raising(error: BaseException) -> Callable[..., Any]:
    def action(*args: Any) -> None:
        raise error

    return action


# Failures


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("inside\na plugin"), "ZeroDivisionError: inside a plugin"), (SystemExit(0), "SystemExit: 0"),
        (type("Mute", (BaseException,), {"__str__": lambda self: 1 / 0})(), "Mute"),
        (UnicodeError("\x1b[2J\udfff!"), "UnicodeError: [2J !"),
        (MemoryError("m" * 1000), f"MemoryError: {'m' * 300}"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_any_exception_of_a_plugin_is_a_failure_of_one_line(method, error, text):
    with pytest.raises(PolicyFailure) as failure:
        call(method, Plugin(raising(error)))
    assert str(failure.value).startswith(f"plugin: {method}()") and str(failure.value).endswith(text)
    assert failure.value.__cause__ is error
    assert (failure.value.file, failure.value.line) == (__file__, raising.__code__.co_firstlineno + 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PolicyError("patience: expected 1 chance or more")])
def test_interruptions_and_errors_of_specstop_pass(error):
    for method in CALLS:
        with pytest.raises(type(error)) as caught:
            call(method, Plugin(raising(error)))
        assert caught.value is error


def test_errors_of_trusted_policies_pass_and_a_policy_that_calls_a_plugin_is_not_trusted(monkeypatch):
    arm = type("Arm", (Plugin,), {"select": StopPolicy.select})(raising(SystemExit()))
    bandit = Bandit(arms=[arm, FixedLength(2)])
    assert [is_trusted(policy) for policy in (Confidence(), Plugin(), bandit)] == [True, False, False]
    with pytest.raises(PolicyFailure, match="SystemExit") as failure:
        call("start", bandit)
    assert failure.value.file == __file__
    monkeypatch.setattr(Confidence, "keep", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call("keep", Confidence())


@pytest.mark.parametrize("method", CALLS)
def test_a_failed_policy_is_replaced_with_one_warning(method):
    replaced: list[StopPolicy] = []
    host = PolicyHost(Plugin(raising(ValueError("x"))), fallback=FixedLength(2), on_replaced=replaced.append)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for name in (method, *CALLS):
            host.start(keys([0, 1])) if name != "start" else None
            CALLS[name](host)
    assert [w.category for w in shown] == [SpecstopWarning] and "ValueError: x" in str(shown[0].message)
    assert replaced == [host.policy] and host.policy.name == "fixed:2"
    assert host.failure is not None and host.failure.file == __file__
    host.reset()
    assert host.policy.name == "plugin" and host.failure is None


# Answers


class Answers(StopPolicy):
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return self.answer  # type: ignore[return-value]

    def select(self, tree: Any, state: State) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("method", "answer", "noun"),
    [
        ("keep", np.ones((2, 1), dtype=bool), "state"), ("keep", (1, 2, 3), "state"), ("keep", (True, None), "bool array"),
        ("keep", (np.ones((2, 1)), None), "float64"), ("keep", (torch.ones(2, 1).bool(), None), "Tensor"),
        ("keep", ([[True], [True]], None), "list"), ("keep", (np.ones(2, dtype=bool), None), r"\(2,\)"),
        ("select", torch.ones(2, 3).bool(), "Tensor"), ("select", np.ones((2, 3), dtype=np.int64), "int64"),
        ("select", np.ones((1, 3), dtype=bool), r"\(1, 3\)"),
    ],
)  # fmt: skip
def test_an_answer_that_violates_the_contract_is_refused(method, answer, noun):
    with pytest.raises(PolicyFailure, match=rf"{method}\(\) must return .*{noun}"):
        call(method, Answers(answer))


def test_a_dead_branch_is_never_kept_and_arguments_are_copies():
    class Writes(StopPolicy):
        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            step.alive[:] = True
            return step.alive, 7

    host, step = PolicyHost(Writes()), draft_step(1, np.ones((2, 1, 1)), [[1], [0]])
    assert host.keep(step).tolist() == step.alive.tolist() == [[True], [False]]
    assert host.state == 7
    host = PolicyHost(Writes(), fallback=FixedLength(1))
    host.start(np.arange(2))
    host.keep(step)
    with pytest.warns(SpecstopWarning, match="a state must be None, an array"):
        host.take(np.array([1]))
    assert host.policy.name == "fixed:1"


# States


class CountsRounds(StopPolicy):
    """Stores its keys and counts rounds."""

    def __init__(self, carries: bool = False) -> None:
        self.carries = carries  # type: ignore[misc]

    def start(self, streams: int, keys: Array) -> State:
        return keys.copy(), np.zeros(streams)

    def observe(self, outcome: Any, state: State) -> State:
        return state[0], state[1] + outcome.active


@pytest.mark.parametrize("carries", [False, True])
def test_streams_are_refilled_and_taken(carries):
    host = PolicyHost(CountsRounds(carries), batch=3)
    host.refill(np.array([0, 2]), keys([4, 5]))
    assert host.state[0].tolist() == [keys([4])[0], 0, keys([5])[0]]
    host.observe(round_outcome([1, 1, 1], [2, 2, 2]))
    host.refill(np.array([2]), np.array([9]))
    assert host.state[1].tolist() == ([1, 1, 1] if carries else [1, 1, 0])
    assert (host.history.record[:, 4] > 0).tolist() == [True, True, False]
    host.take(np.array([2, 0]))
    assert host.state[0].tolist() == [keys([5])[0] if carries else 9, keys([4])[0]]
    host.restart()
    assert len(host.history.record) == (2 if carries else 0)


# Validation of plugins


fail = raising(KeyError("inside a plugin"))


def odd(attribute: str, value: Any) -> StopPolicy:
    policy: StopPolicy = type("Odd", (Plugin,), {attribute: value})()
    return policy


WRONG: list[tuple[str, Any, str]] = [
    ("features", ["entropy"], "tuple"), ("features", ("top1", "top1"), "tuple"), ("features", (1, 2), "the int 1"),
    ("features", ("entrpy",), "entropy"), ("features", property(fail), "KeyError"), ("hidden", None, "tuple"),
    ("sizes", 3, "whole numbers"), ("unasked", {8: -1}, "whole numbers"), ("max_depth", "4", "whole number"),
    ("first", -1, "whole number"), ("max_depth", property(lambda self: 4), "max_depth"), ("name", "a\nb", "text"),
    ("trims", 1, "True or False"), ("limited", lambda self, depth: None, "limited"),
]  # fmt: skip


@pytest.mark.parametrize(("attribute", "value", "noun"), WRONG)
def test_a_wrong_attribute_is_refused_by_name(attribute, value, noun):
    with pytest.raises(PolicyError) as error:
        validate_policy(odd(attribute, value))
    text = str(error.value)
    assert text.startswith("Odd") and noun in text and "\n" not in text


@pytest.mark.parametrize(
    ("policy", "noun"),
    [
        (Plugin, r"class Plugin; write Plugin\("), (None, "StopPolicy"), ("fixed:4", "StopPolicy"),
        (dataclass(frozen=True)(type("Frozen", (Plugin,), {"__init__": object.__init__}))(), "Frozen"),
    ],
)  # fmt: skip
def test_another_object_than_a_policy_is_refused(policy, noun):
    with pytest.raises(PolicyError, match=noun):
        validate_policy(policy)
