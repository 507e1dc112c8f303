"""The console: results on standard output; progress, warnings and errors on standard error."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..policies.display import Progress, printable, shown, silent

PROGRESS_LINE_S = 5.0
"""Seconds between two lines of progress where standard error is no terminal."""

PHASE_NAMES = {"outside": "framework overhead"}
"""Names of phases of a round for users, where they differ."""


def show_drafters(rounds: Mapping[str, int]) -> str:
    """Return the number of rounds of each drafter, without those that had none."""
    return ", ".join(f"{name} {count}" for name, count in rounds.items() if count)


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


def print_stderr(text: str) -> None:
    """Write a line to standard error, with control characters escaped. A closed standard error is ignored."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(printable(text) + "\n")


@contextlib.contextmanager
def progress_bars(quiet: bool = False) -> Iterator[Progress]:
    """Yield a progress callback: bars in a terminal, elsewhere a line when a task ends and every few seconds before."""
    if quiet:
        yield silent
    elif sys.stderr is None or not sys.stderr.isatty():
        yield _progress_lines()
    else:
        try:
            yield shown
        except BaseException:
            print_stderr("")  # ends the line of the bar
            raise


def _progress_lines() -> Progress:
    started: dict[str, tuple[float, int]] = {}  # time, and units that were finished then
    printed = time.monotonic()

    def advance(task: str, done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        start, before = started.setdefault(task, (now, done))
        if done >= total or now - printed >= PROGRESS_LINE_S:
            from tqdm import tqdm  # takes 0.1 s

            printed = now
            form = "{elapsed}, {rate_fmt}, {remaining} left"  # the rate is of new units, not of those that a run has loaded
            print_stderr(
                f"{task}: {done} of {total}, {tqdm.format_meter(done, total, now - start, initial=before, bar_format=form)}"
            )
        if done >= total:
            del started[task]  # a task of this name may begin again

    return advance


def write(text: str) -> None:
    """Write a line of results, with control characters escaped: names and ids come from files of any origin."""
    results().write(printable(text) + "\n")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], wide: bool = False) -> None:
    """Print a table below its title. Columns of numbers are aligned to the right; long text is wrapped.

    Args:
        title: printed above the table.
        columns: their names.
        rows: cells of each row.
        wide: use 200 columns outside a terminal, otherwise `COLUMNS` or 80.
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
        grid.add_row(*(Text(printable(cell)) for cell in row))
    is_terminal = Console(file=results()).is_terminal
    console = Console(file=results(), highlight=False, width=200 if wide and not is_terminal else None)
    console.print(Text(printable(title), style="bold"), soft_wrap=True)
    console.print(grid)


def facts(title: str, values: Mapping[str, Any]) -> None:
    """Print a mapping as a table, with four digits of a number and mappings without brackets."""
    table(title, ("what", "value"), [(name, plain(value)) for name, value in values.items()])


def plain(value: Any) -> str:
    """Return a value as the text of a cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(inner)}" for name, inner in value.items())
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def next_step(*words: object) -> None:
    """Print the command that most users run next, with placeholders in capitals."""
    write(f"Next: specstop {shlex.join(map(str, words))}")


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    results().write(json.dumps(value) + "\n")


def quiet_libraries() -> None:
    """Disable the progress bars and advice of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
