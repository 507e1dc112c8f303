"""Files and result folders are written whole or not at all, also if a signal arrives; only files of specstop are replaced."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import specstop.policies.files as files
from commands import files as read_files
from specstop.policies.errors import InputError
from specstop.policies.files import MANIFEST, prepare_output_dir, prepare_output_file, staged_folder, uninterrupted


def names(folder: Path) -> list[str]:
    """Return the relative paths of everything below a folder."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def write_result(out: Path, *files: str, text: str = "old") -> Path:
    with staged_folder(out) as stage:
        for name in files or ("x",):
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).write_text(text)
    return out


def test_json_round_trips_and_invalid_json_is_refused(tmp_path):
    files.write_json(tmp_path / "a.json", {"x": [1, 0.1 + 0.2]})
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "a.json", float("nan"))
    assert files.read_json(tmp_path / "a.json", "it") == {"x": [1, 0.1 + 0.2]}
    for name, text, noun in (
        ("binary", "\xff{", "read"), ("twice", '{"outer": {"key": 1, "other": 2, "key": 1}}', "'key' occurs twice"),
        ("deep", "[" * 200_000, "read"), ("digits", "9" * 5000, "read"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text, encoding="latin-1")
        with pytest.raises(InputError, match=f"it: .*{name}.*{noun}"):
            files.read_json(tmp_path / name, "--it")
    for name, noun in (("nowhere", "not exist"), (".", "read")):
        with pytest.raises(InputError, match=f"it: .*{(tmp_path / name).name}.*{noun}"):
            files.read_json(tmp_path / name, "--it")


def test_a_result_appears_when_it_is_complete_and_is_replaced_whole(tmp_path):
    out = tmp_path / "deep" / "out"
    with staged_folder(out) as stage:
        (stage / "x").write_text("1")
        (stage / "sub").mkdir()
        (stage / "sub" / "y").write_text("2")
        assert not out.exists()
    assert names(out) == [MANIFEST, "sub", "sub/y", "x"] and out.stat().st_mode & 0o777 == 0o755
    (out / "run.yaml").write_text("written later by every command")
    prepare_output_dir(out, overwrite=True)
    write_result(out, "x", "z", text="new")
    assert names(out) == [MANIFEST, "x", "z"] and (out / "x").read_text() == "new"


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (lambda f: (f / "notes.txt").write_text("mine"), "notes.txt"),
    "a file in a subfolder": (lambda f: (f / "sub" / "notes.txt").write_text("mine"), "sub/notes.txt"),
    "a repository": (lambda f: ((f / ".git").mkdir(), (f / ".git" / "HEAD").write_text("x")), ".git/HEAD"),
    "a link": (lambda f: (f / "link").symlink_to(f.parent, target_is_directory=True), "link"),
    "a pipe": (lambda f: os.mkfifo(f / "sub" / "pipe"), "sub/pipe"),
    "a subfolder that became a link": (lambda f: (shutil.rmtree(f / "sub"), (f / "sub").symlink_to(f.parent)), "sub"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "sub/y"),
    "a manifest that is no JSON": (lambda f: (f / MANIFEST).write_text("{"), MANIFEST),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_file_stops_the_replacement_and_is_named(tmp_path, case):
    out = write_result(tmp_path / "out", "sub/y", "x")
    add, name = FOREIGN[case]
    add(out)
    before = names(tmp_path)
    for attempt in (lambda: prepare_output_dir(out, overwrite=True), lambda: write_result(out, text="new")):
        with pytest.raises(InputError) as error:
            attempt()
        assert str(out / name) in str(error.value) and "\n" not in str(error.value)
        assert names(tmp_path) == before
    assert not (out / "x").exists() or (out / "x").read_text() == "old"


def test_files_that_appear_during_the_run_or_are_elsewhere_are_kept(tmp_path):
    out, notes = write_result(tmp_path / "out"), tmp_path / "notes.txt"
    with pytest.raises(InputError, match=r"out/notes.txt"), staged_folder(out) as stage:
        (stage / "x").write_text("new")
        (out / "notes.txt").write_text("mine")
    assert ((out / "x").read_text(), (out / "notes.txt").read_text()) == ("old", "mine")
    (out / "notes.txt").rename(notes)
    (out / MANIFEST).write_text(json.dumps({"files": ["x", "../notes.txt", str(notes)]}))
    write_result(out, text="new")
    assert notes.read_text() == "mine"


def test_a_folder_is_accepted_if_it_is_new_empty_or_holds_leftovers_of_killed_writers(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".specstop-header.json.host.17").write_text("{")
    for name in ("empty", "a/b", "out"):
        assert prepare_output_dir(tmp_path / name) == tmp_path / name
    assert not (tmp_path / "a").exists()
    write_result(tmp_path / "out", text="new")
    assert names(tmp_path / "out") == [MANIFEST, "x"]
    with pytest.raises(InputError, match=r"empty.*overwrite"):
        prepare_output_dir(tmp_path / "out")
    prepare_output_dir(tmp_path / "out", resume=True)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(InputError, match="file"):
            prepare_output_dir(tmp_path / "out" / "x", **options)


@pytest.mark.parametrize(
    ("out", "source"),
    [
        ("in", "in"), ("in/../in", "in"), (".", "in"), (".", "in/deep/file"), ("in/new", "in"), ("in/new/er", "in"),
        ("link", "in"), ("in", "link"), ("link/new", "in"), ("results", "results/link"), ("in", "linked"),
        ("in/deep/file", "in/deep/file"), ("hard", "in/deep/file"), ("in/new", "~/in"), ("in/new", "./in"),
    ],
)  # fmt: skip
def test_an_output_never_overlaps_an_input(tmp_path, monkeypatch, out, source):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_text("input")
    (tmp_path / "link").symlink_to("in", target_is_directory=True)
    (tmp_path / "hard").hardlink_to(tmp_path / "in" / "deep" / "file")
    for folder, target in (("linked", "in/deep/file"), ("results", "in")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "link").symlink_to(tmp_path / target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in (source, source if source.startswith("~") else tmp_path / source):
        with pytest.raises(InputError, match="which the command reads"):
            files.check_separate(tmp_path / out, [None, "fixed:4", tmp_path / "nowhere", relative])
    files.check_separate("inner", [source])


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_working_folder_the_home_folder_the_root_and_mounts_are_refused(tmp_path, monkeypatch, overwrite):
    home, work, disk = tmp_path / "home" / "me", tmp_path / "work" / "folder", tmp_path / "disk"
    for folder in (home, work, disk):
        folder.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == disk)
    for out, noun in (
        (".", "working folder"), ("", "working folder"), ("..", "working folder"), (work, "working folder"),
        (work.parent, "working folder"), ("/", "working folder"), (home, "home folder"), (home.parent, "home folder"),
        (disk, "mount point"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=noun):
            prepare_output_dir(out, overwrite=overwrite)
    for out in (home / "result", "result", disk / "result"):
        prepare_output_dir(out, overwrite=overwrite)


@pytest.mark.parametrize("prepare", [prepare_output_dir, lambda out: prepare_output_file(out, b"")])
def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, prepare):
    monkeypatch.chdir(tmp_path)
    for name, reason in (
        ("/dev/null/x", "Not a directory"), ("/proc/x", "No such file"), ("/proc/x/y", "No such file"),
        ("x" * 256, "too long"), ("y/" + "x" * 256, "too long"), ("a\0b", "null byte"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=reason):
            prepare(name)
    assert list(tmp_path.iterdir()) == []


MARK = b"made by us"


def test_a_file_is_replaced_only_with_overwrite_and_with_the_mark(tmp_path):
    texts = {"ours": "{made by us}", "theirs": "mine", "empty": "", "late": " " * 5000 + "made by us"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert prepare_output_file(tmp_path / "new", MARK) == tmp_path / "new"
    for name in ("ours", "empty"):
        with pytest.raises(InputError, match="overwrite"):
            prepare_output_file(tmp_path / name, MARK)
        prepare_output_file(tmp_path / name, MARK, overwrite=True)
    for path, noun in ((tmp_path / "theirs", "specstop"), (tmp_path / "late", "specstop"), ("/dev/null", "specstop"),
                       (tmp_path, "folder")):  # fmt: skip
        with pytest.raises(InputError, match=noun):
            prepare_output_file(path, MARK, overwrite=True)
    with pytest.raises(InputError, match="which the command reads"):
        prepare_output_file(tmp_path / "ours", MARK, overwrite=True, inputs=[tmp_path / "ours"])


# Signals

TRACED = {module.__file__ for module in (contextlib, files)}


@pytest.fixture
def handler(handlers):
    """Handle SIGINT as a command does; `handlers` restores the handler."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not uninterrupted.defer(lambda: signal.default_int_handler(number, None)):
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)


def interrupted(work: Callable[[], object], at: int) -> tuple[bool, bool]:
    """Call `work` with a signal before the line of that number; return whether it was sent, and whether it was raised."""
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
    sys.settrace(enter)
    try:
        work()
    except KeyboardInterrupt:
        raised = True
    finally:
        sys.settrace(before)
    return lines > at, raised


WORK: dict[str, Callable[[Path, str], object]] = {
    "a file": lambda folder, text: files.write_atomic(folder / "a", text),
    "a result": lambda folder, text: write_result(folder / "out", "sub/x", "y", text=text),
    "a check of outputs": lambda folder, text: (
        prepare_output_dir(folder / "b"), prepare_output_file(folder / "c", b"")),
}  # fmt: skip


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_signal_at_any_line_leaves_the_old_state_or_the_new_one(work, replaces, tmp_path):
    states = []
    for at in range(10_000):
        folder = tmp_path / str(at)
        folder.mkdir()
        if replaces:
            work(folder, "old")
        if not states:
            states.append(read_files(folder))
        sent, raised = interrupted(lambda folder=folder: work(folder, "new"), at)  # type: ignore[misc]
        if not sent:
            break
        assert raised, f"line {at}: the signal was lost"
        left = read_files(folder)
        if left not in states:
            states.append(left)
        assert len(states) <= 2, f"line {at}: {sorted(left)}"
        assert {path.name for path in folder.iterdir()} <= {"a", "out"}, f"line {at}"
    assert not raised and at > 10
    assert read_files(folder) in states
