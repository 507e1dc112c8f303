"""The trace folder, which `datasets.load_dataset` reads as it is and which several processes may write at the same
time.

    trace/header.json                              written first; names the number of shards
    trace/prompts.jsonl                            the prompts of the run, after the chat template
    trace/README.md                                the data card
    trace/data/train-00000-of-00008.parquet        written whole: temporary name, fsync, rename

Parquet pages have checksums, which are verified whenever a page is read. The metadata of a shard has the header of the
run and the number of rows. A trace is complete if all shards exist.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ..policies.arguments import as_list
from ..policies.contract import Array
from ..policies.display import markdown, markdown_cell, printable
from ..policies.errors import InputError, TraceError
from ..policies.features import HIDDEN_STATES, TOKEN_FEATURES
from ..policies.files import (
    MANIFEST,
    STAGE_PREFIX,
    Input,
    is_empty_dir,
    prepare_output_dir,
    staging_path,
    sync,
    uninterrupted,
    write_atomic,
    write_manifest,
)
from .acceptance import COLUMNS, LIVE_COLUMNS, AcceptanceByDepth, depth_outcomes
from .schema import HEADER_KEY, MAX_COUNT, NO_TOKEN, TIMES, Header, arrow_schema

if TYPE_CHECKING:
    import datasets

HEADER_FILE, PROMPTS_FILE, CARD_FILE = "header.json", "prompts.jsonl", "README.md"

TEXT_COLUMNS = ("sequence", "anchor", "text_tokens", "prompt_tokens", "accepted_length", "accepted")
"""Columns that `check_texts` reads."""

ROWS_KEY = b"specstop.rows"
"""Key of the number of rows in the metadata of a shard: the footer of a Parquet file has no checksum."""

_SHARD_NAME = re.compile(r"train-(\d{5})-of-(\d{5})\.parquet")
_BATCH_ROWS = 1 << 16
"""Rows that are read together by default."""

_ROUNDING = 1e-3
"""Tolerance for sums of float32 probabilities that exceed 1."""


def hidden_text(header: Header) -> str:
    """Return the recorded hidden states and their shapes in a row."""
    shapes = {name: " x ".join(map(str, header.hidden_shape(name))) for name in header.hidden}
    return ", ".join(f"{name} ({shape}, float16)" for name, shape in shapes.items()) or "none"


def replay_text(header: Header) -> str:
    """Return how exact replay of a trace is."""
    return {
        "": "single rounds only" if header.collector == "live" else "none: its texts are not whole texts of the target",
        "path": "exact path by path",
        "law": f"exact in law, {header.draws} draw{'s' * (header.draws > 1)} of each text",
    }[header.exactness]


def data_card(header: Header) -> str:
    """Return the data card, which depends on the header alone: all processes of a run write the same one."""
    # Hub names, or ends of paths: cards are published, and home folders are private.
    draft, target = ("/".join(name.replace("\\", "/").split("/")[-2:]) for name in (header.draft, header.target))
    name = printable(f"Draft traces of {draft or 'a model without a name'} for {target or 'a model without a name'}")
    files = [{"split": "train", "path": "data/train-*.parquet"}]
    front = {
        "pretty_name": name, "tags": ["speculative-decoding", "specstop"],
        "configs": [{"config_name": "default", "data_files": files}],
    }  # fmt: skip
    source = header.facts.get("prompts from") or "not recorded"
    facts = f"{header.prompts} prompts ({source}), {header.tree.name}, temperature {header.shown_temperature}"
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()}
---
# {markdown(name)}

What a draft model proposed at positions of the target's text, the features of its proposals, and what the target
accepted. Recorded by `specstop collect`: {markdown_cell(facts)}, {header.verification} verification.

A row is one anchor; columns of nodes are lists over the nodes of the topology. A node was accepted (`observed` and
`accepted`), rejected (`observed` and not `accepted`), or not observed. `header.json` holds what is true of all rows, and
`prompts.jsonl` the prompts. The rows contain drafted tokens, so the licence of the prompts applies to them.
"""


