"""Signals: one line and exit code 130 or 143, wherever they fall; nothing is half-written."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import cli
from specstop.cli.console import interrupt
from specstop.cli.console.interrupt import SIGNALS, Interrupted, Signals
from specstop.collect.store.folder import Trace
from specstop.policies.profile import Profile

CODES = {signal.SIGINT: (130, "specstop: interrupted\n"), signal.SIGTERM: (143, "specstop: terminated\n")}


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    kept = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}
    monkeypatch.setattr(interrupt, "_AGAIN_S", 0.01)
    taken = Signals()
    taken.take()
    yield taken
    taken.end()
    for number, handler in kept.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def ended(signals: Signals) -> Iterator[pytest.ExceptionInfo[Interrupted]]:
    """Expect an interruption to arrive, and end there as a command does."""
    with pytest.raises(Interrupted) as caught:
        try:
            yield caught
        except Interrupted:
            signals.over = True
            raise


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_an_exception_that_no_library_catches(signals: Signals, number: signal.Signals) -> None:
    with ended(signals) as caught:
        signal.raise_signal(number)
    assert not isinstance(caught.value, (Exception, KeyboardInterrupt))
    assert (caught.value.code, f"specstop: {caught.value.line}\n") == CODES[number]


def test_whoever_swallows_it_meets_it_again(signals: Signals) -> None:
    swallowed = 0
    with ended(signals):
        while True:
            try:
                if not swallowed:
                    signal.raise_signal(signal.SIGTERM)
                while True:
                    time.sleep(0.001)
            except BaseException:
                swallowed += 1
                if swallowed == 3:
                    raise
    assert signals.asked == signal.SIGTERM


def test_clean_up_is_left_alone(signals: Signals) -> None:
    done = []
    with ended(signals):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            try:
                raise OSError("met while cleaning up")
            except OSError:
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.05)  # five times as long as the exception takes to come again
                done.append("all")
    assert done == ["all"]


def test_what_a_destructor_loses_comes_again_without_a_word(
    signals: Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    class Last:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with ended(signals):
        Last()
        gc.collect()
        while True:
            time.sleep(0.001)
    assert capsys.readouterr().err == ""


def test_at_the_end_signals_come_too_late(signals: Signals) -> None:
    signals.end()
    for number in SIGNALS:
        signal.raise_signal(number)
    assert signals.asked is None


def test_a_signal_that_the_process_was_told_to_ignore_stays_ignored() -> None:
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it runs in the background
    signals = Signals()
    try:
        signals.take()
        signal.raise_signal(signal.SIGINT)
        assert signals.asked is None
    finally:
        signals.end()
        for number, handler in kept.items():
            signal.signal(number, handler)


IN_IMPORT = """
import signal, sys
_, module, number = sys.argv
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            signal.raise_signal(int(number))
sys.meta_path.insert(0, Finder())
from specstop.cli.main import run
sys.argv = ["specstop", "policies"]
run()
"""


@pytest.mark.parametrize(
    ("module", "number"), [("typer", signal.SIGTERM), ("rich.progress", signal.SIGINT), ("numpy", signal.SIGTERM)]
)
def test_a_signal_in_an_import(module: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", IN_IMPORT, module, str(int(number))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == CODES[number]


# In the middle of commands


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, full_profile: Profile) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    full_profile.save(folder / "profile.json")
    return folder


def during(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, after: int = 0) -> None:
    """Have a signal fall as this function is called, the first `after` times excepted."""
    calls = 0
    kept: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            os.kill(os.getpid(), number)
        return kept(*args, **options)

    monkeypatch.setattr(owner, name, call)


def places() -> dict[str, tuple[list[str], Callable[[], tuple[Any, str]], int]]:
    """Return the arguments of `train` or `evaluate`, where the signal falls, and after how many calls."""
    import sklearn.linear_model
    import torch.utils.data
    import xgboost
    from specstop.train.heads.trainer import ReportProgress

    mlp, logistic, boosted = (["train", "--head", head] for head in ("mlp", "logistic", "xgboost"))
    return {
        "within Lightning": (mlp, lambda: (ReportProgress, "on_train_batch_end"), 1),
        "in a data loader": (mlp, lambda: (torch.utils.data.TensorDataset, "__getitem__"), 3),
        "within XGBoost": (boosted, lambda: (xgboost.Booster, "update"), 3),
        "within scikit-learn": (logistic, lambda: (sklearn.linear_model.LogisticRegression, "fit"), 0),
        "while a policy is written": (logistic, lambda: (os, "fsync"), 1),
        "while a report is written": (["evaluate"], lambda: (os, "fsync"), 0),
    }


@pytest.mark.parametrize(
    ("where", "number"), [(where, SIGNALS[at % len(SIGNALS)]) for at, where in enumerate(places())]
)
def test_a_signal_in_the_middle_of_a_command(
    where: str, number: signal.Signals, place: Path, sides: tuple[Trace, Trace], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (command, *options), spot, after = places()[where]
    during(monkeypatch, *spot(), number, after)
    traces = sides[command == "evaluate"].folder
    answer = cli(command, *options, "--traces", traces, "--profile", place / "profile.json", "--out", tmp_path / "out",
                 "--quiet")  # fmt: skip
    assert (answer.code, answer.err) == CODES[number]
    assert answer.out == ""
    assert [path.name for path in tmp_path.rglob("*")] in ([], ["out"])
