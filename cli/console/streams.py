"""The standard streams: lines on standard error, and outputs that are closed, full, or cannot show a character."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from ...policies.display import printable
from ...policies.errors import InputError


def say(text: str) -> None:
    """Write a line to standard error, if anything can be written there; control characters are escaped."""
    with contextlib.suppress(OSError):
        sys.stderr.write(printable(text) + "\n")


def prepare() -> None:
    """Let characters that standard output cannot show degrade, and see to it that all three streams are there.

    Raises:
        InputError: standard output is closed.
    """
    closed = sys.stdout is None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # its number would be that of the next file opened, and what is printed would go into that
            # The system gives out the lowest free number, which is this one: those below are open by now.
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
    if closed:
        sys.stdout = os.fdopen(1, "w")
        raise InputError("standard output is closed; to see nothing of the results, send it to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
        with contextlib.suppress(OSError):  # one that is no file, as in tests
            # A stream of ours, so that its failures can be told from those of files.
            raw = _Output(sys.stdout.fileno(), "w", closefd=False)
            lines = sys.stdout.line_buffering
            sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), sys.stdout.encoding, "replace", line_buffering=lines)


_results: TextIO | None = None


def results() -> TextIO:
    """Return the stream for results: the standard output that the command was started with."""
    return _results or sys.stdout


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Redirect `sys.stdout` to standard error within the block, so that prints of plugins do not mix with `results()`."""
    global _results
    before = _results, sys.stdout, sys.stderr
    _results, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        _results, sys.stdout, sys.stderr = before


class _Output(io.FileIO):
    """A file that remembers why it could not be written to: an error of the system does not say whose it is."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes; see `io.FileIO`."""
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def failure(stream: Any) -> OSError | None:
    """Return why a stream that `prepare` has seen could not be written to, if it could not."""
    error: OSError | None = getattr(getattr(getattr(stream, "buffer", None), "raw", None), "failure", None)
    return error


def let_go(stream: TextIO) -> None:
    """Write out what a stream still holds, or drop it where that fails.

    Otherwise it would fail once more when the process ends, with an exit code and lines of the interpreter's own.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
