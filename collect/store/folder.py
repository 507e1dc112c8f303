"""The trace folder: Parquet shards that are there whole or not at all, a header, checksums and a data card.

    trace/header.json
    trace/README.md
    trace/prompts.jsonl                            what was read, as a chat template wrote it
    trace/data/train-00000-of-00008.parquet
    trace/checksums/train-00000-of-00008.sha256
    trace/index.json                               once every shard is there

`datasets.load_dataset` reads the folder as it is. Any number of processes may write into it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...policies.arguments import as_list
from ...policies.errors import InputError, TraceError
from ...policies.features.hidden_states import HIDDEN_STATES
from ...policies.files import MANIFEST, Input, is_empty_dir, prepare_output_dir, staging_path, write_manifest
from ..schema import Header, arrow_schema
from .card import CARD_FILE, data_card
from .checksums import (
    INDEX_FILE,
    Checked as Checked,
    check_shards as check_shards,
    checksum_path,
    damaged_text,
    finished as finished,
    record_checksum,
    shard_path as shard_path,
    write_index as write_index,
)
from .staging import full_disk_advice, put, staged, sweep
from .values import TEXT_COLUMNS, check_texts, check_values, column_array

if TYPE_CHECKING:
    import datasets

HEADER_FILE = "header.json"
PROMPTS_FILE = "prompts.jsonl"
"""The prompts of the run, with which --resume goes on (`collect.prompts.kept`)."""


def open_for_writing(
    folder: Path,
    header: Header,
    *,
    resume: bool = False,
    overwrite: bool = False,
    inputs: Iterable[Input] = (),
    prompts: str | None = None,
) -> Path:
    """Prepare a trace folder for the run that `header` describes; processes that come together find one header.

    Args:
        folder: of the trace.
        header: of the run.
        resume, overwrite: what to do with a folder that is not empty.
        inputs: what the run reads.
        prompts: contents of `PROMPTS_FILE`; None = the run keeps none.

    Returns:
        The folder to write into: beside one that is to be replaced, which stays as it is until the trace is complete.

    Raises:
        InputError: the folder is not empty and neither flag is given, or as `prepare_output_dir`.
        TraceError: `resume`, but the folder holds another run; or the disk is full.
    """
    folder = prepare_output_dir(folder, overwrite=overwrite, resume=resume, inputs=inputs)
    if overwrite:
        folder = _replacing(folder, resume)
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    path = folder / HEADER_FILE
    if not path.exists():
        # A hidden file may be the header that another process is about to put there.
        if not (is_empty_dir(folder) or os.listdir(folder) == [PROMPTS_FILE]) and not path.exists():
            raise InputError(f"--resume: expected a trace in {folder}, but it has no {HEADER_FILE}")
        with full_disk_advice(folder, "free some and run the same command again with --resume"):
            if prompts is not None:
                put(folder / PROMPTS_FILE, prompts, once=True)  # first: a run with a header has its prompts
            put(path, header.to_json() + "\n", once=True)
    # Whoever came first has written it; what this process would have written may differ in facts alone.
    present = read_header(folder)
    if names := header.differences(present):
        raise TraceError(
            f"--resume: {folder} holds a run with another {', '.join(names)}; "
            "give the same options as before, or choose another folder"
        )
    with full_disk_advice(folder, "free some and run the same command again with --resume"):
        put(folder / CARD_FILE, data_card(present), once=True)
        if not (folder / MANIFEST).exists():
            write_manifest(folder, _names(present))
    for shard in (shard_path(folder, 0, present.shards), checksum_path(shard_path(folder, 0, present.shards))):
        shard.parent.mkdir(exist_ok=True)
        sweep(shard.parent)
    return folder


def _replacing(folder: Path, resume: bool) -> Path:
    """Return where a run that overwrites `folder` writes: there if it is empty, or holds the run that is to be resumed."""
    stage = staging_path(folder)
    if stage.exists() and not resume:
        shutil.rmtree(stage)  # of a run that was stopped, and now begins anew
    return stage if stage.exists() or not (resume or is_empty_dir(folder)) else folder


def _names(header: Header) -> Iterator[str]:
    """Yield the names of all files of a trace, as they are below its folder."""
    yield from (HEADER_FILE, CARD_FILE, INDEX_FILE, PROMPTS_FILE)
    for index in range(header.shards):
        shard = shard_path(Path(), index, header.shards)
        yield from (shard.as_posix(), checksum_path(shard).as_posix())


def read_header(folder: Path) -> Header:
    """Read a trace's header; `TraceError` where there is none or it is of another version."""
    path = folder / HEADER_FILE
    if not path.is_file():
        raise TraceError(f"traces: expected a trace folder, but {folder} has no {HEADER_FILE}")
    return Header.from_json(path.read_bytes(), str(path))


