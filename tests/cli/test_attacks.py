"""A seeded sample of the command lines and the signals of `tests/attacks`."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attack_families import family
from commands import cli

SLOW = ("demo", "profile", "deploy")
A_PROCESS_S = 6.0
"""About what a process takes that collects a few texts; most of it to import the libraries."""


@pytest.fixture(scope="module")
def commands() -> ModuleType:
    return family("commands")


@pytest.fixture(scope="module")
def signals() -> ModuleType:
    return family("signals")


def test_command_lines_change_nothing_but_their_result(
    commands: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = tuple(command for command in commands.COMMANDS if not command.words.startswith(SLOW))
    monkeypatch.setattr(commands, "COMMANDS", quick)
    seen, faults = commands.attack(12, 7, tmp_path)
    assert faults == []
    assert sum(seen.values()) == 12
    assert sum(times for name, times in seen.items() if name.endswith("done")) >= 2


def test_an_input_that_is_lost_would_be_seen(
    commands: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text("mine")
    before = commands.contents(tmp_path)
    (tmp_path / "prompts.jsonl").unlink()
    (tmp_path / ".specstop-left").mkdir()
    command, out = commands.COMMANDS[0], tmp_path / "out"
    refused = commands.Answer(2, "", "specstop: one line\n")
    assert list(commands.faults_of(tmp_path, before, command, refused, out, None)) == [
        "left half-written: ['.specstop-left']",
        "refused, and yet changed ['.specstop-left', 'prompts.jsonl']",
    ]
    done = commands.Answer(0, "", "")
    assert "changed prompts.jsonl" in list(commands.faults_of(tmp_path, before, command, done, out, None))


def test_a_signal_at_a_random_moment_leaves_a_trace_whole(
    signals: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that is sent one is the only one: what it would have made, and the rest of what it left, is made here."""

    def collect_here(bench: Any, out: Path, *more: str) -> None:
        answer = cli(*bench.command("collect", random.Random(0)), "--out", out, *more)
        assert answer.code == 0, answer.err

    def undisturbed_here(bench: Any, command: tuple[str, ...]) -> tuple[Path, float]:
        out = bench.room / "whole"
        if not out.exists():
            collect_here(bench, out)
        return out, A_PROCESS_S

    monkeypatch.setattr(signals.Bench, "undisturbed", undisturbed_here)
    monkeypatch.setattr(signals.Bench, "resume", lambda bench, out: collect_here(bench, out, "--resume"))
    monkeypatch.setattr(signals, "COMMANDS", ("collect",))
    seen, faults = signals.attack(1, 3, tmp_path)
    assert faults == []
    assert sum(seen.values()) == 1


@pytest.mark.parametrize(
    ("code", "out", "err", "faults"),
    [
        (130, "", "specstop: interrupted\n", []),
        (0, "a table\n", "", []),
        (-2, "", "Traceback\nKeyboardInterrupt\n", []),
        (-15, "", "", ["exit code -15", "said ''"]),
        (1, "", "specstop: interrupted\n", ["exit code 1"]),
        (130, "half a table\n", "specstop: interrupted\n", ["wrote 'half a table\\n' to standard output"]),
        (130, "", "Traceback\nspecstop: interrupted\n", ["said 'Traceback\\nspecstop: interrupted\\n'"]),
    ],
)
def test_an_ending_that_is_wrong_would_be_seen(
    signals: ModuleType, code: int, out: str, err: str, faults: list[str]
) -> None:
    assert signals.Ended(("collect",), code, out, err).faults() == faults
