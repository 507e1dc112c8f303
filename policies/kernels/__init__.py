"""Compiled scalar code: what a decision computes, once, for one stream as for thousands. Imported on first use only."""

from __future__ import annotations

import importlib
import pkgutil

from ..progress import Progress, silent


def load(progress: Progress = silent) -> None:
    """Import all kernels, which compiles those that numba's cache folder does not have: so that nothing that is timed does.

    Args:
        progress: see `Progress`; compiling takes some seconds, once per machine.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    for done, name in enumerate(names):
        progress("compile", done, len(names))
        importlib.import_module(f".{name}", __name__)
    progress("compile", len(names), len(names))
