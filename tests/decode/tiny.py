"""The small models of `benchmarks/architectures.py`, which the suite samples from."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[2] / "benchmarks" / "architectures.py"
_SPEC = importlib.util.spec_from_file_location("benchmark_architectures", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
table = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = table  # dataclasses look their module up
_SPEC.loader.exec_module(table)