def open_for_writing(
    folder: Path,
    header: Header,
    *,
    resume: bool = False,
    overwrite: bool = False,
    inputs: Iterable[Input] = (),
    prompts: str | None = None,
) -> Path:
    """Prepare a trace folder for the run that `header` describes. Several processes may do so at the same time.

    Args:
        folder: of the trace.
        header: of the run.
        resume, overwrite: what to do with a folder that is not empty.
        inputs: files and folders that the run reads.
        prompts: contents of `PROMPTS_FILE`; None = no such file.

    Returns:
        The folder to write to. With `overwrite`, this is a folder next to it that `record` renames when it is complete.

    Raises:
        InputError: the folder is not empty and neither flag is set, or see `prepare_output_dir`.
        TraceError: `resume`, but the folder holds another run.
    """
    folder = prepare_output_dir(folder, overwrite=overwrite, resume=resume, inputs=inputs)
    if overwrite:
        folder = staging_path(folder)
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped and starts again
    path = folder / HEADER_FILE
    if not path.exists():
        if not is_empty_dir(folder) and {entry.name for entry in folder.iterdir()} - {PROMPTS_FILE}:
            raise InputError(f"--resume: expected a trace in {folder}, but it has no {HEADER_FILE}")
        # Processes that write at the same time write the same prompts and fields, and facts that need not agree.
        if prompts is not None:
            write_atomic(folder / PROMPTS_FILE, prompts)
        write_atomic(path, header.to_json() + "\n")
    present = read_header(folder)
    if differ := header.differences(present):
        raise TraceError(
            f"--resume: {folder} holds a run with another {', '.join(differ)}; "
            "give the same options as before, or choose another folder"
        )
    if not (folder / MANIFEST).exists():
        write_atomic(folder / CARD_FILE, data_card(present))
        shards = (shard_path(Path(), index, present.shards).as_posix() for index in range(present.shards))
        write_manifest(folder, (HEADER_FILE, PROMPTS_FILE, CARD_FILE, *shards))
    return folder


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Yield a temporary name in the folder of `path`, which is flushed and renamed at the end, or removed on an error."""
    stage = path.with_name(f"{STAGE_PREFIX}{path.name}.{secrets.token_hex(8)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield stage
        sync(stage)
        with uninterrupted:
            os.replace(stage, path)
            sync(path.parent)
    finally:
        stage.unlink(missing_ok=True)


def shard_table(header: Header, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the table of a shard from chunks of columns; each chunk maps every column name to the same number of
    values."""
    schema = arrow_schema(header)

    def column(values: Any, kind: pa.DataType) -> pa.Array:
        if pa.types.is_fixed_size_list(kind):  # [rows, nodes]
            return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), kind.value_type), type=kind)
        return pa.array(values, kind)

    tables = [
        pa.table({name: column(chunk[name], schema.field(name).type) for name in schema.names}, schema=schema)
        for chunk in rows
    ]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def write_shard(folder: Path, header: Header, index: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write shard `index` whole: under a temporary name, flushed to the disk and renamed.

    Args:
        folder: of the trace.
        header: of the trace.
        index: of the shard.
        rows: chunks of columns, see `shard_table`.
    """
    table = shard_table(header, rows)
    # The path of a list column in Parquet is that of its values.
    leaf = {f.name: f"{f.name}.list.element" if pa.types.is_fixed_size_list(f.type) else f.name for f in table.schema}
    options: dict[str, Any] = {}
    if hidden := [leaf[name] for name in leaf if name in HIDDEN_STATES]:
        # Two-byte numbers seldom repeat, but their high bytes are similar, which a dictionary would hide from the
        # compressor.
        options["use_dictionary"] = [path for path in leaf.values() if path not in hidden]
        options["column_encoding"] = dict.fromkeys(hidden, "BYTE_STREAM_SPLIT")
    table = table.replace_schema_metadata({HEADER_KEY: header.to_json(), ROWS_KEY: str(table.num_rows)})
    with staged(shard_path(folder, index, header.shards)) as stage:
        pq.write_table(table, stage, compression="zstd", write_page_checksum=True, **options)


def remove_stale_files(folder: Path) -> None:
    """Remove the temporary files of killed processes from a complete trace."""
    for left in (*folder.glob(f"{STAGE_PREFIX}*"), *(folder / "data").glob(f"{STAGE_PREFIX}*")):
        left.unlink(missing_ok=True)


def shard_path(folder: Path, index: int, count: int) -> Path:
    """Return the path of shard `index` of `count`."""
    return folder / "data" / f"train-{index:05d}-of-{count:05d}.parquet"


def read_header(folder: Path) -> Header:
    """Read the header of a trace. Raises `TraceError` if it is missing or invalid."""
    path = folder / HEADER_FILE
    if not path.is_file():
        raise TraceError(f"traces: expected a trace folder, but {folder} has no {HEADER_FILE}")
    return Header.from_json(path.read_bytes(), str(path))


def read_shard(
    path: Path, header: Header, columns: Sequence[str] | None = None, rows: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield columns of a shard after validation of its schema, header, page checksums and values.

    Args:
        path: of the shard.
        header: of the trace.
        columns: their names; None = all.
        rows: maximum number of rows of each batch.

    Raises:
        TraceError: the file is damaged, or of another run.
    """
    try:
        with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            metadata = file.schema_arrow.metadata or {}
            run = Header.from_json(metadata.get(HEADER_KEY, b"{}"), "its metadata")
            if not file.schema_arrow.equals(arrow_schema(header)) or run.differences(header):
                raise TraceError("it is of another run than header.json")
            count = 0
            for batch in file.iter_batches(rows, columns=columns):
                check_values(header, batch)
                count += len(batch)
                yield batch
            if metadata.get(ROWS_KEY) != str(count).encode():  # pyarrow ends silently at some damaged pages
                raise TraceError(f"it has {count} readable rows, which is not the recorded number")
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TraceError(
            f"traces: the shard {path} cannot be read: {reason}; run collect with --resume, which collects it again"
        ) from None


def column_array(column: pa.ChunkedArray) -> Array:
    """Return a column as an array [N], or [N, nodes] for fixed-size lists."""
    if not pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.to_numpy())
    width = column.type.list_size
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return np.concatenate(parts).reshape(-1, width) if parts else np.zeros((0, width))


