"""The host of a policy: plugins are contained and validated, streams come and go, failures are replaced or raised."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from asking import ask, tell
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import PolicyError, PolicyFailure, SpecstopWarning
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.host import PolicyHost, error_text, is_trusted, plugin_errors, put, take
from specstop.policies.published.bandit import Bandit
from specstop.policies.testing import keys, make_step, make_tree, same


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Odd(BaseException):
    pass


class Plugin(StopPolicy):
    """Runs `deed` in every method."""

    features, name, max_depth = ("top1",), "plugin", 4

    def __init__(self, deed: Callable[[], Any] = lambda: None) -> None:
        self.deed = deed

    def start(self, streams: int, keys: Array) -> State:
        self.deed()

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.deed()
        return step.alive, state

    def select(self, tree: Any, state: State) -> Any:
        self.deed()

    def observe(self, outcome: Any, state: State) -> State:
        self.deed()


CALLS: dict[str, Callable[[PolicyHost], Any]] = {
    "start": lambda host: host.start(keys([0, 1])),
    "keep": lambda host: host.keep(make_step(host.policy, 1, [0, 1], 0, 1)),
    "select": lambda host: host.select(make_tree(2, 1)),
    "observe": lambda host: host.observe(tell([1, 1], [2, 2])),
}


def call(method: str, policy: StopPolicy, **options: Any) -> Any:
    host = PolicyHost(policy, **options)
    host.history = take(PolicyHost(FixedLength()).history, slice(0)).start(2)
    return CALLS[method](host)


def raising(error: BaseException) -> Callable[[], None]:
    def deed() -> None:
        raise error

    return deed


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("inside\na plugin"), "ZeroDivisionError: inside a plugin"),
        (SystemExit(0), "SystemExit: 0"),
        (GeneratorExit(), "GeneratorExit"),
        (StopIteration(3), "StopIteration: 3"),
        (Odd("out"), "Odd: out"),
        (Mute(), "Mute"),
        (UnicodeError("\x1b[2J\udfff!"), "UnicodeError: [2J !"),
        (MemoryError("m" * 1000), f"MemoryError: {'m' * 300}"),
    ],
)
def test_any_exception_of_a_plugin_is_one_failure_of_one_line(method: str, error: BaseException, text: str) -> None:
    with pytest.raises(PolicyFailure) as caught:
        call(method, Plugin(raising(error)))
    assert str(caught.value) == f"plugin: {method}() failed: {text}"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), PolicyError("patience: expected 1 chance or more")])
def test_interruptions_and_errors_of_specstop_pass(method: str, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        call(method, Plugin(raising(error)))
    assert caught.value is error


def test_errors_of_trusted_policies_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Confidence, "keep", lambda *args: 1 / 0)
    assert is_trusted(Confidence()) and not is_trusted(Plugin())
    with pytest.raises(ZeroDivisionError):
        call("keep", Confidence())


def test_a_policy_that_calls_a_plugin_is_treated_as_one() -> None:
    arm = type("Arm", (Plugin,), {"select": StopPolicy.select})(raising(SystemExit()))
    bandit = Bandit(arms=[arm, FixedLength(2)])
    assert not is_trusted(bandit)
    with pytest.raises(PolicyFailure, match="SystemExit") as caught:
        call("start", bandit)
    assert caught.value.file == __file__


@pytest.mark.parametrize("method", CALLS)
def test_a_failed_policy_is_replaced_with_one_warning(method: str) -> None:
    replaced: list[StopPolicy] = []
    host = PolicyHost(Plugin(raising(ValueError("x"))), fallback=FixedLength(2), on_replaced=replaced.append)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for name in (method, *CALLS):
            host.start(keys([0, 1])) if name != "start" else None
            CALLS[name](host)
    assert [w.category for w in seen] == [SpecstopWarning] and "ValueError: x" in str(seen[0].message)
    assert replaced == [host.policy] and host.policy.name == "fixed:2" and host.failure is not None
    assert host.failure.file == __file__
    host.reset()
    assert host.policy.name == "plugin" and host.failure is None


def test_output_streams_are_left_alone() -> None:
    """They belong to the process: another thread may print, or replace them, during a call."""
    before, seen = (sys.stdout, sys.stderr), []
    for method in CALLS:
        call(method, Plugin(lambda: seen.append((sys.stdout, sys.stderr))))
    assert seen == [before] * 4
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call("keep", Plugin(lambda: sys.stdout.write("noise\n")))
    assert out.getvalue() == "noise\n"


def deep() -> None:
    np.zeros((2, 3)) @ np.zeros((2, 3))


def test_a_failure_has_its_place_in_the_policys_own_code() -> None:
    """Also for an error that a library raised, and for an answer that violates the contract."""
    for deed in (raising(ValueError("x")), deep):
        with pytest.raises(PolicyFailure) as caught:
            call("keep", Plugin(deed))
        assert caught.value.file == __file__
    assert caught.value.line == deep.__code__.co_firstlineno + 1
    wrong = type("Wrong", (Plugin,), {"keep": lambda self, step, state: None})()
    with pytest.raises(PolicyFailure) as caught:
        call("keep", wrong)
    assert (caught.value.file, caught.value.line) == (__file__, type(wrong).keep.__code__.co_firstlineno)


def test_loading_a_plugin_turns_exceptions_into_failures() -> None:
    with (
        pytest.raises(PolicyFailure, match=r"^policy: making it failed: SystemExit$"),
        plugin_errors("--policy", "making it"),
    ):
        raise SystemExit
    assert error_text(PolicyError("expected 1")) == "expected 1"
    assert error_text(ValueError("expected 1")) == "ValueError: expected 1"


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
        (np.ones((2, 1), dtype=bool), "(mask, state)"),
        ((1, 2, 3), "(mask, state)"),
        ((True, None), "bool array"),
        ((np.ones((2, 1)), None), "float64"),
        ((torch.ones(2, 1).bool(), None), "Tensor"),
        (([[True], [True]], None), "list"),
        ((np.ones(2, dtype=bool), None), "(2,)"),
    ],
)
def test_an_answer_that_violates_the_contract_is_refused(answer: object, message: str) -> None:
    with pytest.raises(PolicyFailure) as caught:
        call("keep", Answers(answer))
    assert str(caught.value).startswith("policy: keep() must return ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.ones(2, 3).bool(), "Tensor"),
        (np.ones((2, 3), dtype=np.int64), "int64"),
        (np.ones((1, 3), dtype=bool), "(1, 3)"),
    ],
)
def test_so_is_a_selection(answer: object, message: str) -> None:
    with pytest.raises(PolicyFailure) as caught:
        call("select", Answers(answer))
    assert str(caught.value).startswith("policy: select() must return ") and message in str(caught.value)


def test_a_dead_branch_is_never_kept_whatever_a_plugin_writes() -> None:
    class Writes(StopPolicy):
        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            step.alive[:] = True
            return step.alive, 7

    host, step = PolicyHost(Writes()), ask(1, np.ones((2, 1, 1)), [[1], [0]])
    assert host.keep(step).tolist() == step.alive.tolist() == [[True], [False]]
    assert host.state == 7


def test_confidence_stops_below_its_threshold() -> None:
    keep, _ = Confidence(0.5).keep(ask(3, np.reshape((0.49, 0.5, 0.51), (-1, 1, 1))), None)
    assert keep[:, 0].tolist() == [False, True, True]


def test_limited_is_a_copy_that_drafts_no_deeper() -> None:
    policy = Confidence(0.3)
    assert (policy.limited(3).max_depth, policy.max_depth) == (3, 20)
    assert policy.limited(30) is policy
    assert FixedLength(8).limited(5).max_depth == 5


class Counts(StopPolicy):
    """Remembers its keys and counts rounds."""

    def __init__(self, carries: bool = False) -> None:
        self.carries = carries  # type: ignore[misc]

    def start(self, streams: int, keys: Array) -> State:
        return keys.copy(), np.zeros(streams)

    def observe(self, outcome: Any, state: State) -> State:
        return state[0], state[1] + outcome.active


@pytest.mark.parametrize("carries", [False, True])
def test_streams_are_refilled_and_taken(carries: bool) -> None:
    host = PolicyHost(Counts(carries), batch=3)
    host.refill(np.array([0, 2]), keys([4, 5]))
    assert host.state[0].tolist() == [keys([4])[0], 0, keys([5])[0]]
    host.observe(tell([1, 1, 1], [2, 2, 2]))
    host.refill(np.array([2]), np.array([9]))
    assert host.state[1].tolist() == ([1, 1, 1] if carries else [1, 1, 0])
    assert (host.history.record[:, 4] > 0).tolist() == [True, True, False]
    host.take(np.array([2, 0]))
    assert host.state[0].tolist() == [keys([5])[0] if carries else 9, keys([4])[0]]
    host.restart()
    assert len(host.history.record) == (2 if carries else 0)


@dataclass(frozen=True)
class Memory:
    count: Array
    seen: Array


def memory(*counts: int, width: int = 2) -> State:
    values = np.array(counts)
    return None, (Memory(values, np.tile(values[:, None], (1, width)) + 0.5), values > 1)


def test_rows_of_a_state_are_taken() -> None:
    assert same(take(memory(1, 2, 3), np.array([2, 0])), memory(3, 1))
    assert same(take(memory(1, 2, 3), np.array([True, False, True])), memory(1, 3))
    assert take(None, np.array([0])) is None


def test_rows_of_a_state_are_put_and_both_stay_as_they_were() -> None:
    state, other = memory(1, 2, 3), memory(7, 8)
    assert same(put(state, np.array([2, 0]), other), memory(8, 2, 7))
    assert same(state, memory(1, 2, 3)) and same(other, memory(7, 8))


def test_states_of_different_widths_are_padded_with_zeros() -> None:
    wide = put(np.ones((2, 1)), np.array([1]), np.full((1, 3), 5.0))
    assert wide.tolist() == [[1.0, 0.0, 0.0], [5.0, 5.0, 5.0]]
    assert put(np.ones((2, 1)), np.array([1]), None).tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("state", "other"), [([1, 2], [3]), ({"a": np.ones(2)}, {"a": np.ones(1)}), (None, np.ones(1)), ((), (np.ones(1),))]
)
def test_an_invalid_state_is_refused(state: State, other: State) -> None:
    with pytest.raises(PolicyFailure):
        put(state, np.array([0]), other)
