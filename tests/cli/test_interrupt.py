"""Ctrl-C: one line and exit code 130, whenever it comes; nothing is half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import cli
from specstop.collect.store import Trace
from specstop.policies.profile import Profile

INTERRUPTED = (130, "specstop: interrupted\n")

RUN = """
import signal, sys
_, module, ignored = sys.argv
if ignored == "True":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from specstop.cli.main import main
sys.argv = ["specstop", "policies", "--json"]
main()
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_in_an_import_unless_it_is_ignored(ignored: bool) -> None:
    """A shell has processes in the background ignore it."""
    command = [sys.executable, "-c", RUN, "numpy", str(ignored)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == ((0, "") if ignored else INTERRUPTED)


def during(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int = 0) -> None:
    """Send SIGINT when this function is called, except for the first `after` times."""
    calls = 0
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)


def places() -> dict[str, tuple[list[str], Callable[[], tuple[Any, str]], int]]:
    """Return the arguments of `train` or `evaluate`, where the signal comes, and after how many calls."""
    import sklearn.linear_model
    import xgboost
    from lightning.pytorch.callbacks import EarlyStopping

    mlp, logistic, boosted = (["train", "--head", head] for head in ("mlp", "logistic", "xgboost"))
    return {
        "within Lightning": (mlp, lambda: (EarlyStopping, "on_train_epoch_end"), 1),
        "within XGBoost": (boosted, lambda: (xgboost.Booster, "update"), 3),
        "within scikit-learn": (logistic, lambda: (sklearn.linear_model.LogisticRegression, "fit"), 0),
        "while a policy is written": (logistic, lambda: (os, "fsync"), 1),
        "while a report is written": (["evaluate"], lambda: (os, "fsync"), 0),
    }


@pytest.mark.parametrize("where", places())
def test_ctrl_c_in_the_middle_of_a_command(
    where: str, full_profile: Profile, sides: tuple[Trace, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_profile.save(tmp_path / "profile.json")
    (command, *options), spot, after = places()[where]
    during(monkeypatch, *spot(), after)
    traces = sides[command == "evaluate"].folder
    answer = cli(command, *options, "--traces", traces, "--profile", tmp_path / "profile.json", "--out", tmp_path / "out",
                 "--quiet")  # fmt: skip
    assert (answer.code, answer.err) == INTERRUPTED
    assert answer.out == ""
    assert {path.name for path in tmp_path.rglob("*")} <= {"out", "profile.json"}
