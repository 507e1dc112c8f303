"""SHA-256 of every shard: recorded before a shard takes its name, checked when a trace is opened.

trace/checksums/train-00000-of-00008.sha256     one line, as `sha256sum -c` reads it
trace/index.json                                every shard of a complete trace: rows, bytes, checksum
trace/quarantine/                               what `--repair` moved aside
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...policies.errors import TraceError
from ...policies.files import sha256
from ..schema import HEADER_KEY, Header, arrow_schema
from .staging import put

INDEX_FILE = "index.json"
QUARANTINE = "quarantine"
_SHARD_NAME = re.compile(r"train-(\d{5})-of-(\d{5})\.parquet")


def shard_path(folder: Path, index: int, count: int) -> Path:
    """Return where shard `index` of `count` lies."""
    return folder / "data" / f"train-{index:05d}-of-{count:05d}.parquet"


def checksum_path(shard: Path) -> Path:
    """Return where the checksum of a shard lies."""
    return shard.parents[1] / "checksums" / f"{shard.stem}.sha256"


def record_checksum(stage: Path, shard: Path) -> None:
    """Write down the checksum of a shard that is still under its temporary name."""
    put(checksum_path(shard), f"{sha256(stage)}  data/{shard.name}\n")


def _present(folder: Path, header: Header) -> list[int]:
    """Return the indices of the names that shards have, in order: by the folder, as a header may count shards without files.

    Raises:
        TraceError: a file is a shard of another number of shards.
    """
    found = []
    for name in os.listdir(folder / "data") if (folder / "data").is_dir() else ():
        if match := _SHARD_NAME.fullmatch(name):
            index, count = int(match[1]), int(match[2])
            if count != header.shards or index >= count:
                raise TraceError(
                    f"traces: expected {header.shards} shards, as the header of {folder} says, got data/{name}; restore the "
                    "header, or move that file away"
                )
            found.append(index)
    return sorted(found)


def finished(folder: Path, header: Header) -> set[int]:
    """Return the indices of the shards that are there."""
    return {i for i in _present(folder, header) if shard_path(folder, i, header.shards).is_file()}


def recorded_checksum(shard: Path) -> str | None:
    """Return the checksum written down for a shard; None for one of an older specstop, which wrote none."""
    try:
        words = checksum_path(shard).read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        return "unreadable"
    return words[0] if words else "unreadable"


def damage(shard: Path, header: Header) -> str:
    """Return what is wrong with a shard, or an empty string.

    A shard with a recorded checksum is hashed; one without is read from end to end.
    """
    if not shard.is_file():
        return "it is no file"
    recorded = recorded_checksum(shard)
    if recorded is not None and sha256(shard) != recorded:
        return "its SHA-256 is not the recorded one, so its bytes have changed since it was written"
    try:
        schema = pq.read_schema(shard) if recorded is not None else pq.read_table(shard, memory_map=True).schema
    except (OSError, pa.ArrowInvalid) as error:
        return str(error).splitlines()[0]
    return _foreign(schema, shard, header)


def _foreign(schema: pa.Schema, shard: Path, header: Header) -> str:
    """Return in what a shard is of another run, or an empty string."""
    try:
        own = Header.from_json((schema.metadata or {}).get(HEADER_KEY, b"{}"), str(shard))
    except TraceError as error:
        return error.command_line
    if not schema.equals(arrow_schema(header)) or own.differences(header):
        return "it is of another run than header.json"
    return ""


def quarantine(folder: Path, header: Header, index: int) -> Path:
    """Move a damaged shard and its checksum aside, where no reader looks, and return where the shard went."""
    shard = shard_path(folder, index, header.shards)
    aside = folder / QUARANTINE
    aside.mkdir(exist_ok=True)
    names = (aside / f"{shard.name}.{number}" for number in itertools.count())
    moved = next(path for path in names if not os.path.lexists(path))
    (folder / INDEX_FILE).unlink(missing_ok=True)
    os.replace(shard, moved)  # first: a damaged shard that a kill left without its checksum would pass for an older one
    if checksum_path(shard).exists():
        os.replace(checksum_path(shard), aside / f"{moved.name}.sha256")
    return moved


def write_index(folder: Path, header: Header) -> int:
    """Write the index of a complete trace and return its number of rows.

    A shard that has no checksum yet, as of an older specstop, gets one.
    """
    shards = []
    for index in range(header.shards):
        shard = shard_path(folder, index, header.shards)
        if recorded_checksum(shard) is None:
            record_checksum(shard, shard)
        shards.append(
            {
                "file": f"data/{shard.name}",
                "rows": pq.read_metadata(shard).num_rows,
                "bytes": shard.stat().st_size,
                "sha256": recorded_checksum(shard),
            }
        )
    rows = sum(int(shard["rows"]) for shard in shards)
    put(folder / INDEX_FILE, json.dumps({"rows": rows, "shards": shards}, indent=1) + "\n")
    return rows


@dataclass(frozen=True)
class Checked:
    """What `merge` found: rows of the complete trace, shards that are missing, and where damaged ones went."""

    rows: int
    missing: tuple[int, ...]
    moved: tuple[Path, ...]

    def facts(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {"rows": self.rows, "missing": list(self.missing), "quarantined": [str(p) for p in self.moved]}


def check_shards(
    folder: Path, header: Header, *, repair: bool = False, among: Collection[int] | None = None
) -> tuple[Path, ...]:
    """Check every shard that is there (of those `among`); return where damaged ones were moved to.

    Raises:
        TraceError: a shard is damaged and `repair` is not given.
    """
    moved = []
    for index in _present(folder, header):
        shard = shard_path(folder, index, header.shards)
        if (among is None or index in among) and (what := damage(shard, header)):
            if not repair:
                raise TraceError(damaged_text(folder, header, index, what))
            moved.append(quarantine(folder, header, index))
    return tuple(moved)


def damaged_text(folder: Path, header: Header, index: int, what: str) -> str:
    """Return the message that names a damaged shard and says what to do."""
    return (
        f"traces: the shard {shard_path(folder, index, header.shards)} cannot be read: {what}; "
        f"`specstop merge --repair {folder}` moves it aside, and collecting again with --resume makes it good"
    )
