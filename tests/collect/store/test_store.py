"""Header, shards and the folder: what is written is what is read, and nothing half-written is ever read."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from random_trace import HEADER, chunk, write
from specstop.collect.schema import Header, arrow_schema, chain
from specstop.collect.store import (
    Trace,
    finished,
    load_trace,
    open_for_writing,
    read_header,
    shard_path,
    staged,
    write_once,
    write_shard,
    write_table,
)
from specstop.policies.errors import InputError, TraceError
from specstop.policies.files import STAGE_PREFIX


def test_rows_come_back_as_they_were_written_in_shard_order(tmp_path: Path) -> None:
    chunks = write(tmp_path / "t")
    trace = load_trace(tmp_path / "t")
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
    (tmp_path / "t" / "run.yaml").write_text("depth: 3\n")
    loaded = datasets.load_dataset(str(tmp_path / "t"), streaming=streaming)
    assert list(loaded) == ["train"]
    rows = list(loaded["train"])
    assert list(rows[0]) == arrow_schema(HEADER).names
    np.testing.assert_array_equal([r["tokens"] for r in rows], np.concatenate([c["tokens"] for c in chunks]))


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
        load_trace(tmp_path)
    write_shard(tmp_path, HEADER, 1, [chunk(2, 0)])
    assert len(load_trace(tmp_path).rows) == 2
    assert finished(tmp_path, HEADER) == {0, 1}


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


def test_of_two_processes_that_write_a_file_the_first_wins(tmp_path: Path) -> None:
    write_once(tmp_path / "file", "first")
    with staged(tmp_path / "file", keep=True) as stage:
        stage.write_text("second")
    write_once(tmp_path / "file", "third")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "first")]


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
        (TraceError, r"no space is left .* its 1 finished shards stay: free some space .* `resume`")
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
    with pytest.raises(TraceError, match=f"resume: .* another {named};"):
        open_for_writing(tmp_path, dataclasses.replace(HEADER, **changes), resume=True)
    assert (tmp_path / "header.json").read_bytes() == before


def test_resuming_on_another_machine_is_fine(tmp_path: Path) -> None:
    write(tmp_path)
    open_for_writing(tmp_path, dataclasses.replace(HEADER, facts={"device": "another"}), resume=True)


def test_a_folder_with_something_in_it_is_refused_unless_told(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match="not empty; choose another, or pass `overwrite`"):
        open_for_writing(tmp_path, HEADER)
    assert len(finished(tmp_path, HEADER)) == 2
    new = open_for_writing(tmp_path, HEADER, overwrite=True)
    assert (finished(new, HEADER), len(finished(tmp_path, HEADER))) == (set(), 2), "the old one stays until then"


def test_resume_does_not_write_among_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"it has no header\.json"):
        open_for_writing(tmp_path, HEADER, resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_part_of_the_columns_can_be_read_shard_by_shard(tmp_path: Path) -> None:
    chunks = write(tmp_path)
    trace = load_trace(tmp_path)
    assert trace.row_count == 9
    assert [t.num_rows for t in trace.shards(["anchor"])] == [7, 2]
    table = trace.table(["anchor", "cut"])
    assert table.column_names == ["anchor", "cut"]
    np.testing.assert_array_equal(table["anchor"].to_numpy(), np.concatenate([c["anchor"] for c in chunks]))
    part = Trace(trace.folder, trace.header, trace.rows.select(range(3)))
    assert (part.row_count, part.table(["anchor"]).num_rows, part.table().num_rows) == (3, 3, 3)


def test_a_folder_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has no header\.json"):
        load_trace(tmp_path)
    with pytest.raises(TraceError, match=r"has no header\.json"):
        load_trace(tmp_path / "nowhere")


def test_an_unfinished_trace_opens_and_says_so(tmp_path: Path) -> None:
    write(tmp_path)
    shard_path(tmp_path, 0, 2).unlink()
    trace: Trace = load_trace(tmp_path)
    assert not trace.complete
    assert len(trace.rows) == 2