def check_values(header: Header, batch: pa.RecordBatch) -> None:
    """Raise `ValueError` if a column of a trace has nulls, invalid text, or numbers that are not finite or out of range."""
    largest = float(np.finfo(np.float32).max)
    bounds = {
        **dict.fromkeys(("prompt_tokens", "anchor", "committed", "decisions", "backlog"), (0, MAX_COUNT)),
        **dict.fromkeys(("draft_prob", "target_prob", "overlap", "accept_chance", "next_chance"), (0, 1 + _ROUNDING)),
        **dict.fromkeys(("accepted_length", "depth"), (0, header.depth)),
        **dict.fromkeys(TOKEN_FEATURES, (NO_TOKEN, MAX_COUNT)),
        **dict.fromkeys(TIMES, (-1.0, 1e9)),
        "sequence": (0, header.prompts * header.draws - 1),
        "text_tokens": (1, MAX_COUNT),
        "tokens": (NO_TOKEN, (header.vocabulary or MAX_COUNT) - 1),
        "branch_rank": (0, len(header.topology)),
    }
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        if column.null_count or flat.null_count:
            raise ValueError(f"expected a value in each row of {name}, got a null")
        if pa.types.is_string(flat.type):
            flat.validate(full=True)  # raises ArrowInvalid, a ValueError, for invalid UTF-8
        elif pa.types.is_float16(flat.type):  # comparisons are emulated and slow: compare the bits of the exponent
            if ((flat.to_numpy().view(np.uint16) & 0x7C00) == 0x7C00).any():
                raise ValueError(f"expected finite numbers in {name}")
        elif len(flat) and not pa.types.is_boolean(flat.type):
            least, most = bounds.get(name, (-largest, largest))
            low, high = flat.to_numpy().min(), flat.to_numpy().max()  # NaN if any value is NaN
            if not (least <= low and high <= most):
                raise ValueError(
                    f"expected finite numbers from {least:g} to {most:g} in {name}, got {low:g} to {high:g}"
                )


