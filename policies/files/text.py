"""What is text: anything but half a surrogate pair, which JSON and command lines can carry but no file can hold."""

from __future__ import annotations

from typing import Any

HALF = "half a surrogate pair, which is no text"


def is_text(value: Any) -> bool:
    """Whether a value, in the words that stand for it, can be written as UTF-8; containers with all that they hold."""
    if isinstance(value, (list, tuple)):
        return all(map(is_text, value))
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True
