"""A signal at every line of what writes files: the old state or the new one, and nothing of a temporary name."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from commands import files
from specstop.policies import files as files_module
from specstop.policies.files import prepare_output_dir, prepare_output_file, staged_folder, uninterrupted, write_atomic

TRACED = {module.__file__ for module in (contextlib, files_module)}


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle SIGINT as a command does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not uninterrupted.defer(lambda: signal.default_int_handler(number, None)):
            signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted(work: Callable[[], object], at: int) -> tuple[bool, bool]:
    """Do the work, and have a signal fall before the line of that number; return whether it did, and was raised."""
    lines, raised = 0, False

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == at + 1:
                signal.raise_signal(signal.SIGINT)
        return step

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return step if frame.f_code.co_filename in TRACED else None

    before = sys.gettrace()
    with handled():
        sys.settrace(enter)
        try:
            work()
        except KeyboardInterrupt:
            raised = True
        finally:
            sys.settrace(before)
    return lines > at, raised


def result(folder: Path, text: str) -> None:
    """Write a result of two files."""
    with staged_folder(folder / "out") as stage:
        (stage / "sub").mkdir()
        (stage / "sub" / "x").write_text(text)
        (stage / "y").write_text(text)


def claims(folder: Path) -> None:
    """See whether results could be written."""
    prepare_output_dir(folder / "out")
    prepare_output_file(folder / "file", b"")


WORK: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "a file": (lambda f: None, lambda f: write_atomic(f / "a", "new")),
    "a file that is there": (lambda f: write_atomic(f / "a", "old"), lambda f: write_atomic(f / "a", "new")),
    "a result": (lambda f: None, lambda f: result(f, "new")),
    "a result that replaces one": (lambda f: result(f, "old"), lambda f: result(f, "new")),
    "a look whether it can be written": (lambda f: None, claims),
}


@pytest.mark.parametrize("case", WORK)
def test_a_signal_at_any_line_leaves_the_old_state_or_the_new_one(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, work = WORK[case]
    monkeypatch.setattr("os.fsync", lambda number: None)
    states = []
    for at in range(10_000):
        folder = tmp_path / str(at)
        folder.mkdir()
        prepare(folder)
        if not states:
            states.append(files(folder))
        fell, raised = interrupted(lambda folder=folder: work(folder), at)  # type: ignore[misc]
        if not fell:
            break
        assert raised, f"line {at}: the signal was lost"
        left = files(folder)
        if left not in states:
            states.append(left)
        assert len(states) <= 2, f"line {at}: {sorted(left)}"
        assert {path.name for path in folder.iterdir()} <= {"a", "out"}, f"line {at}"
    assert not raised and at > 10
    assert files(folder) in states


def test_a_signal_waits_for_the_outermost_block() -> None:
    inner = False
    with handled(), pytest.raises(KeyboardInterrupt):
        with uninterrupted:
            with uninterrupted:
                signal.raise_signal(signal.SIGINT)
            inner = True
        pytest.fail("the signal was lost")
    assert inner
