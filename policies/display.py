"""Progress of long operations, and text escaped for terminals and Markdown."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with a task, the number of its units that are finished, and their total. The first call of a task begins it."""

_BARS: dict[str, Any] = {}
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and bidirectional controls. Terminals interpret them."""


def silent(task: str, done: int, total: int) -> None:
    """Report no progress: the default of functions that other functions call."""


def shown(task: str, done: int, total: int) -> None:
    """Show a bar for each task in a terminal or a notebook: the default of functions that people call."""
    if "IPython" not in sys.modules and not sys.stderr.isatty():
        return
    from tqdm.auto import tqdm  # takes 0.1 s

    bar = _BARS.get(task)
    if bar is None or bar.total != total or done < bar.n:  # otherwise the same task continues
        if bar is not None:
            bar.close()
        bar = _BARS[task] = tqdm(desc=task, total=total)
    bar.update(done - bar.n)
    if done >= total:
        _BARS.pop(task).close()


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


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table. Floats have four digits, and None becomes a hyphen."""

    def cell(value: Any) -> str:
        return markdown_cell(f"{value:.4f}" if isinstance(value, float) else "-" if value is None else str(value))

    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)
