"""What every command does before its own work: check numbers and texts, and that no result lands on what is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from ..policies.arguments import check_limits
from ..policies.errors import InputError
from ..policies.files import RUN_FILE, Input, check_separate, is_text, staging_path
from .console.streams import only_results_on_stdout
from .options.config import given_config

NAMES = ("prompts", "target", "draft", "policy", "logging_policy")
"""Options whose values may be files without being paths by their type: a name on the hub, a built-in policy."""


class Command(TyperCommand):
    """A command that refuses numbers out of range and an output that is, holds or lies in what its other options name."""

    def invoke(self, ctx: Any) -> Any:
        """Check what the options say, then run the command: before a model is loaded or a prompt read.

        Raises:
            InputError: a value is no text, or see `check_limits` and `check_separate`.
        """
        for name, value in ctx.params.items():
            _check_text(name, value)
        # Texts are lists of numbers, as of batch sizes; who reads them checks each.
        check_limits(**{name: value for name, value in ctx.params.items() if not isinstance(value, str)})
        values = dict(ctx.params)
        out, work, config = (values.pop(name, None) for name in ("out", "checkpoints", "config"))
        read: list[Input] = [path for name, value in values.items() for path in _paths(name, value)]
        if work is not None:
            check_separate(work, read, "--checkpoints")
        if out is not None:
            # `collect --resume` adds to `out` and may read the run.yaml there; what replaces it must not take its --config.
            completes = self.name == "collect" and values["resume"] and not staging_path(out).exists()
            if config is not None and not completes:
                read.append(given_config(out / RUN_FILE))
            check_separate(out, [*read, work])
        with only_results_on_stdout():
            return super().invoke(ctx)


def _paths(name: str, value: Any) -> Iterator[str | Path]:
    """Yield the paths among the values of an option."""
    for one in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(one, Path) or (name in NAMES and isinstance(one, str)):
            yield one


def _check_text(name: str, value: Any) -> None:
    if not is_text(value):
        given = ascii([*map(str, value)] if isinstance(value, (list, tuple)) else str(value))
        raise InputError(
            f"--{name.replace('_', '-')}: {given} is no text in the encoding of this locale "
            f"({sys.getfilesystemencoding()}); choose a locale of UTF-8, or another name"
        )
