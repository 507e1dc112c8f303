"""Reading of untrusted JSON and folders. Everything is checked before anything is used.

A folder consists of a JSON file, `weights.safetensors`, and files that are not read. The JSON file contains checksums of
itself and of the other files, so a folder that was damaged or edited by hand is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .errors import InputError, PolicyError
from .files import MANIFEST, RUN_FILE

WEIGHTS_FILE, CARD_FILE = "weights.safetensors", "README.md"
MAX_TEXT_BYTES = 16 << 20
MAX_DATA_BYTES = 256 << 20
SURROGATE = "half a surrogate pair, which is not valid text"

_UNREAD = frozenset({CARD_FILE, RUN_FILE, MANIFEST, ".cache", ".git", ".gitattributes", ".DS_Store"})
"""Files for people, and what the hub, git and file managers leave in a folder."""

_SIDE_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\.ubj")
_CHANGED = "was changed after it was written (its checksum differs); train or copy it again"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def strict_loads(text: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError` for a duplicate key, because parsers disagree about which of the values is used."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(
                f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice; keep one of them"
            )
        return values

    return json.loads(text, object_pairs_hook=unique)


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file, described in messages as `what`.

    Raises:
        InputError: the file does not exist, is not valid JSON, or has duplicate keys.
    """
    try:
        return strict_loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{what}: expected the file {path}, which does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{what}: expected JSON in {path}, which cannot be read: {error}") from None


def is_text(value: Any) -> bool:
    """Whether the string form of a value, or of all items of a list, can be encoded as UTF-8 (no lone surrogates)."""
    if isinstance(value, (list, tuple)):
        return all(map(is_text, value))
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def check_values(value: Any, levels: int = 64) -> None:
    """Raise `ValueError` for deep nesting, numbers that are not finite, control characters and lone surrogates."""
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError("it is nested too deeply")
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            check_values(inner, levels - 1)
    elif isinstance(value, str) and _CONTROL.search(value):
        raise ValueError("a text contains control characters or lone surrogates")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")


def digest(raw: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object without its entry `sha256`, independent of spaces and order."""
    body = {key: value for key, value in raw.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read_plain(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises `PolicyError` for links, devices, pipes and large files."""
    # No link is followed, and a pipe does not wait for a writer. These flags do not exist on every system.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if path.is_symlink():
            raise PolicyError(f"{path.name} is a link; expected a regular file")
        handle = os.open(path, flags)
    except OSError as error:
        raise PolicyError(f"{path.name} cannot be read: {error.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())  # of the open file, because the path may have been replaced
        if not stat.S_ISREG(status.st_mode):
            raise PolicyError(f"{path.name} is not a regular file")
        if status.st_size > max_bytes:
            raise PolicyError(f"{path.name} has {status.st_size} bytes; expected at most {max_bytes}")
        return file.read(max_bytes)


def read_signed_json(path: Path, schema: int, keys: Collection[str]) -> dict[str, Any]:
    """Return the JSON object in a file, with the entries `schema`, `sha256` and `keys`.

    Raises:
        PolicyError: the file is not such an object, or was changed after it was written.
    """
    data = read_plain(path, MAX_TEXT_BYTES)
    try:
        raw = strict_loads(data.decode())
        check_values(raw)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise PolicyError(f"{path.name}: expected JSON, which cannot be read: {reason}") from None
    if not isinstance(raw, dict):
        raise PolicyError(f"{path.name}: expected a JSON object, not {type(raw).__name__}")
    if type(raw.get("schema")) is not int or raw["schema"] != schema:
        raise PolicyError(f"it has schema {raw.get('schema')!r}, but this specstop reads {schema}; train it again")
    if unexpected := sorted(set(raw) ^ {"schema", "sha256", *keys}):
        raise PolicyError(f"{path.name} has keys missing or unknown: {', '.join(map(repr, unexpected))}")
    if digest(raw) != raw["sha256"]:
        raise PolicyError(f"{path.name} {_CHANGED}")
    return raw


def check_side_names(names: Collection[str]) -> None:
    """Raise `PolicyError` unless all names are of the form `name.ubj`."""
    for name in names:
        if not _SIDE_FILE.fullmatch(name):
            raise PolicyError(f"expected a name such as booster.ubj for a further file, without a path, not {name!r}")


def read_files(
    folder: Path, index: str, digests: Mapping[str, str], max_bytes: int = MAX_DATA_BYTES
) -> dict[str, bytes]:
    """Return the files of a folder that the JSON file `index` lists with their SHA-256.

    Raises:
        PolicyError: a listed file is missing, too large or changed, or the folder contains an unlisted file.
    """
    check_side_names(set(digests) - {WEIGHTS_FILE})
    for entry in os.scandir(folder):
        if entry.name not in {index, *digests, *_UNREAD}:
            raise PolicyError(f"the file {entry.name!r} is not listed in {index}; remove it")
    contents = {name: read_plain(folder / name, max_bytes) for name in digests}
    for name, data in contents.items():
        if hashlib.sha256(data).hexdigest() != digests[name]:
            raise PolicyError(f"{name} {_CHANGED}")
        if name != WEIGHTS_FILE and data[:1] != b"{":  # UBJSON begins an object as JSON does
            raise PolicyError(f"{name} is not UBJSON")
    return contents  # not read a second time, because files could be replaced
