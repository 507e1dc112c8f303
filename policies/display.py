"""Progress of long operations, tables of results, and text escaped for terminals and Markdown."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class Table(list[dict[str, Any]]):
    """Rows of a result by column name, shown as text in a terminal and as HTML in a notebook.

    None is shown as a hyphen, and a float with four significant digits.
    """

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`."""
        import pandas  # takes half a second

        return pandas.DataFrame(list(self))

    def _cells(self) -> list[list[str]]:
        """Return the cells as text, the names of the columns first."""
        columns = list(dict.fromkeys(name for row in self for name in row))
        return [columns, *([_cell(row.get(name)) for name in columns] for row in self)]

    def __repr__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head, *rows = ([html.escape(text) for text in row] for row in self._cells())
        body = "".join(f"<tr>{''.join(f'<td>{text}</td>' for text in row)}</tr>" for row in rows)
        return f"<table><thead><tr>{''.join(f'<th>{text}</th>' for text in head)}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    return printable("-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))


def training_facts(provenance: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return provenance and metrics of a trained artefact for display: at most six items of a list, no tables."""
    facts = {
        f"provenance: {name}": ", ".join(map(str, value[:6])) if isinstance(value, list) else value
        for name, value in provenance.items()
    }
    return facts | {name: value for name, value in metrics.items() if not isinstance(value, list)}


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
