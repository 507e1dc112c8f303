"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from specstop.policies.errors import InputError
from specstop.policies.files import claim_folder, read_json, sha256, staged_folder, write_atomic, write_json


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_write_atomic_makes_parents_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    for data in ("first", b"second"):
        write_atomic(path, data)
    assert path.read_bytes() == b"second"
    assert names(path.parent) == ["b.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk full")

    write_atomic(tmp_path / "a", "old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path / "a", "new")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_json_comes_back_and_nan_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1, 0.1 + 0.2]})
    assert read_json(tmp_path / "a.json", "it") == {"x": [1, 0.1 + 0.2]}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", float("nan"))
    assert read_json(tmp_path / "a.json", "it") == {"x": [1, 0.1 + 0.2]}


def test_json_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\xff{")
    for path, message in (
        (tmp_path / "a", "which does not exist"),
        (tmp_path / "b", "cannot be read"),
        (tmp_path, "cannot be"),
    ):
        with pytest.raises(InputError, match=f"--it: .*{path.name}.*{message}"):
            read_json(path, "--it")


def test_a_staged_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with staged_folder(out) as stage:
        (stage / "x").write_text("1")
        (stage / "sub").mkdir()
        (stage / "sub" / "y").write_text("2")
        assert not out.exists()
    assert (out / "sub" / "y").read_text() == "2"
    assert names(out.parent) == ["out"]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_staged_folder_that_fails_leaves_what_was_there(
    tmp_path: Path, old: bool, error: type[BaseException]
) -> None:
    out = tmp_path / "out"
    if old:
        out.mkdir()
        (out / "x").write_text("old")
    with pytest.raises(error), staged_folder(out) as stage:
        (stage / "x").write_text("new")
        raise error
    assert names(tmp_path) == (["out"] if old else [])
    assert not old or (out / "x").read_text() == "old"


def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "x").write_text("old")
    replace = os.replace

    def fail(source: Path, to: Path) -> None:
        if Path(to) == out and not (Path(source) / "x").read_text() == "old":
            raise OSError("busy")
        replace(source, to)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="busy"), staged_folder(out) as stage:
        (stage / "x").write_text("new")
    assert names(tmp_path) == ["out"]
    assert (out / "x").read_text() == "old"


def test_a_new_folder_is_made_and_an_empty_one_taken(tmp_path: Path) -> None:
    for _ in range(2):
        assert claim_folder(tmp_path / "a" / "b").is_dir()


def test_a_folder_in_use_is_kept_emptied_or_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1")
    with pytest.raises(InputError, match=r"--out: the folder .* is not empty; choose another, or pass --overwrite"):
        claim_folder(tmp_path)
    claim_folder(tmp_path, resume=True)
    assert names(tmp_path) == ["x"]
    claim_folder(tmp_path, overwrite=True)
    assert names(tmp_path) == []


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True}])
def test_a_file_is_never_taken_for_a_folder(tmp_path: Path, flags: dict[str, bool]) -> None:
    (tmp_path / "x").write_text("1")
    with pytest.raises(InputError, match=r"--out: expected a folder, but .*x is a file"):
        claim_folder(tmp_path / "x", **flags)
    assert (tmp_path / "x").read_text() == "1"


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000
    (tmp_path / "x").write_bytes(data)
    assert sha256(tmp_path / "x") == hashlib.sha256(data).hexdigest()
