"""Header, shards and the folder: what is written is what is read, and nothing half-written is ever read."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from specstop.collect.checksums import checksum_path
from specstop.collect.schema import SCHEMA_VERSION, Header, arrow_schema, chain
from specstop.collect.staging import put, stage_of
from specstop.collect.store import (
    Checked,
    Trace,
    finished,
    merge,
    open_for_writing,
    open_trace,
    read_header,
    shard_path,
    write_shard,
    write_table,
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


def card_header(folder: Path) -> Any:
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


@pytest.mark.parametrize("streaming", [False, True])
def test_load_dataset_reads_the_folder_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    chunks = write(tmp_path / "t")
    merge(tmp_path / "t")
    (tmp_path / "t" / "run.yaml").write_text("depth: 3\n")
    loaded = datasets.load_dataset(str(tmp_path / "t"), streaming=streaming)
    assert list(loaded) == ["train"]
    rows = list(loaded["train"])
    assert list(rows[0]) == arrow_schema(HEADER).names
    np.testing.assert_array_equal([r["tokens"] for r in rows], np.concatenate([c["tokens"] for c in chunks]))


def test_a_damaged_shard_that_was_moved_aside_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "t")
    path = shard_path(tmp_path / "t", 0, 2)
    path.write_bytes(path.read_bytes() + b" ")
    merge(tmp_path / "t", repair=True)
    assert len(datasets.load_dataset(str(tmp_path / "t"), split="train")) == 2


def test_the_data_card_says_what_the_trace_is_of(tmp_path: Path) -> None:
    header = dataclasses.replace(
        HEADER, target="org/big", draft="org/small|x", facts={"prompts from": "hf:openai/gsm8k:main, split test"}
    )
    open_for_writing(tmp_path, header)
    assert card_header(tmp_path)["configs"][0]["data_files"] == [{"split": "train", "path": "data/train-*.parquet"}]
    text = (tmp_path / "README.md").read_text()
    expected = {"target": "org/big", "drafter": r"org/small\|x", "temperature": "0.7", "depth": "3",
                "schema version": str(header.schema), "prompts from": "hf:openai/gsm8k:main, split test"}  # fmt: skip
    for name, value in expected.items():
        assert f"| {name} | {value} |" in text


def test_a_shard_without_rows_is_finished_and_adds_none(tmp_path: Path) -> None:
    open_for_writing(tmp_path, HEADER)
    write_shard(tmp_path, HEADER, 0, [])
    with pytest.raises(TraceError, match="no finished shard with rows"):
        open_trace(tmp_path)
    write_shard(tmp_path, HEADER, 1, [chunk(2, 0)])
    assert len(open_trace(tmp_path).rows) == 2
    assert finished(tmp_path, HEADER) == {0, 1}


def dead_writer() -> int:
    """Return the id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_what_a_killed_writer_leaves_is_ignored_and_removed(tmp_path: Path) -> None:
    write(tmp_path)
    own = stage_of(shard_path(tmp_path, 1, 2))
    left = own.with_name(f"{own.name.rpartition('.')[0]}.{dead_writer()}")
    left.write_bytes(b"half")
    assert len(open_trace(tmp_path).rows) == 9
    open_for_writing(tmp_path, HEADER, resume=True)
    assert not left.exists()


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path)
    own = stage_of(shard_path(tmp_path, 1, 2))
    stem = own.name.rpartition(".")[0]
    here = own.with_name(f"{stem}.{os.getppid()}")
    elsewhere = own.with_name(f"{STAGE_PREFIX}{shard_path(tmp_path, 1, 2).name}.elsewhere.1")
    old = own.with_name(f"{STAGE_PREFIX}{shard_path(tmp_path, 0, 2).name}.elsewhere.1")
    for path in (here, elsewhere, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    open_for_writing(tmp_path, HEADER, resume=True)
    assert (here.exists(), elsewhere.exists(), old.exists()) == (True, True, False)


def test_a_writer_killed_before_its_header_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / f"{STAGE_PREFIX}header.json.elsewhere.7").write_text("half a header")
    open_for_writing(tmp_path, HEADER, resume=True)
    assert read_header(tmp_path) == HEADER


def test_the_first_header_stays_and_the_others_agree_with_it(tmp_path: Path) -> None:
    second = dataclasses.replace(HEADER, facts={"device": "another"})
    for header in (HEADER, second):
        open_for_writing(tmp_path, header, resume=True)
    assert read_header(tmp_path) == HEADER
    with pytest.raises(TraceError, match="another seed"):
        open_for_writing(tmp_path, dataclasses.replace(HEADER, seed=99), resume=True)


@pytest.mark.parametrize("links", [True, False])
def test_of_two_that_put_a_file_at_once_the_first_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    put(tmp_path / "file", "first", once=True)
    put(tmp_path / "file", "second", once=True)
    assert (tmp_path / "file").read_text() == "first"
    put(tmp_path / "file", "third")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "third")]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_failed_write_leaves_no_shard_and_a_full_disk_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def half(table: pa.Table, path: Path, **options: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(number, "as it happens")

    open_for_writing(tmp_path, HEADER)
    write_shard(tmp_path, HEADER, 1, [chunk(3, 0)])
    before = {str(p) for p in tmp_path.rglob("*")}
    monkeypatch.setattr(pq, "write_table", half)
    expected, message = (
        (TraceError, r"no space is left .* 1 of 2 shards are finished and stay; free about 1 MB .* --resume")
        if number == errno.ENOSPC
        else (OSError, "as it happens")
    )
    with pytest.raises(expected, match=message):
        write_shard(tmp_path, HEADER, 0, [chunk(3, 0)])
    assert {str(p) for p in tmp_path.rglob("*")} == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_known_by_its_error_number() -> None:
    # Opened here, because pyarrow removes a path that it could not write: as root, the device itself.
    with pa.OSFile("/dev/full", "wb") as file, pytest.raises(OSError, match="space") as caught:
        write_table(arrow_schema(HEADER).empty_table(), file)
    assert caught.value.errno == errno.ENOSPC


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


def test_a_part_of_the_columns_can_be_read_shard_by_shard(tmp_path: Path) -> None:
    chunks = write(tmp_path)
    trace = open_trace(tmp_path)
    assert trace.row_count == 9
    assert [t.num_rows for t in trace.shards(["anchor"])] == [7, 2]
    table = trace.table(["anchor", "cut"])
    assert table.column_names == ["anchor", "cut"]
    np.testing.assert_array_equal(table["anchor"].to_numpy(), np.concatenate([c["anchor"] for c in chunks]))
    part = Trace(trace.folder, trace.header, trace.rows.select(range(3)))
    assert (part.row_count, part.table(["anchor"]).num_rows, part.table().num_rows) == (3, 3, 3)


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
