"""The standard streams: lines on standard error, and outputs that are closed, full, or cannot show a character."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

from ..policies.errors import InputError


def say(text: str) -> None:
    """Write a line to standard error, if anything can be written there."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")


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
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
    if closed:
        sys.stdout = os.fdopen(1, "w")
        raise InputError("standard output is closed; to see nothing of the results, send it to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def let_go(stream: TextIO) -> OSError | None:
    """Write out what a stream still holds; where that fails, drop it and return why.

    Otherwise it would fail once more when the process ends, with an exit code and lines of the interpreter's own.
    """
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None
