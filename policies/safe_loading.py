"""Reading untrusted folders: only regular files within size limits, and everything is checked before anything is used."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import PolicyError
from .files import MANIFEST
from .text import strict_loads

MOST_TEXT = 16 << 20
MOST_DATA = 256 << 20
IGNORED = frozenset({MANIFEST, ".cache", ".git", ".gitattributes", ".DS_Store"})
"""Left in a folder by `files`, the hub, git and file managers; never read."""

_SIDE_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\.ubj")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_MOST_LEVELS = 64


def read_plain(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises `PolicyError` for links, devices and pipes."""
    # No link is followed, and a pipe does not wait for a writer. Some systems lack some of these flags.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if path.is_symlink():
            raise PolicyError(f"{path.name} is a link; expected a plain file")
        handle = os.open(path, flags)
    except OSError as error:
        raise PolicyError(f"{path.name} cannot be read: {error.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())  # of the open file: the path may have been replaced
        if not stat.S_ISREG(status.st_mode):
            raise PolicyError(f"{path.name} is no plain file")
        if status.st_size > most:
            raise PolicyError(f"{path.name} has {status.st_size} bytes; expected at most {most}")
        return file.read(most)


def check_side_names(names: Iterable[str]) -> None:
    """Raise `PolicyError` unless all names are of the form `name.ubj`."""
    for name in names:
        if not _SIDE_FILE.fullmatch(name):
            raise PolicyError(f"the further file {name!r} must be called like booster.ubj, without a path")


def check_folder(folder: Path, known: Iterable[str], side: Iterable[str], index: str, texts: Iterable[str]) -> None:
    """Check the names of all files in a folder, and the files that are for people.

    Args:
        folder: The folder.
        known: Names of files that may exist.
        side: Names of further files, which must exist.
        index: The file that lists them, for messages.
        texts: Those of `known` that are not used but must be UTF-8 text.

    Raises:
        PolicyError: There is another file, a link or a folder, or a file is missing or not text.
    """
    check_side_names(side)
    allowed, existing = {*known, *side}, set()
    for entry in os.scandir(folder):
        if entry.name in IGNORED:
            continue
        if entry.name not in allowed:
            raise PolicyError(
                f"there is a file {entry.name!r} that {index} does not name; expected only {', '.join(sorted(allowed))}"
            )
        if entry.is_symlink() or not entry.is_file(follow_symlinks=False):
            raise PolicyError(f"{entry.name} is a link or no plain file")
        existing.add(entry.name)
    if missing := set(side) - existing:
        raise PolicyError(f"{', '.join(sorted(missing))} is missing")
    for name in set(texts) & existing:
        try:
            read_plain(folder / name, MOST_TEXT).decode("utf-8")
        except UnicodeDecodeError:
            raise PolicyError(f"{name} is no text") from None


def parse_json(raw: bytes, name: str) -> dict[str, Any]:
    """Return a JSON object. Raises `PolicyError` for duplicate keys and values that `check_values` refuses."""
    try:
        value = strict_loads(raw.decode("utf-8"))
        check_values(value)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise PolicyError(f"expected JSON in {name}, which cannot be read: {reason}") from None
    if not isinstance(value, dict):
        raise PolicyError(f"expected a JSON object in {name}, not {type(value).__name__}")
    return value


def check_values(value: Any, levels: int = _MOST_LEVELS) -> None:
    """Raise `ValueError` for deep nesting, numbers that are not finite, control characters and lone surrogates."""
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError("it is nested too deeply")
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            check_values(inner, levels - 1)
    elif isinstance(value, str) and _CONTROL.search(value):
        raise ValueError("a text has control characters or half surrogates in it")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")


def digest(raw: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object without its entry `sha256`, independent of spaces and order."""
    body = {key: value for key, value in raw.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def check_digest(raw: Mapping[str, Any], name: str) -> None:
    """Raise `PolicyError` unless the entry `sha256` of the JSON object in a file is its `digest`."""
    if raw["sha256"] != digest(raw):
        raise PolicyError(f"{name} is not as it was written (its checksum differs); train or copy it again")
