"""What is text: anything but half a surrogate pair, which JSON and command lines can carry but no file can hold."""

from __future__ import annotations

import re
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


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, and those that reverse the direction of text: a terminal acts on them."""


def printable(text: str) -> str:
    r"""Return text with its control characters written as escapes, such as `\x1b`; tabs and newlines stay."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def markdown(text: str, special: str = "<") -> str:
    """Return text for a Markdown file in which neither HTML nor a link begins, and no control character is left.

    Args:
        text: may hold ids and names of any origin.
        special: characters to escape.
    """
    escaped = "".join("\\" + c if c in special else c for c in printable(text))
    return escaped if "[" in special else escaped.replace("](", "]\\(")


def markdown_cell(text: str, special: str = "<|") -> str:
    """Return text for a cell of a Markdown table: one line; see `markdown`."""
    return markdown(" ".join(text.split()), special)
