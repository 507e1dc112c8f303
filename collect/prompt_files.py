"""Sources of prompts: JSON, text, CSV and Parquet files, pipes, and data sets in folders or on the hub, as records with
places."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..policies.errors import InputError
from ..policies.files import strict_loads

HUB = "hf:"
STANDARD_INPUT = "-"

Record = tuple[str, Mapping[str, Any]]
"""The place of a record ("FILE, line 3"), and its columns."""

_HUB_FORM = "hf:organisation/name[:configuration[:split]]"
_ROWS = 4096
"""Rows of a Parquet file that are read together."""


def records(source: str | Path, columns: Sequence[str] = ("prompt",), split: str | None = None) -> Iterator[Record]:
    """Yield the records of a source lazily.

    Args:
        source: a file of JSON Lines or of a JSON array; a .txt file with a prompt per line; a .csv or .parquet file; a
            folder with a data set; `hf:organisation/name[:configuration[:split]]`; or `-` (standard input) or another
            pipe, which is JSON if it begins with a brace or a bracket, and otherwise has a prompt per line.
        columns: columns that will be read, none of which may occur twice. The first is the column of lines of plain
            text.
        split: of a data set, for instance `train[:500]`; default: the split in the name, `train`, or the only one.

    Raises:
        InputError: the source does not exist, or a record is invalid; the message says where.
    """
    name = os.fspath(source)
    path = Path(source)
    if name.startswith(HUB) or path.is_dir():
        return ((f"{name}, row {number}", row) for number, row in enumerate(_data_set(name, split), 1))
    if name != STANDARD_INPUT and not path.exists():
        raise InputError(
            f"--prompts: expected a JSON Lines file, .txt, .csv, .parquet, a folder with a data set, -, or {_HUB_FORM}, "
            f"but {name} does not exist or is no file"
        )
    if split is not None:
        raise InputError(f"--split: expected a data set for --prompts, but {name} is one file; leave --split out")
    if is_stream(name):
        return _json_records("standard input" if name == STANDARD_INPUT else name, lines(path), columns[0])
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return ((where, {columns[0]: line}) for where, line in lines(path))
    if suffix in (".csv", ".parquet"):
        return ((f"{name}, row {number}", row) for number, row in enumerate(_table_rows(path, suffix[1:], columns), 1))
    return _json_records(name, lines(path))


def is_stream(source: str) -> bool:
    """Whether a source is standard input or another pipe, which can be read only once."""
    is_pipe = os.path.exists(source) and not (os.path.isfile(source) or os.path.isdir(source))
    return source == STANDARD_INPUT or source.startswith("/dev/") or is_pipe


def lines(path: Path, option: str = "--prompts") -> Iterator[tuple[str, str]]:
    """Yield (place, line) of the lines that are not blank. Only a newline ends one: U+2028 may occur in a string."""
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    try:
        standard: Any = getattr(sys.stdin, "buffer", None) or io.BytesIO()  # None if it is closed
        source = contextlib.nullcontext(standard) if str(path) == STANDARD_INPUT else path.open("rb")
        with source as file:
            for number, raw in enumerate(file, 1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if line:
                    yield f"{name}, line {number}", line
    except UnicodeDecodeError as error:
        raise InputError(f"{option}: {name} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise InputError(f"{option}: {name} cannot be read: {error.strerror or error}") from None


def _json_records(name: str, lines: Iterator[tuple[str, str]], text_column: str | None = None) -> Iterator[Record]:
    """Yield the records of JSON Lines or of a JSON array; with `text_column`, other lines are prompts."""
    first = next(lines, None)
    if first is None:
        return
    if first[1].startswith("["):
        items = _parse_json(name, "\n".join([first[1], *(line for _, line in lines)]))
        parsed: Iterable[tuple[str, Any]] = ((f"{name}, item {number}", item) for number, item in enumerate(items, 1))
    elif text_column and not first[1].startswith("{"):
        yield from ((where, {text_column: line}) for where, line in itertools.chain([first], lines))
        return
    else:
        parsed = ((where, _parse_json(where, line)) for where, line in itertools.chain([first], lines))
    for where, record in parsed:
        if not isinstance(record, dict):
            raise InputError(
                f'--prompts: {where}: expected an object with a non-empty string "prompt", not {type(record).__name__}'
            )
        yield where, record


def _parse_json(where: str, text: str) -> Any:
    try:
        return strict_loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--prompts: {where}: invalid JSON: {error}") from None


def _table_rows(path: Path, kind: str, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a "csv" or "parquet" file, with a few thousand rows in memory at a time."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        batches: Any
        if kind == "csv":
            quoted = csv.ParseOptions(newlines_in_values=True)  # prompts have lines
            # The columns must be known before the file is read as text, so it is opened twice.
            names = csv.open_csv(path, parse_options=quoted).schema.names
            text = csv.ConvertOptions(column_types={name: pa.string() for name in names})  # "12" is a prompt too
            batches = csv.open_csv(path, parse_options=quoted, convert_options=text)
        else:
            file = parquet.ParquetFile(path)
            names, batches = file.schema_arrow.names, file.iter_batches(_ROWS)
        if repeated := [name for name in columns if names.count(name) > 1]:
            raise InputError(f"--prompts: {path} has several columns {repeated[0]!r}; rename all but one")
        for batch in batches:
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"--prompts: {path} cannot be read as {kind}: {reason[0]}") from None


def _data_set(name: str, split: str | None) -> Any:
    """Load a data set from the hub or a folder: files that `load_dataset` reads, or what `save_to_disk` wrote."""
    import datasets

    folder, configuration = Path(name), None
    path = str(folder.absolute())  # the relative path "data" could be the name of a data set on the hub
    if name.startswith(HUB):
        path, *rest = name.removeprefix(HUB).split(":", 2)
        configuration, split = (rest[0] or None if rest else None), split or (rest[1] if len(rest) > 1 else None)
        if not path or path.count("/") > 1 or (rest and not any(rest)):
            raise InputError(f"--prompts: expected {_HUB_FORM}, not {name!r}")
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded: Any = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(path, configuration, split=split)
    except Exception as error:  # of many unrelated classes: offline, no such name, no such split, no data files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"--prompts: no data set can be read from {name}: {reason}") from None
    if not isinstance(loaded, datasets.DatasetDict):
        if split is not None and (folder / "state.json").is_file():
            raise InputError(f"--split: the data set in {name} has no splits; leave --split out")
        return loaded
    wanted = split or ("train" if "train" in loaded or len(loaded) > 1 else next(iter(loaded)))
    if wanted not in loaded:
        raise InputError(f"--split: expected one of {', '.join(loaded)} in {name}, not {wanted!r}")
    return loaded[wanted]