def check_texts(header: Header, columns: Mapping[str, Array], where: str) -> None:
    """Check that the rows of each text are consistent.

    Args:
        header: header of the trace.
        columns: `TEXT_COLUMNS` as arrays [N], and `accepted` as [N, nodes].
        where: folder name for messages.

    Raises:
        TraceError: an anchor is out of range, missing or duplicated, or `accepted` is not a path of the tree.
    """
    sequence, anchor, text, prompt, length, accepted = (columns[name] for name in TEXT_COLUMNS)
    order = np.lexsort((anchor, sequence))  # by sequence, then by anchor
    sequence, anchor, text, prompt = sequence[order], anchor[order], text[order], prompt[order]
    same = np.diff(sequence) == 0
    step = np.diff(anchor)[same]
    first, last = np.append(True, ~same), np.append(~same, True)
    rows = np.concatenate([np.ones((len(accepted), 1), dtype=bool), accepted], 1)  # the anchor before the nodes
    tree = header.tree
    is_path = (rows[:, list(tree.parent[1:])] >= accepted).all()  # accepted nodes only below accepted ones
    # One path in the tree of each drafter, the longest of accepted_length nodes.
    lengths = np.zeros(len(accepted), dtype=np.int64)
    for drafter in range(tree.drafters):
        path = accepted & (tree.drafter_of[1:] == drafter)
        is_path &= all((path[:, tree.depths[1:] == depth].sum(1) <= 1).all() for depth in range(1, tree.deepest + 1))
        lengths = np.maximum(lengths, path.sum(1))
    is_path &= (lengths == length).all()
    is_gapless = (step == 1).all() and (anchor[first] == 1).all() and (anchor[last] + 1 == text[last]).all()
    for valid, expected in (
        ((anchor < text).all(), "each anchor before the end of its text (anchor < text_tokens)"),
        ((step != 0).all(), "no duplicate anchors in a text"),
        ((np.diff([text, prompt])[:, same] == 0).all(), "the same text_tokens and prompt_tokens in all rows of a text"),
        (is_gapless or not header.has_every_anchor, "every anchor of each text, from 1 to text_tokens - 1"),
        (is_path, "a path of accepted_length nodes from the anchor in `accepted`"),
    ):
        if not valid:
            raise TraceError(f"traces: {where}: expected {expected}; a column is damaged, collect it again")


