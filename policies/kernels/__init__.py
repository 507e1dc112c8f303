"""Compiled numba kernels. Modules of kernels are imported on first use."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import time
from collections.abc import Callable
from types import ModuleType

from ..display import Progress, silent

_QUIET_S = 2.0  # reading compiled kernels takes less; compiling them takes longer and is reported


def on_first_use(name: str) -> Callable[[], ModuleType]:
    """Return a function that imports a module of kernels when first called, and returns it."""
    # An import statement inside a decision costs several microseconds.
    return functools.cache(lambda: importlib.import_module(f".{name}", __name__))


def load(progress: Progress = silent, *policies: object) -> None:
    """Compile all kernels, those in the modules of `policies` too. Kernels in numba's cache are only read.

    Compiling takes some seconds, once on a machine.
    """
    from .compiled import Kernel

    names, started = sorted(module.name for module in pkgutil.iter_modules(__path__)), time.monotonic()
    modules = [importlib.import_module(f".{name}", __name__) for name in names]
    classes = [kind for policy in policies for kind in type(policy).__mro__ if kind is not object]
    modules += [sys.modules[kind.__module__] for kind in dict.fromkeys(classes) if kind.__module__ in sys.modules]
    for done, module in enumerate(modules):
        for value in list(vars(module).values()):
            if isinstance(value, Kernel):
                value.compiled  # noqa: B018
        if time.monotonic() - started > _QUIET_S:
            progress("compile kernels", done + 1, len(modules))
