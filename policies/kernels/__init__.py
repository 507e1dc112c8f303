"""Compiled numba kernels. Importing numba takes half a second, so kernels are imported on first use."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import time
from collections.abc import Callable
from types import ModuleType

from ..display import Progress, silent

_QUIET_S = 2.0  # reading compiled kernels takes less; compiling them takes longer and is reported


def on_first_use(name: str) -> Callable[[], ModuleType]:
    """Return a function that imports a module of kernels when first called, and returns it."""
    # An import statement inside a decision costs several microseconds.
    return functools.cache(lambda: importlib.import_module(f".{name}", __name__))


def load(progress: Progress = silent) -> None:
    """Import all kernels, which compiles those that are not in numba's cache (some seconds, once on a machine)."""
    names, started = sorted(module.name for module in pkgutil.iter_modules(__path__)), time.monotonic()
    for done in range(len(names) + 1):
        if time.monotonic() - started > _QUIET_S:
            progress("compile kernels", done, len(names))
        if done < len(names):
            importlib.import_module(f".{names[done]}", __name__)
