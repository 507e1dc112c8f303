"""Text validation and escaping. JSON and command lines can contain lone surrogates, which UTF-8 files cannot store."""

from __future__ import annotations

import re
from typing import Any

HALF = "half a surrogate pair, which is not valid text"


def is_text(value: Any) -> bool:
    """Return whether the string form of a value, or of all items of a list or tuple, can be encoded as UTF-8."""
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
    """Escape text for a Markdown file, so that it contains no HTML, links or control characters.

    Args:
        text: untrusted text, such as ids and names.
        special: characters to escape.
    """
    escaped = "".join("\\" + c if c in special else c for c in printable(text))
    return escaped if "[" in special else escaped.replace("](", "]\\(")


def markdown_cell(text: str, special: str = "<|") -> str:
    """Escape text for a cell of a Markdown table, on one line; see `markdown`."""
    return markdown(" ".join(text.split()), special)
