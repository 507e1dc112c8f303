"""The trace folder, which `datasets.load_dataset` reads as it is and which several processes may write at the same
time.

    trace/header.json                              written first; names the number of shards
    trace/prompts.jsonl                            the prompts of the run, after the chat template
    trace/README.md                                the data card
    trace/data/train-00000-of-00008.parquet        written whole: temporary name, fsync, rename

Parquet pages have checksums, which are verified whenever a page is read. The metadata of a shard has the header of the
run, and the names and the number of rows of the texts in the shard. A trace is complete if all shards exist.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ..policies.arguments import as_list
from ..policies.display import markdown, markdown_cell, printable
from ..policies.errors import InputError, TraceError
from ..policies.features import HIDDEN_STATES
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
from ..policies.learned import sampling_options_text
from .acceptance import COLUMNS, LIVE_COLUMNS, AcceptanceByDepth, depth_outcomes
from .checks import TEXT_COLUMNS, check_texts, check_values, column_array
from .schema import HEADER_KEY, Header, arrow_schema


def data_card(header: Header) -> str:
    """Return the data card, which depends on the header alone: all processes of a run write the same one."""

    def model(name: str) -> str:
        """Return a hub name, or the end of a path: cards are published, and home folders are private."""
        return "/".join(name.replace("\\", "/").split("/")[-2:]) or "a model without a name"

    name = printable(f"Draft traces of {model(header.draft)} for {model(header.target)}")
    front = {
        "pretty_name": name,
        "tags": ["speculative-decoding", "specstop"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
    }
    shown = header.shown_temperature
    facts = {
        "target": model(header.target),
        "drafter": model(header.draft),
        "temperature": shown if isinstance(shown, str) else f"{shown:g}",
        "filter": sampling_options_text(header.sampling),
        "verification": header.verification,
        "replay": replay_text(header),
        "depth": header.depth,
        "prompts": header.prompts,
        "prompts from": header.facts.get("prompts from") or "not recorded",
        "schema version": header.schema,
        "hidden states": hidden_text(header),
    }
    lines = "\n".join(f"| {name} | {markdown_cell(str(value))} |" for name, value in facts.items())
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()}
---
# {markdown(name)}

What a draft model proposed at positions of the target's text, the features of its proposals, and what the target
accepted. Recorded by `specstop collect`. A row is one anchor; columns of nodes are lists over the nodes of the
topology. A node was accepted (`observed` and `accepted`), rejected (`observed` and not `accepted`), or not observed.

| what | value |
|---|---|
{lines}

    from datasets import load_dataset
    rows = load_dataset("path/to/this/folder", split="train", streaming=True)

`header.json` holds what is true of all rows, and `prompts.jsonl` the prompts if they are known. The rows contain prompt
ids and drafted tokens, so the licence of the prompts applies to them. `specstop info FOLDER --check` verifies the whole
folder.
"""


def hidden_text(header: Header) -> str:
    """Return the recorded hidden states and their shapes in a row."""
    shapes = {name: " x ".join(map(str, header.hidden_shape(name))) for name in header.hidden}
    return ", ".join(f"{name} ({shape}, float16)" for name, shape in shapes.items()) or "none"


def replay_text(header: Header) -> str:
    """Return how exact replay of a trace is."""
    draws = f"{header.draws} draw{'s' * (header.draws > 1)} of each text"
    return {
        "": "single rounds only" if header.collector == "live" else "none: its texts are not whole texts of the target",
        "path": "exact path by path",
        "law": f"exact in law, {draws}",
        "nearly": f"nearly exact in law (--off-text approximate), {draws}",
    }[header.exactness]


def balance_text(checked: Mapping[str, Any]) -> str:
    """Return the result of the check of completions (`dense.completion_check.Balance`)."""
    return (
        f"{checked['texts']} checked: log p + entropy {checked['mean']:+.4f} a token (standard error "
        f"{checked['standard_error']:.4f}), {checked['impossible']} of {checked['tokens']} tokens cannot be drawn"
    )


if TYPE_CHECKING:
    import datasets

HEADER_FILE, PROMPTS_FILE, CARD_FILE = "header.json", "prompts.jsonl", "README.md"
SHARD_KEY = b"specstop.shard"
"""Key of a shard's texts and number of rows in the metadata of its Parquet file."""

_SHARD_NAME = re.compile(r"train-(\d{5})-of-(\d{5})\.parquet")


