"""Scripts of `benchmarks/` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """Return a script, such as `tools/ab`, as the module `benchmark_<name>`."""
    alias = f"benchmark_{Path(name).name}"
    if alias not in sys.modules:
        if str(BENCHMARKS) not in sys.path:
            sys.path.append(str(BENCHMARKS))  # for `harness`
        spec = importlib.util.spec_from_file_location(alias, BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
        spec.loader.exec_module(sys.modules[alias])
    return sys.modules[alias]