class Trace:
    """A trace on disk: its header, and its rows in the order of the shards, which are read on request.

    Args:
        folder: of the trace.
        header: of the trace.
        rows: used instead of the rows on disk, for instance a part of them.
    """

    def __init__(self, folder: Path, header: Header, rows: datasets.Dataset | None = None) -> None:
        self.folder, self.header = folder, header
        if rows is not None:
            self.rows = rows

    @cached_property
    def rows(self) -> datasets.Dataset:
        """All rows in memory."""
        import datasets  # imports pandas, which replay does not need

        # Without a fingerprint, the whole table would be pickled to compute one.
        return datasets.Dataset(datasets.table.InMemoryTable(self.table()), fingerprint=secrets.token_hex(8))

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return these columns, or all, of all rows."""
        if "rows" in vars(self):  # passed to the constructor, or read before by the cached property
            rows = self.rows if columns is None else self.rows.select_columns(as_list(columns))
            return rows.with_format("arrow")[:]
        names = arrow_schema(self.header).names if columns is None else as_list(columns)
        schema = pa.schema([arrow_schema(self.header).field(name) for name in names])
        return pa.Table.from_batches((batch.select(names) for batch in self.batches(names)), schema)

    def batches(self, columns: Sequence[str] | None = None, rows: int = _BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """Yield these columns, or all, with at most `rows` rows at a time: a large trace need not fit into memory."""
        names = None if columns is None else as_list(columns)
        if "rows" in vars(self):
            yield from self.table(names).to_batches(rows)
            return
        for index in sorted(self.finished):
            yield from read_shard(shard_path(self.folder, index, self.header.shards), self.header, names, rows)

    def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        """Return these columns, or all, of all rows as a `pandas.DataFrame`."""
        return self.table(columns).to_pandas()

    def acceptance_by_depth(self) -> AcceptanceByDepth:
        """Return how often each depth is accepted, from observed depths only; see `collect.acceptance`."""
        names = [*COLUMNS, *(LIVE_COLUMNS if self.header.collector == "live" else ())]
        table = self.table(names)
        return AcceptanceByDepth(depth_outcomes(self.header, {name: column_array(table[name]) for name in names}))

    def __repr__(self) -> str:
        header = self.header
        return (
            f"Trace({str(self.folder)!r}: {self.row_count:,} rounds of {header.prompts} prompts, {header.tree.name}, "
            f"{header.collector}, {header.verification}, temperature {header.shown_temperature})"
        )

    @property
    def row_count(self) -> int:
        """Number of rows of the finished shards, from their metadata."""
        if "rows" in vars(self):
            return len(self.rows)
        paths = [shard_path(self.folder, index, self.header.shards) for index in self.finished]
        return sum(int(pq.read_metadata(path).num_rows) for path in paths)

    @property
    def finished(self) -> set[int]:
        """The indices of the shards that exist. Raises `TraceError` if a shard is of another number of shards."""
        indices, count = set(), self.header.shards
        for path in (self.folder / "data").glob("train-*.parquet"):
            match = _SHARD_NAME.fullmatch(path.name)
            if match is None or int(match[2]) != count or int(match[1]) >= count:
                raise TraceError(
                    f"traces: expected {count} shards, as the header of {self.folder} says, got data/{path.name}; restore "
                    "the header, or move that file away"
                )
            indices.add(int(match[1]))
        return indices

    @property
    def complete(self) -> bool:
        """Whether all shards exist."""
        return len(self.finished) == self.header.shards


def load_trace(folder: str | Path) -> Trace:
    """Open a trace folder for reading, and validate the header, the metadata of shards and the columns that make texts
    of rows.

    The values and checksums of the other columns are verified when they are read (`check_trace` reads all).

    Raises:
        TraceError: the folder is no trace, has another schema, has no finished shard with rows, or is damaged.
    """
    trace = Trace(Path(folder), read_header(Path(folder)))
    rows = trace.table(TEXT_COLUMNS)
    if not len(rows):
        raise TraceError(f"traces: {folder} has no finished shard with rows; run collect with --resume")
    check_texts(trace.header, {name: column_array(rows[name]) for name in TEXT_COLUMNS}, str(folder))
    return trace


def check_trace(folder: str | Path) -> Trace:
    """Open a trace after validation of all shards and all values; see `load_trace`.

    Raises:
        TraceError: as `load_trace`; or a shard is missing.
    """
    trace = load_trace(folder)
    missing = sorted(set(range(trace.header.shards)) - trace.finished)
    if missing:
        named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise TraceError(
            f"traces: {folder} is not complete, {len(missing)} of its {trace.header.shards} shards are missing ({named}); "
            "run the collect command again with --resume, as one process or several"
        )
    for _ in trace.batches():
        pass
    return trace
