"""How long work reports its progress: a callback, so that whoever runs it says where the progress goes."""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Progress(Protocol):
    """Called as work advances: `done` of `total` units of `task`; the first call of a task opens it."""

    def __call__(self, task: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of `task` are finished."""


def silent(task: str, done: int, total: int) -> None:
    """Report nothing: the default of what works for other functions."""


_BARS: dict[str, Any] = {}


def shown(task: str, done: int, total: int) -> None:
    """Show a bar for each task in a terminal or a notebook, and nothing where there is neither.

    The default of functions that people call: commands own their console, and say otherwise.
    """
    if "IPython" not in sys.modules and not sys.stderr.isatty():
        return
    from tqdm.auto import tqdm  # takes .1 s

    bar = _BARS.get(task)
    if bar is None or bar.total != total or done < bar.n:  # else it is the same work that goes on
        if bar is not None:
            bar.close()
        bar = _BARS[task] = tqdm(desc=task, total=total)
    bar.update(done - bar.n)
    if done >= total:
        _BARS.pop(task).close()
