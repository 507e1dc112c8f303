"""JSON without duplicate keys, of which one parser takes the first and another the last."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError


def strict_loads(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON as `json.loads` does, but refuse an object that has a key twice.

    Raises:
        ValueError: the text is not JSON, or a key occurs twice; the message names the key.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=parse_constant)


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file; a missing or broken one, or one with duplicate keys, is an `InputError` that names it as `what`."""
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
