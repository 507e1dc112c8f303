"""Compiled kernels on disk: code that was compiled from other sources is never used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from specstop.policies import kernels
from specstop.policies.kernels.compiled import CONSTANTS, MAX_STALE

PACKAGE = Path(kernels.__file__).parent
CALLER = """
from .compiled import kernel
from .helper import shifted
@kernel("float64(float64)")
def caller(x):
    return shifted(x)
"""
HELPER = """
from .compiled import kernel_part
from ..counter_rng import SHIFT
@kernel_part
def shifted(x):
    return x + SHIFT + 10.0
"""


@pytest.fixture
def root(tmp_path):
    """A small package with this compiler, a kernel, a function that it calls, and a constant in another module."""
    package = tmp_path / "root" / "package"
    (package / "kernels").mkdir(parents=True)
    for name in CONSTANTS:
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("SHIFT = 1.0\n")
    compiler = (PACKAGE / "compiled.py").read_text().replace(f"MAX_STALE = {MAX_STALE}", "MAX_STALE = 1")
    (package / "kernels" / "compiled.py").write_text(compiler)
    (package / "kernels" / "caller.py").write_text(CALLER)
    (package / "kernels" / "helper.py").write_text(HELPER)
    return package.parent


def test_a_kernel_is_compiled_again_only_when_a_source_changes(root, tmp_path):
    cache, helper = tmp_path / "cache", root / "package/kernels/helper.py"

    def call() -> float:
        command = [sys.executable, "-c", "from package.kernels.caller import caller; print(caller(0.0))"]
        python_path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": python_path}
        return float(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)

    assert call() == 11.0
    helper.write_text(HELPER.replace("10.0", "20.0"))
    assert call() == 21.0
    (root / "package/counter_rng.py").write_text("SHIFT = 2.0\n")
    assert call() == 22.0
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}
    assert len(files) == 2, "of three versions; older folders are deleted"
    assert call() == 22.0
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")} == files


def test_kernels_import_only_sources_of_the_cache_key():
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "__init__.py":  # compiles nothing
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                module = path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
                assert module.is_relative_to(PACKAGE) or str(module.relative_to(PACKAGE.parent)) in CONSTANTS, path
