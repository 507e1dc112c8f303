"""Running the command line within the test process."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unittest import mock

import pytest
import typer.main
from specstop.cli.main import COMMANDS, run

__all__ = ["COMMANDS", "Answer", "cli"]

COMPACT = ("--dtype", "float64")
"""The exact forward."""

_built = functools.cache(typer.main.get_command)
"""Cached: Typer builds all commands at each call, which takes 0.1 s."""


class Answer(NamedTuple):
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str


def cli(*args: object, stdout: TextIO | None = None) -> Answer:
    """Run `specstop` with these arguments as a process would, and restore the state of this process.

    With `stdout`, output is written there and not captured.
    """
    out, err, code = io.StringIO(), io.StringIO(), 0
    handler = signal.getsignal(signal.SIGINT)
    with (
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
        finally:
            signal.signal(signal.SIGINT, handler)
    return Answer(code, out.getvalue(), err.getvalue())


def parsed(*args: object) -> Any:
    """Run a command that succeeds without warnings, and return its line of JSON."""
    answer = cli(*args, "--json")
    assert (answer.code, answer.err, answer.out.count("\n")) == (0, "", 1), answer.err
    return json.loads(answer.out)


def refused(*args: object) -> str:
    """Run a command that fails with one line on standard error, after warnings at most, and without a result."""
    answer = cli(*args)
    assert (answer.code, answer.out) == (2, ""), answer
    *warned, line = answer.err.splitlines()
    assert line.startswith("specstop: ") and all(text.startswith("warning: ") for text in warned), answer.err
    return line


def model_options(folder: Path, *more: str) -> list[str]:
    """Return the options that name the pair in a folder, and more of them."""
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"), *more]


def write_prompts(path: Path, prompts: Iterable[Any]) -> Path:
    """Write prompts as JSON Lines and return the path."""
    lines = ({"id": prompt.id, "prompt": prompt.text, "group": prompt.id[-1]} for prompt in prompts)
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@contextlib.contextmanager
def loading_once() -> Iterator[None]:
    """Load each pair once for all commands."""
    from specstop.decode.models import pair

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "load_pair", functools.cache(pair.load_pair))
        yield


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def during(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int = 0) -> None:
    """Send SIGINT when this function is called, except for the first `after` times."""
    original, calls = getattr(owner, name), itertools.count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == after:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)
