"""The families of attacks of `benchmarks/fuzz.py`, for tests that run a seeded sample of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def family(name: str) -> ModuleType:
    """Return the module `attacks.<name>`."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(f"attacks.{name}")
