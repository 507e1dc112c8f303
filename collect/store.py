"""The trace folder: Parquet shards that are there whole or not at all, and a header.

    trace/header.json
    trace/data/train-00000-of-00008.parquet

`datasets.load_dataset` reads the folder as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from ..policies.errors import InputError, TraceError
from ..policies.files import STAGE_PREFIX, claim_folder, write_atomic
from .schema import HEADER_KEY, Header, arrow_schema

HEADER_FILE = "header.json"


def shard_path(folder: Path, index: int, count: int) -> Path:
    """Return where shard `index` of `count` lies."""
    return folder / "data" / f"train-{index:05d}-of-{count:05d}.parquet"


def open_for_writing(folder: Path, header: Header, *, resume: bool = False, overwrite: bool = False) -> Path:
    """Prepare a trace folder for the run that `header` describes.

    Raises:
        InputError: the folder is not empty and neither flag is given.
        TraceError: `resume`, but the folder holds another run.
    """
    for place in (folder, folder / "data"):
        for left in place.glob(f"{STAGE_PREFIX}*"):  # of a run that was killed
            left.unlink()
    folder = claim_folder(folder, overwrite=overwrite, resume=resume)
    path = folder / HEADER_FILE
    if path.exists():
        present = read_header(folder)
        if not present.same_run(header):
            mine, other = vars(header), vars(present)
            names = [key for key in mine if key != "facts" and mine[key] != other[key]]
            raise TraceError(
                f"--resume: {folder} holds a run with another {', '.join(names)}; "
                "give the same options as before, or choose another folder"
            )
    elif any(folder.iterdir()):
        raise InputError(f"--resume: expected a trace in {folder}, but it has no {HEADER_FILE}")
    else:
        write_atomic(path, header.to_json() + "\n")
    return folder


def read_header(folder: Path) -> Header:
    """Read a trace's header; `TraceError` where there is none or it is of another version."""
    path = folder / HEADER_FILE
    if not path.is_file():
        raise TraceError(f"--traces: expected a trace folder, but {folder} has no {HEADER_FILE}")
    return Header.from_json(path.read_bytes(), str(path))


def finished(folder: Path, header: Header) -> set[int]:
    """Return the indices of the shards that are there."""
    return {i for i in range(header.shards) if shard_path(folder, i, header.shards).is_file()}


def write_shard(folder: Path, header: Header, index: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one shard: under a temporary name, fsynced, renamed.

    Args:
        folder: of the trace.
        header: of the trace.
        index: of the shard.
        rows: column chunks: each maps every column name to equally many values.
    """
    schema = arrow_schema(header)
    tables = [
        pa.table({name: _column(chunk[name], schema.field(name).type) for name in schema.names}, schema=schema)
        for chunk in rows
    ]
    path = shard_path(folder, index, header.shards)
    path.parent.mkdir(exist_ok=True)
    stage = path.with_name(f"{STAGE_PREFIX}{path.name}.{os.getpid()}")
    pq.write_table(pa.concat_tables(tables) if tables else schema.empty_table(), stage, compression="zstd")
    descriptor = os.open(stage, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(stage, path)


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    """Return values (a list, or an array [rows] or [rows, N]) as an arrow column."""
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), kind.value_type), type=kind)
    return pa.array(values, kind)


@dataclass(frozen=True)
class Trace:
    """A trace on disk: its header and its rows, memory-mapped, in shard order."""

    folder: Path
    header: Header
    rows: datasets.Dataset

    @property
    def complete(self) -> bool:
        """Whether every shard is there."""
        return len(finished(self.folder, self.header)) == self.header.shards


def open_trace(folder: str | Path) -> Trace:
    """Open a trace folder for reading.

    Raises:
        TraceError: no trace, another schema, no finished shard, or a shard that cannot be read.
    """
    folder = Path(folder)
    header = read_header(folder)
    tables = []
    for index in sorted(finished(folder, header)):
        path = shard_path(folder, index, header.shards)
        try:
            table = pq.read_table(path, memory_map=True)
        except (OSError, pa.ArrowInvalid) as error:
            raise TraceError(f"--traces: the shard {path} cannot be read: {str(error).splitlines()[0]}") from None
        written = (table.schema.metadata or {}).get(HEADER_KEY, b"{}")
        if not table.schema.equals(arrow_schema(header)) or not Header.from_json(written, str(path)).same_run(header):
            raise TraceError(f"--traces: the shard {path} is of another run than {HEADER_FILE}; remove it and --resume")
        tables.append(table)
    if not sum(table.num_rows for table in tables):
        raise TraceError(f"--traces: {folder} has no finished shard with rows; run collect with --resume")
    rows = datasets.Dataset(datasets.table.InMemoryTable(pa.concat_tables(tables)))
    return Trace(folder, header, rows)
