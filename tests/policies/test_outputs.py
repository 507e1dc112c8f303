"""Where results go: what is refused before anything is touched, and what replacing deletes."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from specstop.policies.errors import InputError
from specstop.policies.files import (
    MANIFEST,
    check_separate,
    prepare_output_dir,
    prepare_output_file,
    replace_folder,
    staged_folder,
    staging_path,
)


def names(folder: Path) -> list[str]:
    """Return everything below a folder."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def make(out: Path, *files: str, text: str = "old") -> Path:
    """Write a result with these files."""
    with staged_folder(out) as stage:
        for name in files or ("x",):
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).write_text(text)
    return out


def test_a_staged_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with staged_folder(out) as stage:
        (stage / "x").write_text("1")
        (stage / "sub").mkdir()
        (stage / "sub" / "y").write_text("2")
        assert not out.exists()
    assert (out / "sub" / "y").read_text() == "2"
    assert names(out.parent) == ["out", f"out/{MANIFEST}", "out/sub", "out/sub/y", "out/x"]
    assert json.loads((out / MANIFEST).read_text()) == {"schema": 1, "files": ["sub/y", "x"]}
    assert out.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_staged_folder_that_fails_leaves_what_was_there(
    tmp_path: Path, old: bool, error: type[BaseException]
) -> None:
    out = tmp_path / "out"
    if old:
        make(out)
    with pytest.raises(error), staged_folder(out) as stage:
        (stage / "x").write_text("new")
        raise error
    assert names(tmp_path) == (["out", f"out/{MANIFEST}", "out/x"] if old else [])
    assert not old or (out / "x").read_text() == "old"


def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = make(tmp_path / "out")
    rename = os.rename

    def fail(source: Path, to: Path) -> None:
        if Path(to) == out and not (Path(source) / "x").read_text() == "old":
            raise OSError("busy")
        rename(source, to)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="busy"), staged_folder(out) as stage:
        (stage / "x").write_text("new")
    assert names(tmp_path) == ["out", f"out/{MANIFEST}", "out/x"]
    assert (out / "x").read_text() == "old"


def test_a_result_is_replaced_whole(tmp_path: Path) -> None:
    out = make(tmp_path / "out", "x", "sub/y")
    (out / "run.yaml").write_text("later")
    prepare_output_dir(out, overwrite=True)
    make(out, "x", "z", text="new")
    assert names(tmp_path) == ["out", f"out/{MANIFEST}", "out/x", "out/z"]
    assert (out / "x").read_text() == "new"


def link(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent, target_is_directory=True)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "sub" / "pipe")


