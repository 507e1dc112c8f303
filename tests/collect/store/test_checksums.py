"""Damage of a trace: it is noticed and named, and never read as other rows."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from random_trace import HEADER, chunk, write
from specstop.collect.schema import chain
from specstop.collect.store import SHARD_KEY, check_trace, load_trace, shard_path, write_shard
from specstop.policies.errors import TraceError


def _flip(raw: bytes) -> bytes:
    """Damage the first column's page, after the magic number and its page header."""
    return raw[:40] + bytes(255 - b for b in raw[40:80]) + raw[80:]


@pytest.mark.parametrize(
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
def test_a_damaged_shard_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write(tmp_path)
    path = shard_path(tmp_path, 1, 2)
    path.write_bytes(damage(path.read_bytes()))
    for read in (lambda folder: load_trace(folder).table(), check_trace):
        with pytest.raises(TraceError, match=f"shard .*{path.name} cannot be read: .*`resume`"):
            read(tmp_path)


def test_one_bit_anywhere_is_noticed_or_changes_no_value(tmp_path: Path) -> None:
    write(tmp_path)
    path = shard_path(tmp_path, 0, 2)
    raw, rows = path.read_bytes(), load_trace(tmp_path).table()
    noticed = 0
    for at in np.random.default_rng(5).integers(0, len(raw), 60):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        try:
            assert check_trace(tmp_path).table().equals(rows), "never other values"
        except TraceError:
            noticed += 1
    assert noticed > 20, "pages, the header and the schema"
    path.write_bytes(raw)
    assert check_trace(tmp_path).table().equals(rows)


def test_a_missing_shard_and_a_repeated_text_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    write_shard(tmp_path, HEADER, 0, [chunk(3, 0)], [("a", ""), ("b", "x")])
    write_shard(tmp_path, HEADER, 1, [chunk(2, 1)], [("b", "x")])
    with pytest.raises(TraceError, match=r"train-00001-of-00002\.parquet has 1 texts that an earlier one has too"):
        check_trace(tmp_path)
    write_shard(tmp_path, HEADER, 1, [chunk(2, 1)], [("b", "")])
    assert check_trace(tmp_path).row_count == 5
    shard_path(tmp_path, 0, 2).unlink()
    with pytest.raises(TraceError, match=r"not complete, 1 of its 2 shards are missing \(0\)"):
        check_trace(tmp_path)
    assert load_trace(tmp_path).row_count == 2


def test_a_shard_tells_its_texts_and_rows(tmp_path: Path) -> None:
    write(tmp_path)
    write_shard(tmp_path, HEADER, 1, [chunk(2, 1)], [("b", "x"), ("without rows", "")])
    metadata = json.loads(pq.read_schema(shard_path(tmp_path, 1, 2)).metadata[SHARD_KEY])
    assert metadata == {"rows": 2, "texts": [["b", "x"], ["without rows", ""]]}


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
        load_trace(tmp_path / "here")
