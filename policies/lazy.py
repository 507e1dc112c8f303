"""Packages whose names are imported when they are first used: an error class must not cost the import of a model library."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of a package.

    With EAGER_IMPORT in the environment all names are there at once, for tools that look without asking, as pdoc does.

    Args:
        package: its name.
        homes: by module of the package, the names that it offers, with spaces between them.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{home[name]}", package), name)

    if os.environ.get("EAGER_IMPORT"):
        vars(sys.modules[package]).update({name: find(name) for name in home})
    return find, sorted(home)
