"""Parsing of JSON from outside, and validation and escaping of text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import InputError

HALF = "half a surrogate pair, which is not valid text"


def strict_loads(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON. Raises `ValueError` for a duplicate key, because parsers disagree about which of the values is used."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=parse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} occurs twice; keep one of them")
        values[key] = value
    return values


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file, described in messages as `what`.

    Raises:
        InputError: The file does not exist, is not valid JSON, or has duplicate keys.
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


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and bidirectional controls. Terminals interpret them."""


def printable(text: str) -> str:
    r"""Return text with control characters escaped, such as `\x1b`. Tabs and newlines are not escaped."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def markdown(text: str, special: str = "<") -> str:
    """Escape untrusted text for Markdown: no HTML, links or control characters, and a backslash before `special`."""
    escaped = "".join("\\" + c if c in special else c for c in printable(text))
    return escaped if "[" in special else escaped.replace("](", "]\\(")


def markdown_cell(text: str, special: str = "<|") -> str:
    """Escape text for a cell of a Markdown table, on one line; see `markdown`."""
    return markdown(" ".join(text.split()), special)
