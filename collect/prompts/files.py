"""Where prompts come from: JSON, text, CSV, Parquet, a pipe, a data set on the hub or in a folder; records with places."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...policies.errors import InputError

HUB = "hf:"
STANDARD_INPUT = "-"

Record = tuple[str, Mapping[str, Any]]
"""Where a record stands ("FILE, line 3"), and its columns."""

_TABLES = (".csv", ".parquet")
_ROWS = 4096

_HUB_FORM = "hf:organisation/name or hf:organisation/name:configuration"


def records(source: str | Path, columns: Sequence[str] = ("prompt",), split: str | None = None) -> Iterator[Record]:
    """Yield the records of a source, one after the other, as they are asked for.

    Args:
        source: a file of JSON Lines, or of a JSON array; a .txt file, each line a prompt; a .csv or .parquet file, each row
            a record; a folder with a data set; `hf:name[:config]`; `-` (standard input) or another pipe, which is read once:
            JSON if it begins with a brace or bracket, else each line a prompt.
        columns: names of the columns that will be read, none of which may occur twice in a record. The first is that of the
            lines of a plain text.
        split: of a data set.

    Raises:
        InputError: there is no such source, or a record is not what is expected; the message says where.
    """
    name = os.fspath(source)
    if name.startswith(HUB):
        return _rows(name, _hub(name, split))
    path = Path(source)
    if path.is_dir():
        return _rows(name, _folder(path, split))
    if name != STANDARD_INPUT and not path.exists():
        raise InputError(
            f"--prompts: expected a JSON Lines file, .txt, .csv, .parquet, a folder with a data set, -, or {_HUB_FORM}, "
            f"but {name} does not exist or is no file"
        )
    if split is not None:
        raise InputError(f"--split: expected a data set for --prompts, but {name} is one file; leave --split out")
    if is_stream(name):
        return _json_records("standard input" if name == STANDARD_INPUT else name, lines(path), columns, text=True)
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return ((where, {columns[0]: line}) for where, line in lines(path))
    if suffix in _TABLES:
        return _rows(name, _table_rows(path, suffix[1:], columns))
    return _json_records(name, lines(path), columns)


def is_stream(source: str) -> bool:
    """Whether a source is standard input or another pipe, which can be read only once."""
    return source == STANDARD_INPUT or source.startswith("/dev/") or (os.path.exists(source) and not _is_stored(source))


def _is_stored(source: str) -> bool:
    return os.path.isfile(source) or os.path.isdir(source)


def lines(path: Path, option: str = "--prompts") -> Iterator[tuple[str, str]]:
    """Yield (place, line) of the lines that are not blank. Only a newline ends one: U+2028 may stand in a string."""
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{name}, line {number}", line.strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{option}: {name} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise InputError(f"{option}: {name} cannot be read: {error.strerror or error}") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Iterable[str]]:
    if str(path) != STANDARD_INPUT:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            yield file
        return
    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:  # closed, or replaced by a stream of texts
        yield sys.stdin or ()
        return
    file = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="\n")
    try:
        yield file
    finally:
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            file.detach()  # else standard input would be closed


class _Repeating(dict[str, Any]):
    """A JSON object with a key that occurs twice.

    Attributes:
        keys_twice: those keys.
    """

    keys_twice: Sequence[str] = ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    repeating = _Repeating(values)
    repeating.keys_twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    return repeating


def _first_repeated(value: Any) -> str | None:
    """Return a key that occurs twice in an object within a value, or None."""
    if isinstance(value, _Repeating):
        return value.keys_twice[0]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((key for key in map(_first_repeated, inner) if key is not None), None)


def _json_records(
    name: str, lines: Iterator[tuple[str, str]], columns: Sequence[str], text: bool = False
) -> Iterator[Record]:
    """Yield the records of JSON Lines, or of a JSON array.

    Args:
        name: of the source, for messages.
        lines: of it, each with its place.
        columns: none of which may occur twice in a record.
        text: lines that begin as neither are prompts.
    """
    first = next(lines, None)
    if first is None:
        return
    if first[1].startswith("["):
        whole = _parsed(name, "\n".join([first[1], *(line for _, line in lines)]))
        found: Iterable[tuple[str, Any]] = ((f"{name}, item {number}", one) for number, one in enumerate(whole, 1))
    elif text and not first[1].startswith("{"):
        yield from ((where, {columns[0]: line}) for where, line in itertools.chain([first], lines))
        return
    else:
        found = ((where, _parsed(where, line)) for where, line in itertools.chain([first], lines))
    for where, record in found:
        if not isinstance(record, dict):
            raise InputError(
                f'--prompts: {where}: expected an object with a non-empty string "prompt", not {type(record).__name__}'
            )
        # Keys that are not read may occur twice.
        repeated = record.keys_twice if isinstance(record, _Repeating) else ()
        key = next((key for key in repeated if key in columns), None)
        key = key or _first_repeated([record[column] for column in columns if column in record])
        if key is not None:
            raise InputError(f"--prompts: {where}: invalid JSON: the key {key!r} occurs twice; keep one of them")
        yield where, record


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--prompts: {where}: invalid JSON: {error}") from None


def _duplicate(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the first of `columns` that occurs more than once among `names`, or None."""
    if len(set(names)) == len(names):
        return None
    counts = Counter(names)
    return next((name for name in columns if counts[name] > 1), None)


