"""The scripts of `benchmarks/` as modules, for tests that run a part of them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> ModuleType:
    """Return a script as the module `benchmark_<name>`: names such as `coverage` are those of installed packages too."""
    _reachable()
    alias = f"benchmark_{name}"
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        spec.loader.exec_module(sys.modules[alias])
    return sys.modules[alias]


def family(name: str) -> ModuleType:
    """Return the module `attacks.<name>`, a family of attacks of `fuzz.py`."""
    _reachable()
    return importlib.import_module(f"attacks.{name}")


def part(name: str, of: str = "noise") -> ModuleType:
    """Return the module `<of>.<name>`, a part of a script: `noise` of `noisy_profiles.py`, `filtered` of `filters.py`."""
    _reachable()
    return importlib.import_module(f"{of}.{name}")


def _reachable() -> None:
    """Let the scripts import what they share."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
