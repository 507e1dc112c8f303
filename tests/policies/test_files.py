"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from specstop.policies.errors import InputError
from specstop.policies.files import read_json, write_atomic, write_json


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
    (tmp_path / "c").write_text('{"outer": {"key": 1, "other": 2, "key": 1}}')
    for path, message in (
        (tmp_path / "a", "which does not exist"),
        (tmp_path / "b", "cannot be read"),
        (tmp_path / "c", "'key' occurs twice"),
        (tmp_path, "cannot be"),
    ):
        with pytest.raises(InputError, match=f"it: .*{path.name}.*{message}"):
            read_json(path, "--it")
