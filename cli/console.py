"""The console: progress and warnings on standard error, results on standard output."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table

from ..policies.progress import Progress, silent

_PLAIN_EVERY_S = 15.0


def say(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(text + "\n")


@contextlib.contextmanager
def progress_bars(quiet: bool = False) -> Iterator[Progress]:
    """Yield a progress callback: bars with the time left on a terminal, a line now and then elsewhere."""
    if quiet:
        yield silent
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _PlainProgress()
        return
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=False) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
            bars.update(tasks[task], completed=done, total=total)

        yield advance


class _PlainProgress:
    """One line when a task ends, and every 15 seconds in between with the time left."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._last = time.monotonic()

    def __call__(self, task: str, done: int, total: int) -> None:
        now = time.monotonic()
        began = self._began.setdefault(task, now)
        if done < total and now - self._last < _PLAIN_EVERY_S:
            return
        self._last = now
        spent = now - began
        left = f", {spent / done * (total - done):.0f} s left" if 0 < done < total else ""
        say(f"{task}: {done} of {total}, {spent:.0f} s{left}")
        if done >= total:
            self._began.pop(task, None)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; every column but the first is set to the right unless it holds words."""
    grid = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, column in enumerate(columns):
        words = index == 0 or column in ("note", "what", "where")
        grid.add_column(column, justify="left" if words else "right", no_wrap=not words or index == 0)
    for row in rows:
        grid.add_row(*row)
    output().print(grid)


def output() -> Console:
    """Return the console of standard output; where it is no terminal, lines are not wrapped."""
    console = Console(highlight=False, markup=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=200)


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")


def one_line_warnings() -> None:
    """Show warnings as one line each on standard error."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        say(f"warning: {message}")

    warnings.showwarning = show
