"""The console: progress and warnings on standard error, results on standard output."""

from __future__ import annotations

import contextlib
import json
import shlex
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as Bars,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ...policies.display import Progress, printable, silent
from ...policies.errors import SpecstopWarning
from .streams import results, say

_PLAIN_EVERY_S = 5.0


@contextlib.contextmanager
def progress_bars(quiet: bool = False) -> Iterator[Progress]:
    """Yield a progress callback: bars with the time left on a terminal, a line every few seconds elsewhere."""
    if quiet:
        yield silent
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        plain = _PlainProgress()
        try:
            yield plain
        finally:
            plain.close()
        return
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=False) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, completed=done)
            bars.update(tasks[task], completed=done, total=total)

        yield advance


class _RateColumn(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        """Return the rate of the last while, or of the whole task when it is finished."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g}/s")


class _PlainProgress:
    """Print a line when a task ends, and one about the newest open task every few seconds, even if it does not advance."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, int, int, int]] = {}  # start, units done then, units done now, total
        self._last = time.monotonic()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def __call__(self, task: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            began, before, _, _ = self._open.get(task, (now, done, done, total))
            self._open[task] = began, before, done, total
            if done >= total or now - self._last >= _PLAIN_EVERY_S:
                self._print(task, now)
            if done >= total:
                del self._open[task]  # a task of this name may begin again

    def close(self) -> None:
        """Stop printing."""
        self._closed.set()
        self._thread.join(1.0)

    def _repeat(self) -> None:
        while not self._closed.wait(_PLAIN_EVERY_S / 5):
            with self._lock:
                now = time.monotonic()
                if self._open and now - self._last >= _PLAIN_EVERY_S:
                    self._print(list(self._open)[-1], now)

    def _print(self, task: str, now: float) -> None:
        began, before, done, total = self._open[task]
        self._last = now
        say(progress_line(task, done, total, done - before, now - began))


def progress_line(task: str, done: int, total: int, new: int, spent: float) -> str:
    """Return how far a task is; the rate counts the `new` units only, not those that a resumed run found done."""
    line = f"{task}: {done} of {total}, {human_seconds(spent)}"
    if new <= 0 or spent <= 0:
        return line
    rate = new / spent
    return f"{line}, {rate:.3g}/s" + (f", {human_seconds((total - done) / rate)} left" if done < total else "")


def human_seconds(seconds: float) -> str:
    """Return a time as people say it: 8 s, 3 min, 2.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def human_bytes(count: float) -> str:
    """Return a size in decimal units: 730 kB, 1.2 GB."""
    unit = "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table below its title; every column but the first is set to the right unless it holds words."""
    grid = Table(header_style="bold")
    for index, column in enumerate(columns):
        words = index == 0 or column in ("note", "what", "where", "value")
        grid.add_column(column, justify="left" if words else "right", no_wrap=not words or index == 0)
    for row in rows:
        grid.add_row(*row)
    console = output()
    console.print(Text(printable(title), style="bold"))  # a title of the table's own is folded to its width
    console.print(grid)


def next_step(*words: object) -> None:
    """Print the command that most people type next; what they fill in stands in capitals."""
    output().print(f"Next: specstop {shlex.join(map(str, words))}", soft_wrap=True)


def output() -> Console:
    """Return the console of standard output; where it is no terminal, lines are not wrapped."""
    console = _Output(file=results(), highlight=False, markup=False, soft_wrap=False)
    return console if console.is_terminal else _Output(file=results(), highlight=False, markup=False, width=200)


class _Output(Console):
    """A console that escapes control characters: ids and names come from files of any origin."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text as it is printed, also that of table cells; see `Console.render_str`."""
        return super().render_str(printable(text), **options)


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    results().write(json.dumps(value) + "\n")


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
        say(f"warning: {message.command_line if isinstance(message, SpecstopWarning) else message}")

    warnings.showwarning = show
