"""The console: results on standard output; progress, warnings and errors on standard error."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..policies.display import Progress, printable, silent
from ..policies.errors import PolicyFailure

PROGRESS_LINE_S = 5.0
"""Seconds between two lines of progress where standard error is no terminal."""

PHASE_NAMES = {"outside": "framework overhead"}
"""Names of phases of a round for users, where they differ."""


class Interrupted(Exception):
    """Ctrl-C ended a command. The message states how to continue it."""


_results: ContextVar[TextIO | None] = ContextVar("results", default=None)


def results() -> TextIO:
    """Return the stream for results, which is the standard output of the process."""
    return _results.get() or sys.stdout


@contextlib.contextmanager
def prints_on_stderr() -> Iterator[None]:
    """Redirect `sys.stdout` to standard error in the block, so that plugins and libraries do not print into `results()`."""
    token = _results.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _results.reset(token)


def say(text: str) -> None:
    """Write a line to standard error, with control characters escaped. A closed standard error is ignored."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(printable(text) + "\n")


@contextlib.contextmanager
def progress_bars(quiet: bool = False) -> Iterator[Progress]:
    """Yield a progress callback: bars with the remaining time in a terminal, elsewhere a line every few seconds."""
    if quiet:
        yield silent
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _progress_lines()
        return
    from rich.progress import (  # takes 0.05 s
        BarColumn,
        MofNCompleteColumn,
        Progress as Bars,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, completed=done)
            bars.update(tasks[task], completed=done, total=total)

        yield advance


def _progress_lines() -> Progress:
    """Return a callback that prints a line when a task ends, and every few seconds while it advances."""
    begun: dict[str, tuple[float, int]] = {}  # time, and units that were finished then
    printed = time.monotonic()

    def advance(task: str, done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        start, before = begun.setdefault(task, (now, done))
        if done >= total or now - printed >= PROGRESS_LINE_S:
            printed = now
            say(progress_line(task, done, total, done - before, now - start))
        if done >= total:
            del begun[task]  # a task of this name may begin again

    return advance


def progress_line(task: str, done: int, total: int, new: int, seconds: float) -> str:
    """Return the state of a task. The rate counts only the `new` units, not those that a resumed run has loaded."""
    line = f"{task}: {done} of {total}, {human_seconds(seconds)}"
    if new <= 0 or seconds <= 0:
        return line
    rate = new / seconds
    return f"{line}, {rate:.3g}/s" + (f", {human_seconds((total - done) / rate)} left" if done < total else "")


def human_seconds(seconds: float) -> str:
    """Return a time with a suitable unit: 8 s, 3 min, 2.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class _Output(Console):
    """A console that escapes control characters, because names and ids come from files of any origin."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text as it is printed; see `Console.render_str`."""
        return super().render_str(printable(text), **options)


def output(width: int | None = None) -> Console:
    """Return the console of standard output. Outside a terminal it has `width` columns; default: `COLUMNS` or 80."""
    is_terminal = Console(file=results()).is_terminal
    return _Output(file=results(), highlight=False, markup=False, width=None if is_terminal else width)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], wide: bool = False) -> None:
    """Print a table below its title. Columns of numbers are aligned to the right; long text is wrapped.

    Args:
        title: printed above the table.
        columns: their names.
        rows: cells of each row.
        wide: use 200 columns outside a terminal.
    """
    grid = Table(header_style="bold")
    for index, name in enumerate(columns):
        cells = [row[index] for row in rows]
        numbers = all(cell[:1] in "0123456789.-+" for cell in cells)
        short = max(map(len, cells), default=0) <= 30
        grid.add_column(
            name, justify="right" if numbers else "left", no_wrap=short and (numbers or index == 0), overflow="fold"
        )
    for row in rows:
        grid.add_row(*row)
    console = output(200 if wide else None)
    console.print(Text(printable(title), style="bold"), soft_wrap=True)
    console.print(grid)


def next_step(*words: object) -> None:
    """Print the command that most users run next, with placeholders in capitals."""
    output().print(f"Next: specstop {shlex.join(map(str, words))}", soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    results().write(json.dumps(value) + "\n")


def flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a mapping as table rows, with four digits of a number and mappings without brackets."""
    return [(name, _plain(value)) for name, value in values.items()]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_failures(failures: Sequence[PolicyFailure]) -> None:
    """Raise the first failure of a policy. Called after the results are printed."""
    if failures:
        raise failures[0]


def quiet_libraries() -> None:
    """Disable the progress bars and advice of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
