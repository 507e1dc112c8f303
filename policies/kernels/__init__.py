"""Compiled scalar code: what a decision computes, once, for one stream as for thousands. Imported on first use only.

Importing numba takes half a second, and an import statement inside a decision several microseconds.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import time
from collections.abc import Callable
from types import ModuleType

from ..display import Progress, silent

PATIENCE_S = 2.0
"""Reading compiled kernels back takes less; what takes longer is compiling them, which is worth a word."""


def on_first_use(name: str) -> Callable[[], ModuleType]:
    """Return a function that gives a module of kernels, imported when it is first called."""
    return functools.cache(lambda: importlib.import_module(f".{name}", __name__))


def load(progress: Progress = silent) -> None:
    """Import all kernels, which compiles those that numba's cache folder does not have: so that nothing that is timed does.

    Args:
        progress: see `Progress`; compiling takes some seconds, once on a machine.
    """
    names, began = _names(), time.monotonic()
    for done, name in enumerate(names):
        if time.monotonic() - began > PATIENCE_S:
            progress("compile kernels", done, len(names))
        importlib.import_module(f".{name}", __name__)
    if time.monotonic() - began > PATIENCE_S:
        progress("compile kernels", len(names), len(names))


@functools.cache
def _names() -> tuple[str, ...]:
    inside = pkgutil.iter_modules(__path__, f"{__name__}.")
    return tuple(sorted(module.name.removeprefix(f"{__name__}.") for module in inside))
