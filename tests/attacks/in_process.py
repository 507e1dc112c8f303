"""Running the command line within this process."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import NamedTuple, TextIO
from unittest import mock

import typer.main
from specstop.cli.main import run

_built = functools.cache(typer.main.get_command)
"""Typer makes all commands anew of their functions each time, a tenth of a second; a process of its own runs one."""


class Answer(NamedTuple):
    """What a command answered: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def cli(*args: object, stdout: TextIO | None = None) -> Answer:
    """Run `specstop` with these arguments as its own process would; leave the process as it was.

    With another `stdout` nothing is caught of what is written there.
    """
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        _signals_kept(),
        mock.patch.object(sys, "argv", ["specstop", *map(str, args)]),
        mock.patch.dict(os.environ),
        mock.patch.object(typer.main, "get_command", _built),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(stdout or out),
        contextlib.redirect_stderr(err),
    ):
        try:
            run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Answer(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)
