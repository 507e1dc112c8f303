"""Running the command line within the test process."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmark_scripts import family
from specstop.cli.main import COMMANDS

__all__ = ["COMMANDS", "COMPACT", "Answer", "ascii_locale", "cli", "files", "loading_once", "model_options"]

Answer, cli = family("in_process").Answer, family("in_process").cli

COMPACT = ("--dtype", "float64")
"""The exact forward."""


def model_options(folder: Path, *more: str) -> list[str]:
    """Return the options that name the pair in a folder, and more of them."""
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"), *more]


@contextlib.contextmanager
def loading_once() -> Iterator[None]:
    """Have commands load each pair once, where many read the same one and loading is not what is tested."""
    from specstop.decode.models import pair

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "load_pair", functools.cache(pair.load_pair))
        yield


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def ascii_locale() -> dict[str, str]:
    """Return the environment of a process whose locale knows ASCII only.

    PYTHONUTF8 and PYTHONCOERCECLOCALE keep Python from choosing UTF-8 in its place.
    """
    return {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
