"""Running the command line within the test process."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from specstop.cli.main import COMMANDS, run

__all__ = ["COMMANDS", "Answer", "cli", "files"]


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def cli(*args: object) -> Answer:
    """Run `specstop` with these arguments as its own process would; leave the process as it was."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["specstop", *map(str, args)]),
        mock.patch.dict(os.environ),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Answer(code, out.getvalue(), err.getvalue())


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
