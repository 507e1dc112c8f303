"""How long work reports its progress: a callback, so that libraries stay silent and the console is owned by one room."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as work advances: `done` of `total` units of `task`; the first call of a task opens it."""

    def __call__(self, task: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of `task` are finished."""


def silent(task: str, done: int, total: int) -> None:
    """Report nothing: the default of every library function."""