def _table_rows(path: Path, kind: str, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a "csv" or "parquet" file, with a few thousand rows in memory at a time."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        batches: Any
        if kind == "csv":
            quoted = csv.ParseOptions(newlines_in_values=True)  # prompts have lines
            # Types must be given before a file is read, and its columns are known once it is open: it is opened twice.
            names = csv.open_csv(path, parse_options=quoted).schema.names
            text = csv.ConvertOptions(column_types={name: pa.string() for name in names})  # "12" is a prompt too
            batches = csv.open_csv(path, parse_options=quoted, convert_options=text)
        else:
            file = parquet.ParquetFile(path)
            names, batches = file.schema_arrow.names, file.iter_batches(_ROWS)
        if name := _duplicate(names, columns):
            raise InputError(f"--prompts: {path} has several columns {name!r}; rename all but one")
        for batch in batches:
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"--prompts: {path} cannot be read as {kind}: {reason[0]}") from None


def _rows(name: str, table: Any) -> Iterator[Record]:
    for number, row in enumerate(table, 1):
        yield f"{name}, row {number}", row


def _hub(name: str, split: str | None) -> Any:
    parts = name.removeprefix(HUB).split(":")
    if len(parts) > 2 or not all(parts) or parts[0].count("/") > 1:
        raise InputError(f"--prompts: expected {_HUB_FORM}, not {name!r}")
    return _load(name, parts[0], parts[1] if len(parts) > 1 else None, split)


def _folder(path: Path, split: str | None) -> Any:
    """Load a folder: what `save_to_disk` wrote, or files that `load_dataset` knows."""
    saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    if not saved:
        # An absolute path, since "data" alone could be the name of a data set on the hub.
        return _load(str(path), str(path.absolute()), None, split)
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise _unreadable(str(path), error) from None
    if isinstance(loaded, datasets.DatasetDict):
        if (split or "train") not in loaded:
            raise InputError(f"--split: expected one of {', '.join(loaded)} in {path}, not {split or 'train'!r}")
        return loaded[split or "train"]
    if split is not None:
        raise InputError(f"--split: the data set in {path} has no splits; leave --split out")
    return loaded


def _load(name: str, path: str, configuration: str | None, split: str | None) -> Any:
    import datasets

    try:
        with _silence():
            return datasets.load_dataset(path, configuration, split=split or "train")
    except Exception as error:  # of half a dozen unrelated classes: offline, no such name, no such split, no data files
        raise _unreadable(name, error) from None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep bars and advice of the libraries off the console; what goes wrong is raised."""
    import datasets

    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def _unreadable(name: str, error: Exception) -> InputError:
    told = str(error).strip().splitlines()
    return InputError(f"--prompts: no data set can be read from {name}: {told[0] if told else type(error).__name__}")
