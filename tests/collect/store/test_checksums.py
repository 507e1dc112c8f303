"""Checksums: every damage is noticed and named, moved aside where asked, and a complete trace is indexed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from random_trace import HEADER, chunk, write
from specstop.collect.schema import chain
from specstop.collect.store import (
    Checked,
    checksum_path,
    finished,
    merge,
    open_trace,
    shard_path,
    write_shard,
)
from specstop.policies.errors import TraceError


def test_a_damaged_shard_that_was_moved_aside_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "t")
    path = shard_path(tmp_path / "t", 0, 2)
    path.write_bytes(path.read_bytes() + b" ")
    merge(tmp_path / "t", repair=True)
    assert len(datasets.load_dataset(str(tmp_path / "t"), split="train")) == 2


def _flip(raw: bytes) -> bytes:
    """Damage the first column's page, after the magic number and its page header."""
    return raw[:40] + bytes(255 - b for b in raw[40:80]) + raw[80:]


DAMAGES = pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-20],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"\0" * len(raw),
        _flip,
    ],
    ids=["empty", "shortened", "half", "zeros", "flipped"],
)


@DAMAGES
@pytest.mark.parametrize("recorded", [True, False], ids=["with checksum", "without"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], recorded: bool) -> None:
    write(tmp_path)
    path = shard_path(tmp_path, 1, 2)
    path.write_bytes(damage(path.read_bytes()))
    if not recorded:
        checksum_path(path).unlink()
    for reader in (open_trace, merge):
        with pytest.raises(TraceError, match=f"shard .*{path.name} cannot be read: .*merge --repair") as caught:
            reader(tmp_path)
        assert ("SHA-256" in str(caught.value)) == recorded


def test_one_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    write(tmp_path)
    path = shard_path(tmp_path, 0, 2)
    raw = path.read_bytes()
    for at in np.random.default_rng(5).integers(0, len(raw), 20):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(TraceError, match="its SHA-256 is not the recorded one"):
            open_trace(tmp_path)
    path.write_bytes(raw)
    assert len(open_trace(tmp_path).rows) == 9


def test_a_mangled_checksum_is_a_damaged_shard(tmp_path: Path) -> None:
    write(tmp_path)
    for content in (b"", b"\xff", b"0"):
        checksum_path(shard_path(tmp_path, 0, 2)).write_bytes(content)
        with pytest.raises(TraceError, match="cannot be read"):
            open_trace(tmp_path)


def test_repair_moves_a_damaged_shard_aside_and_keeps_it(tmp_path: Path) -> None:
    write(tmp_path)
    assert merge(tmp_path).missing == ()
    path = shard_path(tmp_path, 1, 2)
    for turn in range(2):
        path.write_bytes(b"damage %d" % turn)
        checked = merge(tmp_path, repair=True)
        assert checked.missing == (1,)
        assert [p.read_bytes() for p in checked.moved] == [b"damage %d" % turn]
        assert finished(tmp_path, HEADER) == {0}
        assert not (tmp_path / "index.json").exists(), "an index tells of complete traces only"
        write_shard(tmp_path, HEADER, 1, [chunk(2, 2)])
    assert len(list((tmp_path / "quarantine").glob("*.parquet.?"))) == 2
    assert merge(tmp_path).rows == 9


def test_what_was_moved_aside_before_stays(tmp_path: Path) -> None:
    write(tmp_path)
    aside = tmp_path / "quarantine"
    for turn in range(3):
        shard_path(tmp_path, 1, 2).write_bytes(b"damage %d" % turn)
        merge(tmp_path, repair=True)
        write_shard(tmp_path, HEADER, 1, [chunk(2, 2)])
        if turn == 1:  # somebody tidies up
            (aside / "train-00001-of-00002.parquet.0").unlink()
    assert sorted(path.read_bytes() for path in aside.glob("*.parquet.?")) == [b"damage 1", b"damage 2"]


def test_repair_leaves_good_shards_alone(tmp_path: Path) -> None:
    write(tmp_path)
    assert merge(tmp_path, repair=True) == Checked(9, (), ())
    assert not (tmp_path / "quarantine").exists()


def test_the_index_lists_every_shard_with_its_checksum(tmp_path: Path) -> None:
    write(tmp_path)
    assert merge(tmp_path) == Checked(9, (), ())
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["rows"] == 9
    assert [(tmp_path / s["file"], s["rows"]) for s in index["shards"]] == [
        (shard_path(tmp_path, 0, 2), 7), (shard_path(tmp_path, 1, 2), 2)
    ]  # fmt: skip
    for shard in index["shards"]:
        raw = (tmp_path / shard["file"]).read_bytes()
        assert (shard["bytes"], shard["sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())


def test_merge_names_what_is_missing_and_writes_no_index(tmp_path: Path) -> None:
    write(tmp_path)
    shard_path(tmp_path, 0, 2).unlink()
    assert merge(tmp_path) == Checked(0, (0,), ())
    assert not (tmp_path / "index.json").exists()


def test_merge_gives_a_checksum_to_shards_that_have_none(tmp_path: Path) -> None:
    write(tmp_path)
    shutil.rmtree(tmp_path / "checksums")
    merge(tmp_path)
    assert {p.name for p in (tmp_path / "checksums").iterdir()} == {
        "train-00000-of-00002.sha256", "train-00001-of-00002.sha256"
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"features": ("top1",)}, {"topology": chain(5)}, {"seed": 99}],
    ids=["columns", "depth", "seed"],
)
def test_a_shard_of_another_run_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path / "here")
    write(tmp_path / "there", dataclasses.replace(HEADER, **changes))
    shutil.copy(shard_path(tmp_path / "there", 1, 2), shard_path(tmp_path / "here", 1, 2))
    with pytest.raises(TraceError, match=r"train-00001-of-00002\.parquet"):
        open_trace(tmp_path / "here")
