"""Where prompts come from: JSON Lines, text, CSV, Parquet, a data set on the hub or in a folder; records with places."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...policies.errors import InputError

HUB = "hf:"

Record = tuple[str, Mapping[str, Any]]
"""Where a record stands ("FILE, line 3"), and its columns."""

_TABLES = (".csv", ".parquet")
_ROWS = 4096

_HUB_FORM = "hf:organisation/name or hf:organisation/name:configuration"


def records(source: str | Path, columns: Sequence[str] = ("prompt",), split: str | None = None) -> Iterator[Record]:
    """Yield the records of a source, one after the other, as they are asked for.

    Args:
        source: a file of JSON Lines; a .txt file, each line a prompt; a .csv or .parquet file, each row a record; a folder
            with a data set; or `hf:name[:config]`.
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
    if not path.is_file():
        raise InputError(
            f"--prompts: expected a JSON Lines file, .txt, .csv, .parquet, a folder with a data set, or {_HUB_FORM}, "
            f"but {name} does not exist or is no file"
        )
    if split is not None:
        raise InputError(f"--split: expected a data set for --prompts, but {name} is one file; leave --split out")
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return ((where, {columns[0]: line}) for where, line in lines(path))
    if suffix in _TABLES:
        return _rows(name, _table_rows(path, suffix[1:], columns))
    return _json_lines(path, columns)


def lines(path: Path, option: str = "--prompts") -> Iterator[tuple[str, str]]:
    """Yield (place, line) of the lines that are not blank. Only a newline ends one: U+2028 may stand in a string."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}, line {number}", line.strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{option}: {path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise InputError(f"{option}: {path} cannot be read: {error.strerror or error}") from None


def _json_lines(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if name := _duplicate([name for name, _ in pairs], columns):
            raise ValueError(f"the key {name!r} occurs twice")
        return dict(pairs)

    for where, line in lines(path):
        try:
            record = json.loads(line, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise InputError(f"--prompts: {where}: invalid JSON: {error}") from None
        if not isinstance(record, dict):
            raise InputError(
                f'--prompts: {where}: expected an object with a non-empty string "prompt", not {type(record).__name__}'
            )
        yield where, record


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