def shard_table(header: Header, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return column chunks (each maps every column name to equally many values) as the table of a shard."""
    schema = arrow_schema(header)
    tables = [
        pa.table({name: _column(chunk[name], schema.field(name).type) for name in schema.names}, schema=schema)
        for chunk in rows
    ]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def write_table(table: pa.Table, where: Any) -> None:
    """Write a shard's table to a path or a buffer: the one place that chooses how a shard is encoded."""
    # Parquet knows a list column by the path of its values.
    leaf = {f.name: f"{f.name}.list.element" if pa.types.is_fixed_size_list(f.type) else f.name for f in table.schema}
    hidden = [leaf[name] for name in leaf if name in HIDDEN_STATES]
    if not hidden:
        pq.write_table(table, where, compression="zstd")
        return
    # Numbers of two bytes that seldom repeat: their high bytes are much alike, which a dictionary would hide.
    plain = [path for path in leaf.values() if path not in hidden]
    split = dict.fromkeys(hidden, "BYTE_STREAM_SPLIT")
    pq.write_table(table, where, compression="zstd", use_dictionary=plain, column_encoding=split)


def write_shard(folder: Path, header: Header, index: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one shard: under a temporary name, fsynced, its checksum written down, renamed.

    Args:
        folder: of the trace.
        header: of the trace.
        index: of the shard.
        rows: column chunks, as of `shard_table`.

    Raises:
        TraceError: the disk is full.
    """
    write_shard_table(folder, header, index, shard_table(header, rows))


def write_shard_table(folder: Path, header: Header, index: int, table: pa.Table) -> None:
    """Write one shard whose table is made already; see `write_shard`."""
    path = shard_path(folder, index, header.shards)
    with full_disk_advice(folder, _way_on(folder, header)), staged(path) as stage:
        write_table(table, stage)
        # The checksum comes before the name: a shard without one passes for an older specstop's, whose bytes nobody compares.
        record_checksum(stage, path)


def _way_on(folder: Path, header: Header) -> str:
    have = [shard_path(folder, i, header.shards) for i in finished(folder, header)]
    missing = header.shards - len(have)
    size = sum(path.stat().st_size for path in have) / max(1, len(have)) * missing
    need = f"about {max(1, round(size / 1e6))} MB" if have else "some"
    return (
        f"{len(have)} of {header.shards} shards are finished and stay; free {need} and run the same command again "
        "with --resume"
    )


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    """Return values (a list, or an array [rows] or [rows, N]) as an arrow column."""
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), kind.value_type), type=kind)
    return pa.array(values, kind)


class Trace:
    """A trace on disk: its header, and its rows in shard order, read when they are asked for.

    Args:
        folder: of the trace.
        header: of the trace.
        rows: in the place of those on disk, for instance a part of them.
    """

    def __init__(self, folder: Path, header: Header, rows: datasets.Dataset | None = None) -> None:
        self.folder, self.header = folder, header
        if rows is not None:
            self.rows = rows

    @cached_property
    def rows(self) -> datasets.Dataset:
        """All rows in memory."""
        import datasets  # brings pandas, which replay has no use for

        # Without a fingerprint the whole table would be pickled for one, and rows in memory leave no files to be found again.
        return datasets.Dataset(datasets.table.InMemoryTable(self.table()), fingerprint=secrets.token_hex(8))

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return only these columns of all rows, so that a large trace need not fit into memory whole."""
        # Given, or read before: the cached property keeps them in the same place.
        if "rows" in vars(self):
            chosen = self.rows if columns is None else self.rows.select_columns(as_list(columns))
            return chosen.with_format("arrow")[:]
        tables = list(self.shards(columns))
        return pa.concat_tables(tables) if tables else arrow_schema(self.header).empty_table()

    def shards(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the table of each finished shard, one at a time, with these columns or all."""
        names = None if columns is None else as_list(columns)
        return self._read(lambda path: iter([pq.read_table(path, columns=names, memory_map=True)]))

    def batches(self, names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield these columns in order, at most so many rows at a time: for those that are too wide to be read whole."""
        if "rows" in vars(self):
            return iter(pa.table({name: self._as_arrow[name][:] for name in names}).to_batches(rows))

        def batches_of(path: Path) -> Iterator[pa.RecordBatch]:
            with pq.ParquetFile(path, memory_map=True) as file:
                yield from file.iter_batches(rows, columns=list(names))

        return self._read(batches_of)

    def _read(self, read: Callable[[Path], Iterator[Any]]) -> Iterator[Any]:
        """Yield what is read of each finished shard, its values checked; one that cannot be read is named."""
        for index in sorted(self.finished):
            path = shard_path(self.folder, index, self.header.shards)
            try:
                for rows in read(path):
                    check_values(self.header, rows, str(path))
                    yield rows
            except (OSError, pa.ArrowInvalid) as error:
                what = str(error).splitlines()[0]
                raise TraceError(damaged_text(self.folder, self.header, index, what)) from None

    @cached_property
    def _as_arrow(self) -> datasets.Dataset:
        """The rows in memory, of which a column is read without a copy: to choose another format takes a millisecond."""
        return self.rows.with_format("arrow")

    @property
    def row_count(self) -> int:
        """Number of rows of the shards that are there; no row is read for it."""
        if "rows" in vars(self):
            return len(self.rows)
        paths = [shard_path(self.folder, index, self.header.shards) for index in self.finished]
        return sum(int(pq.read_metadata(path).num_rows) for path in paths)

    @property
    def finished(self) -> set[int]:
        """The indices of the shards that are there."""
        return finished(self.folder, self.header)

    @property
    def complete(self) -> bool:
        """Whether every shard is there."""
        return len(self.finished) == self.header.shards


def open_trace(folder: str | Path) -> Trace:
    """Open a trace folder for reading: header, checksums, and the columns that make texts of rows are validated.

    Bounds of the other columns are checked as they are read (`check_values`): to read all twice would take as long as replay.

    Raises:
        TraceError: no trace, another schema, no finished shard with rows, a damaged shard, or values that no run records.
    """
    folder = Path(folder)
    header = read_header(folder)
    check_shards(folder, header)
    trace = Trace(folder, header)
    if not trace.row_count:
        raise TraceError(f"traces: {folder} has no finished shard with rows; run collect with --resume")
    _check_columns(trace)
    return trace


def _check_columns(trace: Trace) -> None:
    rows = trace.table(TEXT_COLUMNS)
    columns = {name: column_array(rows[name]) for name in TEXT_COLUMNS}
    check_texts(trace.header, columns, str(trace.folder))


def merge(folder: str | Path, *, repair: bool = False) -> Checked:
    """Check that all shards of a trace are there and whole, and write its index.

    Args:
        folder: of the trace.
        repair: move damaged shards into `quarantine/`, where they can be looked at; collecting again makes them good.

    Raises:
        TraceError: no trace, another schema, or a damaged shard and no `repair`.
    """
    folder = Path(folder)
    header = read_header(folder)
    moved = check_shards(folder, header, repair=repair)
    have = finished(folder, header)
    missing = tuple(index for index in range(header.shards) if index not in have)
    with full_disk_advice(folder, "free some and merge again"):
        rows = 0 if missing else write_index(folder, header)
    return Checked(rows, missing, moved)
