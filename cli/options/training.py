"""The options of fits by lightning, of heads and drafters, and key=value parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ...policies.errors import InputError
from .shared import Resume


@dataclass(frozen=True)
class Training:
    """Options of `train` and `train-drafter`."""

    trainer: Annotated[
        list[str],
        typer.Option(help="Argument of lightning's Trainer as key=value, such as accelerator=gpu; repeatable."),
    ] = field(default_factory=list)
    checkpoints: Annotated[
        Path | None, typer.Option(help="Work folder: trials of a search, or texts and checkpoints of a drafter.")
    ] = None
    resume: Resume = False

    def __post_init__(self) -> None:
        if self.resume and self.checkpoints is None:
            raise InputError("--resume: give the work folder of the interrupted run with --checkpoints")


def key_values(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return key=value texts as a dictionary of booleans, integers, floats or strings."""
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"--{option}: expected key=value, not {text!r}")
        values[key] = _value(value)
    return values


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