def listener(folder: Path) -> None:
    """Leave a socket, bound by a name from the folder: such names must be short."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("s")
    finally:
        os.chdir(here)


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (lambda f: (f / "notes.txt").write_text("mine"), "notes.txt"),
    "a hidden file": (lambda f: (f / ".notes").write_text("mine"), ".notes"),
    "a file in a folder of ours": (lambda f: (f / "sub" / "notes.txt").write_text("mine"), "sub/notes.txt"),
    "a repository": (lambda f: ((f / ".git").mkdir(), (f / ".git" / "HEAD").write_text("x")), ".git/HEAD"),
    "a link": (link, "link"),
    "a pipe": (pipe, "sub/pipe"),
    "a socket": (listener, "s"),
    "a folder of ours that became a link": (
        lambda f: (shutil.rmtree(f / "sub"), (f / "sub").symlink_to(f.parent)), "sub",
    ),
    "no list of files": (lambda f: (f / MANIFEST).unlink(), "sub/y"),
    "a list that is no JSON": (lambda f: (f / MANIFEST).write_text("{"), MANIFEST),
    "a list of another form": (lambda f: (f / MANIFEST).write_text('["x"]'), MANIFEST),
    "a list of numbers": (lambda f: (f / MANIFEST).write_text('{"files": [1, [2]]}'), "sub/y"),
    "a list that is a folder": (lambda f: ((f / MANIFEST).unlink(), (f / MANIFEST).mkdir()), "sub/y"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_what_specstop_did_not_write_stops_the_replacement_and_is_named(tmp_path: Path, case: str) -> None:
    out = make(tmp_path / "out", "sub/y", "x")
    spoil, name = FOREIGN[case]
    spoil(out)
    before = names(tmp_path)
    for attempt in (lambda: prepare_output_dir(out, overwrite=True), lambda: make(out, text="new")):
        with pytest.raises(InputError, match="is not among the files that specstop wrote there") as caught:
            attempt()
        assert f"{out / name} is not" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert names(tmp_path) == before
    assert not (out / "x").exists() or (out / "x").read_text() == "old"


def test_a_file_that_comes_during_the_run_stops_the_replacement_too(tmp_path: Path) -> None:
    out = make(tmp_path / "out")
    prepare_output_dir(out, overwrite=True)
    with pytest.raises(InputError, match=r"out/notes.txt is not among"), staged_folder(out) as stage:
        (stage / "x").write_text("new")
        (out / "notes.txt").write_text("mine")
    assert (out / "x").read_text() == "old"
    assert (out / "notes.txt").read_text() == "mine"


def test_a_list_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    out = make(tmp_path / "out")
    (tmp_path / "notes.txt").write_text("mine")
    (out / MANIFEST).write_text(json.dumps({"files": ["x", "../notes.txt", str(tmp_path / "notes.txt")]}))
    make(out, text="new")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_killed_writers_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".specstop-header.json.host.17").write_text("{")
    prepare_output_dir(tmp_path / "out")
    make(tmp_path / "out", text="new")
    assert names(tmp_path / "out") == [MANIFEST, "x"]


def test_a_folder_in_use_is_refused_and_an_empty_or_new_one_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "a/b"):
        assert prepare_output_dir(tmp_path / name) == tmp_path / name
    assert names(tmp_path) == ["empty"], "nothing is made yet"
    with pytest.raises(InputError, match=r"out: the folder .* is not empty; choose another, or pass `overwrite`"):
        prepare_output_dir(make(tmp_path / "x"))
    prepare_output_dir(tmp_path / "x", resume=True)


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True}])
def test_a_file_is_never_taken_for_a_folder(tmp_path: Path, flags: dict[str, bool]) -> None:
    (tmp_path / "x").write_text("1")
    with pytest.raises(InputError, match=r"out: expected a folder, but .*x is a file"):
        prepare_output_dir(tmp_path / "x", **flags)
    assert (tmp_path / "x").read_text() == "1"


OVERLAPS: dict[str, tuple[str, str]] = {
    "the input": ("in", "in"),
    "the input, by way of another folder": ("in/../in", "in"),
    "holds the input": (".", "in"),
    "holds it from far above": (".", "in/deep/file"),
    "lies in the input": ("in/new", "in"),
    "lies deep in it": ("in/new/er", "in"),
    "a link to the input": ("link", "in"),
    "the input is a link to it": ("in", "link"),
    "lies in it behind a link": ("link/new", "in"),
    "holds the link that the input is": ("results", "results/link"),
    "holds what the input links to": ("in", "linked"),
    "a file": ("in/deep/file", "in/deep/file"),
    "another name of the file": ("hard", "in/deep/file"),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_an_output_never_overlaps_an_input(tmp_path: Path, case: str) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_text("input")
    (tmp_path / "link").symlink_to("in", target_is_directory=True)
    (tmp_path / "hard").hardlink_to(tmp_path / "in" / "deep" / "file")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "one").symlink_to(tmp_path / "in" / "deep" / "file")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "link").symlink_to(tmp_path / "in", target_is_directory=True)
    out, given = OVERLAPS[case]
    with pytest.raises(InputError, match="which the command reads"):
        check_separate(tmp_path / out, [None, "fixed:4", tmp_path / "nowhere", tmp_path / given])


def test_relative_and_tilde_names_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("in", "./in", "~/in", str(tmp_path / "in")):
        with pytest.raises(InputError, match="which the command reads"):
            check_separate("in/new", [given])
    check_separate("inner", ["in"])
    check_separate(tmp_path / "beside", ["in", "fixed:4"])


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_working_folder_home_and_the_root_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    home, work = tmp_path / "home" / "me", tmp_path / "work" / "here"
    for folder in (home, work):
        folder.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    for out, what in (
        (".", "working folder"), ("", "working folder"), ("..", "working folder"), (work, "working folder"),
        (tmp_path / "work", "working folder"), ("/", "working folder"), (home, "home folder"), (home.parent, "home folder"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"is the {what}, or contains it"):
            prepare_output_dir(out, overwrite=overwrite)
    prepare_output_dir(home / "result", overwrite=overwrite)
    prepare_output_dir("result", overwrite=overwrite)


def test_a_mounted_disk_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path)
    with pytest.raises(InputError, match=r"is a mount point; name a folder in it, such as .*result"):
        prepare_output_dir(tmp_path)
    prepare_output_dir(tmp_path / "result")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/dev/null/x", "Not a directory"),
        ("/proc/x", "No such file or directory"),
        ("/proc/x/y", "No such file or directory"),
        ("x" * 256, "File name too long"),
        ("y/" + "x" * 256, "File name too long"),
        ("a\0b", "null byte"),
    ],
)
def test_a_name_that_nothing_can_have_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for claim in (
        prepare_output_dir,
        lambda out: prepare_output_file(out, b""),
    ):
        with pytest.raises(InputError, match=f"out: .* cannot be written: .*{reason}"):
            claim(name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    for claim in (
        prepare_output_dir,
        lambda out: prepare_output_file(out, b""),
    ):
        with pytest.raises(InputError, match="cannot be written: Read-only file system"):
            claim(tmp_path / "out")


def test_a_link_to_a_folder_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    make(tmp_path / "real" / "out")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    make(prepare_output_dir(tmp_path / "link", overwrite=True), text="new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "out" / "x").read_text() == "new"


def test_a_result_that_grows_beside_another_takes_its_place(tmp_path: Path) -> None:
    out = make(tmp_path / "out")
    stage = staging_path(out)
    stage.mkdir()
    (stage / "y").write_text("new")
    replace_folder(stage, out)
    assert names(tmp_path) == ["out", f"out/{MANIFEST}", "out/y"]


MARK = b"made by us"


def test_a_file_is_replaced_only_when_it_is_told_so_and_is_ours(tmp_path: Path) -> None:
    for name, text in (
        ("ours", "{made by us}"),
        ("theirs", "mine"),
        ("empty", ""),
        ("late", " " * 5000 + "made by us"),
    ):
        (tmp_path / name).write_text(text)
    assert prepare_output_file(tmp_path / "new", MARK) == tmp_path / "new"
    for name in ("ours", "empty"):
        with pytest.raises(InputError, match="exists; choose another name, or pass `overwrite` to replace it"):
            prepare_output_file(tmp_path / name, MARK)
        prepare_output_file(tmp_path / name, MARK, overwrite=True)
    for name in ("theirs", "late"):
        with pytest.raises(InputError, match="was not written by specstop"):
            prepare_output_file(tmp_path / name, MARK, overwrite=True)
    with pytest.raises(InputError, match=r"expected a file, but .* is a folder"):
        prepare_output_file(tmp_path, MARK, overwrite=True)
    with pytest.raises(InputError, match="which the command reads"):
        prepare_output_file(tmp_path / "ours", MARK, overwrite=True, inputs=[tmp_path / "ours"])
    with pytest.raises(InputError, match="not written by specstop"):
        prepare_output_file("/dev/null", MARK, overwrite=True)
