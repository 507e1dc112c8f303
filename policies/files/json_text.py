"""JSON parsing that rejects duplicate keys, because parsers disagree about which of the values is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError


def strict_loads(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON with `json.loads`, but reject objects with duplicate keys.

    Raises:
        ValueError: the text is not JSON, or a key occurs twice; the message names the key.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=parse_constant)


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file.

    Args:
        path: path of the file.
        what: description of the file for messages.

    Raises:
        InputError: the file does not exist, is not valid JSON, or has duplicate keys.
    """
    try:
        return strict_loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{what}: expected the file {path}, which does not exist") from None
    except RecursionError:
        raise InputError(f"{what}: expected JSON in {path}, which is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{what}: expected JSON in {path}, which cannot be read: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} occurs twice; keep one of them")
        values[key] = value
    return values
