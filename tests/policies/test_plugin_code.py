"""Code of plugins is contained: its errors, its prints, and what it changes of settings that all code shares."""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from specstop.policies.contract import (
    Array,
    DraftStep,
    State,
    StopPolicy,
    checked_keep,
    checked_observe,
    checked_select,
    checked_start,
)
from specstop.policies.errors import PolicyError, PolicyFailure
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.plugin_code import loading, own, reason
from specstop.policies.published.bandit import Bandit
from specstop.policies.testing import keys, make_outcome, make_step, make_tree


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


def calls(policy: StopPolicy) -> dict[str, Callable[[], Any]]:
    return {
        "start": lambda: checked_start(policy, 2, keys([0, 1])),
        "keep": lambda: checked_keep(policy, make_step(policy, 1, [0, 1], 0, 1), None),
        "select": lambda: checked_select(policy, make_tree(2, 1), None),
        "observe": lambda: checked_observe(policy, make_outcome([0, 1], 0), None),
    }


def raising(error: BaseException) -> Callable[[], None]:
    def deed() -> None:
        raise error

    return deed


@pytest.mark.parametrize("method", ["start", "keep", "select", "observe"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ZeroDivisionError("inside\na plugin"), "ZeroDivisionError: inside a plugin"),
        (SystemExit(0), "SystemExit: 0"),
        (SystemExit(), "SystemExit"),
        (GeneratorExit(), "GeneratorExit"),
        (StopIteration(3), "StopIteration: 3"),
        (Odd("out"), "Odd: out"),
        (Mute(), "Mute"),
        (UnicodeError("\x1b[2J\udfff!"), "UnicodeError: [2J !"),
        (MemoryError("m" * 1000), f"MemoryError: {'m' * 300}"),
    ],
)
def test_whatever_it_raises_is_one_failure_with_one_line(method: str, error: BaseException, told: str) -> None:
    with pytest.raises(PolicyFailure) as caught:
        calls(Plugin(raising(error)))[method]()
    assert str(caught.value) == f"plugin: {method}() failed: {told}"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PolicyError("patience: expected 1 chance or more")])
def test_an_interruption_and_specstops_own_errors_pass(error: BaseException) -> None:
    for call in calls(Plugin(raising(error))).values():
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error


def test_errors_of_our_own_policies_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Confidence, "keep", lambda *args: 1 / 0)
    assert own(Confidence()) and not own(Plugin())
    with pytest.raises(ZeroDivisionError):
        checked_keep(Confidence(), make_step(Confidence(), 1, [0], 0, 1), None)


def test_a_plugin_within_a_policy_of_ours_is_contained_too() -> None:
    arm = type("Arm", (Plugin,), {"select": StopPolicy.select})(raising(SystemExit()))
    bandit = Bandit([arm, FixedLength(2)])
    with pytest.raises(PolicyFailure, match=r"^plugin: start\(\) failed: SystemExit$"):
        checked_start(bandit, 1, keys([0]))


def test_a_call_leaves_output_streams_alone() -> None:
    """They belong to the process: another thread may print, or replace them, in the middle of a call."""
    before, seen = (sys.stdout, sys.stderr), []
    for call in calls(Plugin(lambda: seen.append((sys.stdout, sys.stderr)))).values():
        call()
    with loading("--policy", "making it"):
        seen.append((sys.stdout, sys.stderr))
    assert seen == [before] * 5
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        calls(Plugin(lambda: sys.stdout.write("noise\n")))["keep"]()
    assert out.getvalue() == "noise\n"


def test_a_failure_has_the_place_in_the_policys_own_code() -> None:
    """Also of an error that a library raised, and of an answer that breaks the contract."""
    own_lines = range(deep.__code__.co_firstlineno, deep.__code__.co_firstlineno + 4)
    for deed in (raising(ValueError("x")), deep):
        with pytest.raises(PolicyFailure) as caught:
            calls(Plugin(deed))["keep"]()
        assert caught.value.file == __file__
    assert caught.value.line in own_lines
    wrong = type("Wrong", (Plugin,), {"keep": lambda self, step, state: None})()
    with pytest.raises(PolicyFailure) as caught:
        calls(wrong)["keep"]()
    assert (caught.value.file, caught.value.line) == (__file__, type(wrong).keep.__code__.co_firstlineno)


def deep() -> None:
    np.zeros((2, 3)) @ np.zeros((2, 3))
    # nothing below is called


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float16)),
    "default device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
}

STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "torch's numbers": (lambda: torch.get_rng_state().tolist(), lambda: torch.manual_seed(3)),
    "random's numbers": (random.getstate, lambda: random.seed(3)),
    "numpy's numbers": (lambda: repr(np.random.get_state()), lambda: np.random.seed(3)),  # noqa: NPY002
    "numpy's errors": (np.geterr, lambda: np.seterr(all="raise")),
    "determinism": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled()),
    ),
    "precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "the working folder": (os.getcwd, lambda: os.chdir("/")),
    "filters of warnings": (lambda: list(warnings.filters), lambda: warnings.simplefilter("error")),
}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where containment fails, the other tests must not suffer."""
    monkeypatch.chdir(tmp_path)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.usefixtures("kept")
def test_what_a_decision_changes_is_put_back(setting: str) -> None:
    read, change = SETTINGS[setting]
    before = read()
    for call in calls(Plugin(change)).values():
        call()
        assert read() == before


@pytest.mark.parametrize("setting", [*SETTINGS, *STATES])
@pytest.mark.usefixtures("kept")
def test_what_a_plugin_changes_while_it_is_loaded_is_put_back(setting: str) -> None:
    read, change = {**SETTINGS, **STATES}[setting]
    before = read()
    with loading("--policy", "making it"):
        change()
    assert read() == before
    with (
        pytest.raises(PolicyFailure, match=r"^policy: making it failed: SystemExit$"),
        loading("--policy", "making it"),
    ):
        change()
        raise SystemExit
    assert read() == before


@pytest.mark.usefixtures("kept")
def test_a_users_own_default_device_is_put_back_too() -> None:
    torch.set_default_device("meta")
    calls(Plugin(lambda: torch.set_default_device("cpu")))["keep"]()
    assert torch.get_default_device().type == "meta"


@pytest.mark.parametrize("change", [{"trims": True}, {"first": None}, {"max_depth": 99}])
def test_a_policy_that_changes_what_it_says_of_itself_fails_and_stays_as_it_was(change: dict[str, Any]) -> None:
    policy = Plugin()
    policy.deed = lambda: vars(policy).update(change)
    with pytest.raises(
        PolicyFailure, match=r"^plugin: keep\(\) must not change trims, first, max_depth of its policy: "
    ):
        calls(policy)["keep"]()
    ((name, _),) = change.items()
    assert getattr(policy, name) == getattr(Plugin, name)


def test_settings_of_torch_are_put_back_where_the_plugin_imported_it() -> None:
    """Nothing was there to be read before: what torch begins with holds."""
    code = """
import sys
from specstop.policies.plugin_code import loading
assert "torch" not in sys.modules
with loading("--policy", "importing it"):
    import torch
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
print(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "torch.float32 cpu True\n"


def test_a_policy_is_loaded_where_torch_alone_was_imported() -> None:
    """Nobody has asked it for a default device yet."""
    code = "import torch; from specstop.policies import load_policy; print(load_policy('confidence:0.4').name)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "confidence:0.4\n"


def test_reasons_leave_out_the_kind_where_specstop_says_it_all() -> None:
    assert reason(PolicyError("expected 1")) == "expected 1"
    assert reason(ValueError("expected 1")) == "ValueError: expected 1"
