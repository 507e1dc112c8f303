"""What every command does before its own work: see that its results do not land on what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from ..policies.outputs import RUN_FILE, Input, beside, refuse_inputs
from .config import given_config

NAMES = ("prompts", "target", "draft", "policy", "logging_policy")
"""Options whose values may be files without being paths by their type: a name on the hub, a built-in policy."""


class Command(TyperCommand):
    """A command that refuses an output that is, holds or lies in anything that its other options name."""

    def invoke(self, ctx: Any) -> Any:
        """Check the paths, then run the command.

        Raises:
            InputError: see `refuse_inputs`.
        """
        values = dict(ctx.params)
        out, work, config = (values.pop(name, None) for name in ("out", "checkpoints", "config"))
        read: list[Input] = [path for name, value in values.items() for path in _paths(name, value)]
        if work is not None:
            refuse_inputs(work, read, "--checkpoints")
        if out is not None:
            completes = self.name == "collect" and values["resume"] and not beside(out).exists()
            if config is not None and not completes:
                read.append(given_config(out / RUN_FILE))
            refuse_inputs(out, [*read, work])
        return super().invoke(ctx)


def _paths(name: str, value: Any) -> Iterator[str | Path]:
    """Yield the paths among the values of an option."""
    for one in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(one, Path) or (name in NAMES and isinstance(one, str)):
            yield one
