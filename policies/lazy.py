"""Importing names when they are first used, since an error class must not cost a model library; and all of a folder."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
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


def modules(package: ModuleType) -> list[ModuleType]:
    """Return all modules of a folder, imported: for what is entered where it is defined."""
    return [
        importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
    ]
