"""Reading what is not trusted: plain files only, within limits, and nothing is used before all of it was looked at."""

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

from ..errors import PolicyError
from ..files import MANIFEST
from ..text import strict_loads

MOST_TEXT = 16 << 20
MOST_DATA = 256 << 20
MOST_HEADER = 1 << 20
MOST_SIDE = 1 << 24
IGNORED = frozenset({MANIFEST, ".cache", ".git", ".gitattributes", ".DS_Store"})
"""What `outputs`, the hub, git and a file manager leave in a folder; never read."""

_ITEM = {"F32": 4, "I64": 8, "BOOL": 1}
_SIDE_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\.ubj")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_MOST_LEVELS = 64


def read_plain(path: Path, most: int) -> bytes:
    """Return the bytes of a plain file of at most `most`; a link, a device, a pipe or a larger file is a `PolicyError`."""
    # No link is followed, and a pipe does not wait for a writer; not every system has each of these.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if path.is_symlink():
            raise PolicyError(f"{path.name} is a link; expected a plain file")
        handle = os.open(path, flags)
    except OSError as error:
        raise PolicyError(f"{path.name} cannot be read: {error.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        # Of the open file, not of its name, which may lead elsewhere by now; and no more is read than was allowed.
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise PolicyError(f"{path.name} is no plain file")
        if about.st_size > most:
            raise PolicyError(f"{path.name} has {about.st_size} bytes; expected at most {most}")
        return file.read(most)


def check_side_names(names: Iterable[str]) -> None:
    """Refuse a name of a further file that is anything but `name.ubj`."""
    for name in names:
        if not _SIDE_FILE.fullmatch(name):
            raise PolicyError(f"the further file {name!r} must be called like booster.ubj, without a path")


def check_names(folder: Path, known: Iterable[str], side: Iterable[str], index: str = "policy.json") -> None:
    """Refuse a folder with anything in it but the files `known` and the side files `side`, none of them a link.

    `index` is the file that names them, for messages.

    Raises:
        PolicyError: a name too many, a missing one, a link, a folder, or a side file called anything but `name.ubj`.
    """
    check_side_names(side)
    allowed = {*known, *side}
    found = set()
    for entry in os.scandir(folder):
        if entry.name in IGNORED:
            continue
        if entry.name not in allowed:
            raise PolicyError(
                f"there is a file {entry.name!r} that {index} does not name; expected only {', '.join(sorted(allowed))}"
            )
        if entry.is_symlink() or not entry.is_file(follow_symlinks=False):
            raise PolicyError(f"{entry.name} is a link or no plain file")
        found.add(entry.name)
    if missing := set(side) - found:
        raise PolicyError(f"{', '.join(sorted(missing))} is missing")


def check_text(raw: bytes, name: str) -> None:
    """Refuse bytes that are no UTF-8 text."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        raise PolicyError(f"{name} is no text") from None


def parse_json(raw: bytes, name: str) -> dict[str, Any]:
    """Return a JSON object; double keys and what `check_values` refuses are errors."""
    try:
        value = strict_loads(raw.decode("utf-8"), parse_constant=_refuse)
        check_values(value)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise PolicyError(f"expected JSON in {name}, which cannot be read: {reason}") from None
    if not isinstance(value, dict):
        raise PolicyError(f"expected a JSON object in {name}, not {type(value).__name__}")
    return value


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def check_values(value: Any, levels: int = _MOST_LEVELS) -> None:
    """Refuse, as a `ValueError`, what no JSON of ours holds.

    That is nesting of more than `levels`, numbers that are not finite, control characters and half surrogates.
    """
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError("it is nested too deeply")
        for inner in value:
            check_values(inner, levels - 1)
        for inner in value.values() if isinstance(value, dict) else ():
            check_values(inner, levels - 1)
    elif isinstance(value, str):
        if _CONTROL.search(value):
            raise ValueError("a text has control characters or half surrogates in it")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")


def digest(raw: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object without its entry `sha256`, however it is spaced and ordered."""
    body = {key: value for key, value in raw.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def check_tensor_file(raw: bytes) -> None:
    """Refuse bytes that are no safetensors file of float32, int64 and bool tensors that fill it exactly."""
    # The format: 8 bytes with the length of the header, the header as JSON, the tensors end to end.
    size = int.from_bytes(raw[:8], "little")
    if len(raw) < 10 or size > min(MOST_HEADER, len(raw) - 8) or raw[8:9] != b"{":
        raise PolicyError(f"weights: expected a safetensors file, whose header has at most {MOST_HEADER} bytes")
    header = parse_json(raw[8 : 8 + size], "the header of the weights")
    header.pop("__metadata__", None)  # texts, which nothing reads
    spans = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise PolicyError(f"weights: {name!r} is not described as a tensor is")
        shape, item = entry["shape"], _ITEM.get(str(entry["dtype"]))
        if item is None:
            raise PolicyError(f"weights: {name} is of type {entry['dtype']!r}; expected one of {', '.join(_ITEM)}")
        if not _whole(shape, 8) or not _whole(entry["data_offsets"], 2) or max(shape, default=0) > MOST_SIDE:
            raise PolicyError(f"weights: {name} has the shape {str(shape)[:60]}, which no policy has")
        begin, end = entry["data_offsets"]
        if end - begin != item * math.prod(shape):
            raise PolicyError(f"weights: {name} of shape {shape} does not fill its {end - begin} bytes")
        spans.append((begin, end))
    # Bytes that belong to two tensors or to none could carry what no check has seen.
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise PolicyError("weights: tensors overlap or leave gaps")
        at = end
    if at != len(raw) - 8 - size:
        raise PolicyError(f"weights: tensors end at byte {at} of {len(raw) - 8 - size}")


def _whole(values: Any, most: int) -> bool:
    # By `type`: JSON's true is an int to `isinstance`.
    return isinstance(values, list) and len(values) <= most and all(type(v) is int and v >= 0 for v in values)
