"""Header, shards and the folder: what is written is what is read, and nothing half-written is ever read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from specstop.collect.schema import SCHEMA_VERSION, Header, arrow_schema, chain
from specstop.collect.store import (
    Trace,
    finished,
    open_for_writing,
    open_trace,
    read_header,
    shard_path,
    write_shard,
)
from specstop.policies.errors import InputError, TraceError
from specstop.policies.files import STAGE_PREFIX

HEADER = Header(
    target="t",
    draft="d",
    pair={"target": "ab", "draft": "cd"},
    vocabulary=48,
    eos=(16, 2),
    temperature=0.7,
    topology=chain(3),
    features=("top1", "entropy"),
    anchor_features=("anchor_top1",),
    max_new_tokens=9,
    seed=4,
    shards=2,
    prompts=5,
    prompts_hash="ef",
    facts={"device": "cpu"},
)


def chunk(rows: int, seed: int, header: Header = HEADER) -> dict[str, Any]:
    """Return random columns of the types that the schema asks for."""
    generator = np.random.default_rng(seed)

    def column(kind: pa.DataType, shape: tuple[int, ...]) -> Any:
        if pa.types.is_fixed_size_list(kind):
            return column(kind.value_type, (*shape, kind.list_size))
        if pa.types.is_string(kind):
            return [f"row {i} of {seed}" for i in range(shape[0])]
        if pa.types.is_boolean(kind):
            return generator.random(shape) < 0.5
        if pa.types.is_integer(kind):
            return generator.integers(0, 48, shape).astype(np.int32)
        return generator.random(shape).astype(np.float32)

    return {field.name: column(field.type, (rows,)) for field in arrow_schema(header)}


def write(folder: Path, header: Header = HEADER) -> list[dict[str, Any]]:
    """Write a trace of two shards with 3 + 4 and 2 rows, and return its chunks in order."""
    chunks = [chunk(3, 0, header), chunk(4, 1, header), chunk(2, 2, header)]
    open_for_writing(folder, header)
    write_shard(folder, header, 0, chunks[:2])
    write_shard(folder, header, 1, chunks[2:])
    return chunks


def test_a_header_comes_back_from_json_as_it_was() -> None:
    assert Header.from_json(HEADER.to_json(), "x") == HEADER


def test_the_depth_of_a_topology_is_that_of_its_deepest_node() -> None:
    assert chain(4) == (-1, 0, 1, 2)
    for topology, depth in ((chain(4), 4), ((-1, -1, 0, 1, 3), 3), ((), 0)):
        assert dataclasses.replace(HEADER, topology=topology).depth == depth


def test_another_schema_version_is_refused() -> None:
    text = json.dumps({**json.loads(HEADER.to_json()), "schema": SCHEMA_VERSION + 1})
    with pytest.raises(TraceError, match=f"here: the trace has schema {SCHEMA_VERSION + 1}, but this specstop reads"):
        Header.from_json(text, "here")


@pytest.mark.parametrize("name", ["target", "eos", "seed", "features", "pair"])
def test_a_header_without_one_of_its_fields_is_refused(name: str) -> None:
    raw = json.loads(HEADER.to_json())
    del raw[name]
    with pytest.raises(TraceError, match=f"here: .*{name}"):
        Header.from_json(json.dumps(raw), "here")


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", b"\xff\xfe", json.dumps({**json.loads(HEADER.to_json()), "colour": 1}),
             json.dumps({**json.loads(HEADER.to_json()), "eos": 5})],
    ids=["broken", "list", "number", "bytes", "unknown field", "mangled field"],
)  # fmt: skip
def test_what_is_no_header_is_refused(text: str | bytes) -> None:
    with pytest.raises(TraceError, match="here"):
        Header.from_json(text, "here")


def test_rows_come_back_as_they_were_written_in_shard_order(tmp_path: Path) -> None:
    chunks = write(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    assert trace.header == HEADER
    assert trace.complete
    rows = trace.rows.with_format("numpy")
    for name in arrow_schema(HEADER).names:
        np.testing.assert_array_equal(rows[name][:], np.concatenate([np.asarray(c[name]) for c in chunks]))


def test_every_shard_carries_the_header(tmp_path: Path) -> None:
    write(tmp_path)
    for index in range(2):
        metadata = pq.read_schema(shard_path(tmp_path, index, 2)).metadata
        assert Header.from_json(metadata[b"specstop"], "shard") == HEADER


def test_load_dataset_reads_the_folder(tmp_path: Path) -> None:
    chunks = write(tmp_path / "t")
    loaded = datasets.load_dataset(str(tmp_path / "t"), cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded.column_names == arrow_schema(HEADER).names
    np.testing.assert_array_equal(
        loaded.with_format("numpy")["tokens"][:], np.concatenate([c["tokens"] for c in chunks])
    )


def test_a_shard_without_rows_is_finished_and_adds_none(tmp_path: Path) -> None:
    open_for_writing(tmp_path, HEADER)
    write_shard(tmp_path, HEADER, 0, [])
    with pytest.raises(TraceError, match="no finished shard with rows"):
        open_trace(tmp_path)
    write_shard(tmp_path, HEADER, 1, [chunk(2, 0)])
    assert len(open_trace(tmp_path).rows) == 2
    assert finished(tmp_path, HEADER) == {0, 1}


def test_a_killed_writer_leaves_a_file_that_is_ignored_and_removed(tmp_path: Path) -> None:
    write(tmp_path)
    left = tmp_path / "data" / f"{STAGE_PREFIX}train-00001-of-00002.parquet.77"
    left.write_bytes(b"half")
    assert len(open_trace(tmp_path).rows) == 9
    open_for_writing(tmp_path, HEADER, resume=True)
    assert not left.exists()


def test_a_writer_killed_before_its_header_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / f"{STAGE_PREFIX}abc").write_text("half a header")
    open_for_writing(tmp_path, HEADER, resume=True)
    assert read_header(tmp_path) == HEADER
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["header.json"]


def test_a_failed_write_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(table: pa.Table, path: Path, **options: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    open_for_writing(tmp_path, HEADER)
    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(OSError, match="disk full"):
        write_shard(tmp_path, HEADER, 0, [chunk(3, 0)])
    assert finished(tmp_path, HEADER) == set()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"seed": 5}, "seed"),
        ({"topology": chain(4)}, "topology"),
        ({"max_new_tokens": 10, "shards": 3}, "max_new_tokens, shards"),
        ({"prompts_hash": "00"}, "prompts_hash"),
        ({"pair": {"target": "xx", "draft": "cd"}}, "pair"),
    ],
)
def test_resuming_another_run_is_refused_and_says_what_differs(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    write(tmp_path)
    before = (tmp_path / "header.json").read_bytes()
    with pytest.raises(TraceError, match=f"--resume: .* another {named};"):
        open_for_writing(tmp_path, dataclasses.replace(HEADER, **changes), resume=True)
    assert (tmp_path / "header.json").read_bytes() == before


def test_resuming_on_another_machine_is_fine(tmp_path: Path) -> None:
    write(tmp_path)
    open_for_writing(tmp_path, dataclasses.replace(HEADER, facts={"device": "another"}), resume=True)


def test_a_folder_with_something_in_it_is_refused_unless_told(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match="not empty; choose another, or pass --overwrite"):
        open_for_writing(tmp_path, HEADER)
    assert len(finished(tmp_path, HEADER)) == 2
    open_for_writing(tmp_path, HEADER, overwrite=True)
    assert finished(tmp_path, HEADER) == set()


def test_resume_does_not_write_among_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"it has no header\.json"):
        open_for_writing(tmp_path, HEADER, resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def _flip(raw: bytes) -> bytes:
    """Damage the first column's page, behind the magic number and its page header."""
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
    with pytest.raises(TraceError, match=f"shard .*{path.name} cannot be read"):
        open_trace(tmp_path)


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


def test_a_folder_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has no header\.json"):
        open_trace(tmp_path)
    with pytest.raises(TraceError, match=r"has no header\.json"):
        open_trace(tmp_path / "nowhere")


def test_an_unfinished_trace_opens_and_says_so(tmp_path: Path) -> None:
    write(tmp_path)
    shard_path(tmp_path, 0, 2).unlink()
    trace: Trace = open_trace(tmp_path)
    assert not trace.complete
    assert len(trace.rows) == 2