def open_for_writing(
    folder: Path,
    header: Header,
    *,
    resume: bool = False,
    overwrite: bool = False,
    inputs: Iterable[Input] = (),
    prompts: str | None = None,
) -> Path:
    """Prepare a trace folder for the run that `header` describes. Of several processes, the first one writes the
    header.

    Args:
        folder: of the trace.
        header: of the run.
        resume, overwrite: what to do with a folder that is not empty.
        inputs: files and folders that the run reads.
        prompts: contents of `PROMPTS_FILE`; None = no such file.

    Returns:
        The folder to write to. If a trace is overwritten, this is a folder next to it that replaces it when it is
        complete.

    Raises:
        InputError: the folder is not empty and neither flag is set, or see `prepare_output_dir`.
        TraceError: `resume`, but the folder holds another run; or the disk is full.
    """
    folder = prepare_output_dir(folder, overwrite=overwrite, resume=resume, inputs=inputs)
    if overwrite:
        stage = staging_path(folder)
        if stage.exists() and not resume:
            shutil.rmtree(stage)  # of a run that was stopped and starts again
        folder = stage if stage.exists() or not (resume or is_empty_dir(folder)) else folder
    path = folder / HEADER_FILE
    names = {entry.name for entry in os.scandir(folder) if entry.name[0] != "."} if folder.exists() else set()
    if names - {PROMPTS_FILE, "data"} and not path.exists():  # the second, because another process may be faster
        raise InputError(f"--resume: expected a trace in {folder}, but it has no {HEADER_FILE}")
    with disk_full_advice(folder):
        (folder / "data").mkdir(parents=True, exist_ok=True)
        if prompts is not None:
            write_once(folder / PROMPTS_FILE, prompts)
        write_once(path, header.to_json() + "\n")
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
def staged(path: Path, *, keep: bool = False) -> Iterator[Path]:
    """Yield a temporary name in the folder of `path`. The file is flushed and renamed at the end, or removed on an
    error.

    Args:
        path: of the file.
        keep: if the file exists at the end, keep it: another process has written it.
    """
    stage = path.with_name(f"{STAGE_PREFIX}{path.name}.{secrets.token_hex(4)}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield stage
        sync(stage)
        with uninterrupted:
            if not keep:
                os.replace(stage, path)
                sync(path.parent)
                return
            with contextlib.suppress(FileExistsError):
                os.link(stage, path)  # unlike a rename, fails if the file exists
    finally:
        stage.unlink(missing_ok=True)


def write_once(path: Path, text: str) -> None:
    """Write a file unless it exists. Of several processes that write at the same time, the first one wins."""
    if not path.exists():
        with staged(path, keep=True) as stage:
            stage.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def disk_full_advice(folder: Path) -> Iterator[None]:
    """Raise `TraceError` with a remedy if the disk, or the quota of the user, is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        done = len(list((folder / "data").glob("train-*.parquet")))
        raise TraceError(
            f"--out: no space is left on the disk of {folder}; its {done} finished shards stay: free some space and run the "
            "same command again with --resume"
        ) from None


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


def write_table(table: pa.Table, where: Any) -> None:
    """Write the table of a shard to a path or a file, compressed and with checksums of pages."""
    # The path of a list column in Parquet is that of its values.
    leaf = {f.name: f"{f.name}.list.element" if pa.types.is_fixed_size_list(f.type) else f.name for f in table.schema}
    options: dict[str, Any] = {}
    if hidden := [leaf[name] for name in leaf if name in HIDDEN_STATES]:
        # Two-byte numbers seldom repeat, but their high bytes are similar, which a dictionary would hide from the
        # compressor.
        options["use_dictionary"] = [path for path in leaf.values() if path not in hidden]
        options["column_encoding"] = dict.fromkeys(hidden, "BYTE_STREAM_SPLIT")
    pq.write_table(table, where, compression="zstd", write_page_checksum=True, **options)


def write_shard(
    folder: Path, header: Header, index: int, rows: Sequence[Mapping[str, Any]] | pa.Table,
    texts: Sequence[Sequence[str]] = (),
) -> None:  # fmt: skip
    """Write one shard under a temporary name, flush it to the disk, and rename it.

    Args:
        folder: of the trace.
        header: of the trace.
        index: of the shard.
        rows: chunks of columns, see `shard_table`, or the table.
        texts: (prompt id, sample) of the texts of the shard, also of those without rows.

    Raises:
        TraceError: the disk is full.
    """
    table = rows if isinstance(rows, pa.Table) else shard_table(header, rows)
    metadata = json.dumps({"rows": table.num_rows, "texts": [list(names) for names in texts]})
    table = table.replace_schema_metadata({HEADER_KEY: header.to_json(), SHARD_KEY: metadata})
    with disk_full_advice(folder), staged(shard_path(folder, index, header.shards)) as stage:
        write_table(table, stage)


def remove_stale_files(folder: Path) -> None:
    """Remove the temporary files of killed processes from a complete trace."""
    for left in (*folder.glob(f"{STAGE_PREFIX}*"), *(folder / "data").glob(f"{STAGE_PREFIX}*")):
        left.unlink(missing_ok=True)


def shard_path(folder: Path, index: int, count: int) -> Path:
    """Return the path of shard `index` of `count`."""
    return folder / "data" / f"train-{index:05d}-of-{count:05d}.parquet"


def finished(folder: Path, header: Header) -> set[int]:
    """Return the indices of the shards that exist. Raises `TraceError` if a shard is of another number of shards."""
    indices = set()
    for path in (folder / "data").glob("train-*.parquet"):
        match = _SHARD_NAME.fullmatch(path.name)
        if match is None or int(match[2]) != header.shards or int(match[1]) >= header.shards:
            raise TraceError(
                f"traces: expected {header.shards} shards, as the header of {folder} says, got data/{path.name}; restore the "
                "header, or move that file away"
            )
        indices.add(int(match[1]))
    return indices


def read_header(folder: Path) -> Header:
    """Read the header of a trace. Raises `TraceError` if it is missing or invalid."""
    path = folder / HEADER_FILE
    if not path.is_file():
        raise TraceError(f"traces: expected a trace folder, but {folder} has no {HEADER_FILE}")
    return Header.from_json(path.read_bytes(), str(path))


def damage(path: Path, header: Header, *, data: bool = True) -> str:
    """Return what is wrong with a shard, or "".

    Args:
        path: of the shard.
        header: of the trace.
        data: read all pages, so that their checksums are verified; otherwise only the metadata.
    """
    try:
        with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            metadata = schema.metadata or {}
            run = Header.from_json(metadata.get(HEADER_KEY, b"{}"), str(path))
            if not schema.equals(arrow_schema(header)) or run.differences(header):
                return "it is of another run than header.json"
            if json.loads(metadata.get(SHARD_KEY, b"{}")).get("rows") != rows:
                return "its number of rows is not the recorded one"
            for batch in file.iter_batches() if data else ():
                check_values(header, batch, str(path))
    except TraceError as error:
        return error.command_line
    except (OSError, ValueError, AttributeError) as error:  # pa.ArrowInvalid is a ValueError
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def damaged_text(path: Path, reason: str) -> str:
    """Return the message that names a damaged shard."""
    return f"traces: the shard {path} cannot be read: {reason}; run collect with --resume, which collects it again"


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
            chosen = self.rows if columns is None else self.rows.select_columns(as_list(columns))
            return chosen.with_format("arrow")[:]
        tables = list(self.shards(columns))
        return pa.concat_tables(tables) if tables else arrow_schema(self.header).empty_table()

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

    def shards(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the table of each finished shard with these columns, or all."""
        names = None if columns is None else as_list(columns)
        return self._read(lambda file: iter([file.read(names)]))

    def batches(self, names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield these columns in order with at most `rows` rows at a time, so that a large trace need not fit into
        memory."""
        if "rows" in vars(self):
            return iter(pa.table({name: self._as_arrow[name][:] for name in names}).to_batches(rows))
        return self._read(lambda file: file.iter_batches(rows, columns=list(names)))

    def _read(self, read: Callable[[pq.ParquetFile], Iterator[Any]]) -> Iterator[Any]:
        """Yield the results of `read` for each finished shard after validation of their values."""
        for index in sorted(self.finished):
            path = shard_path(self.folder, index, self.header.shards)
            try:
                with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
                    for rows in read(file):
                        check_values(self.header, rows, str(path))
                        yield rows
            except (OSError, pa.ArrowInvalid) as error:
                raise TraceError(damaged_text(path, str(error).splitlines()[0])) from None

    @cached_property
    def _as_arrow(self) -> datasets.Dataset:
        """The rows in memory in the format of arrow: to change the format takes a millisecond."""
        return self.rows.with_format("arrow")

    @property
    def row_count(self) -> int:
        """Number of rows of the finished shards, from their metadata."""
        if "rows" in vars(self):
            return len(self.rows)
        paths = [shard_path(self.folder, index, self.header.shards) for index in self.finished]
        return sum(int(pq.read_metadata(path).num_rows) for path in paths)

    @property
    def finished(self) -> set[int]:
        """The indices of the shards that exist."""
        return finished(self.folder, self.header)

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
    return _open(Path(folder), data=False)


def check_trace(folder: str | Path) -> Trace:
    """Open a trace after validation of all shards and all values; see `load_trace`.

    Raises:
        TraceError: as `load_trace`; a shard is missing; or a text is in several shards.
    """
    trace = _open(Path(folder), data=True)
    missing = sorted(set(range(trace.header.shards)) - trace.finished)
    if missing:
        named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise TraceError(
            f"traces: {folder} is not complete, {len(missing)} of its {trace.header.shards} shards are missing ({named}); "
            "run the collect command again with --resume, as one process or several"
        )
    texts: set[tuple[str, ...]] = set()
    for index in range(trace.header.shards):
        path = shard_path(trace.folder, index, trace.header.shards)
        names = {tuple(name) for name in json.loads(pq.read_schema(path).metadata[SHARD_KEY])["texts"]}
        if texts & names:
            raise TraceError(f"traces: the shard {path} has {len(texts & names)} texts that an earlier one has too")
        texts |= names
    return trace


def _open(folder: Path, data: bool) -> Trace:
    trace = Trace(folder, read_header(folder))
    for index in sorted(trace.finished):
        path = shard_path(folder, index, trace.header.shards)
        if reason := damage(path, trace.header, data=data):
            raise TraceError(damaged_text(path, reason))
    if not trace.row_count:
        raise TraceError(f"traces: {folder} has no finished shard with rows; run collect with --resume")
    rows = trace.table(TEXT_COLUMNS)
    check_texts(trace.header, {name: column_array(rows[name]) for name in TEXT_COLUMNS}, str(folder))
    return trace
