"""Figures, tables and sections of a report: what they show, and where in its JSON every figure is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
Data = dict[str, Any]


@dataclass(frozen=True)
class Num:
    """A figure of the report: where it is in the JSON, how it is written, and what it is multiplied with before."""

    path: Path
    form: str = ".3f"
    scale: float = 1.0

    @property
    def pointer(self) -> str:
        """The place as a JSON pointer (RFC 6901)."""
        return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in self.path)

    def _found(self, data: Data) -> Any:
        found: Any = data
        for step in self.path:
            found = found[step]
        return found

    def is_known(self, data: Data) -> bool:
        """Whether the JSON has a figure there."""
        return self._found(data) is not None

    def value(self, data: Data) -> float:
        """Return the figure as the JSON has it."""
        return float(self._found(data))

    def text(self, data: Data) -> str:
        """Return the figure as it is shown."""
        shown = f"{self.scale * self.value(data):{self.form}}"
        return shown.replace("-", "") if not shown.strip("-0.,%") else shown  # -0.000 is 0.000


@dataclass(frozen=True)
class Mark:
    """A verdict, shown with its own look."""

    words: str


@dataclass(frozen=True)
class Spread:
    """A ratio of the report with its interval, if it has one: `1.042 [1.021, 1.063]`."""

    path: Path
    digits: int = 3

    def pieces(self, data: Data) -> Parts:
        """Return what it is written of."""
        value, low, high = (Num((*self.path, part), f".{self.digits}f") for part in ("value", "low", "high"))
        return (value, " [", low, ", ", high, "]") if low.is_known(data) else (value,)


Parts = tuple["str | Num | Spread", ...]
Cell = str | Num | Mark | Spread | Parts


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns.

    Attributes:
        caption: what it shows.
        columns, rows: cells; the first one of a row is its name.
        shades: background strengths 0..1 by row and column, or empty.
        notes: words on each row, or empty; the last column of a table of texts.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    shades: tuple[tuple[float, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def heads(self) -> tuple[str, ...]:
        """The columns of `texts`."""
        return (*self.columns, "note") if self.notes else self.columns

    def texts(self, data: Data) -> list[list[str]]:
        """Return the cells as texts."""
        rows = [[cell_text(cell, data) for cell in row] for row in self.rows]
        return [[*row, note] for row, note in zip(rows, self.notes, strict=True)] if self.notes else rows


@dataclass(frozen=True)
class Section:
    """A part of the report; `open` tables stand beside the picture, others are folded away."""

    id: str
    title: str
    words: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    open: bool = False


def nums(path: Path, *names: str, form: str = ".3f") -> tuple[Num, ...]:
    """Return figures of one record, all written alike."""
    return tuple(Num((*path, name), form) for name in names)


def cell_text(cell: Cell, data: Data) -> str:
    """Return a cell as text."""
    if isinstance(cell, Spread):
        return cell_text(cell.pieces(data), data)
    if isinstance(cell, tuple):
        return "".join(cell_text(part, data) for part in cell)
    if isinstance(cell, Num):
        return cell.text(data)
    return cell.words if isinstance(cell, Mark) else cell
