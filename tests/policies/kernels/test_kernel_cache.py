"""Compiled kernels on the disk: what was compiled from other sources is never read."""

from __future__ import annotations

import ast
import os
import shutil
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
from {constants} import SHIFT
@kernel_part
def shifted(x):
    return x + SHIFT + {own}
"""


def call(root: Path, cache: Path) -> float:
    """Return what the kernel `caller` of a package gives for 0 in a process of its own."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", "from package.kernels.caller import caller; print(caller(0.0))"]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small package with the compiler of this one, a kernel, a function that it calls, and a constant elsewhere."""
    package = tmp_path / "root" / "package"
    (package / "kernels").mkdir(parents=True)
    for name in CONSTANTS:
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("SHIFT = 1.0\n")
    shutil.copy(PACKAGE / "compiled.py", package / "kernels" / "compiled.py")
    (package / "kernels" / "caller.py").write_text(CALLER)
    (package / "kernels" / "helper.py").write_text(HELPER.format(constants="..counter_rng", own=10.0))
    return package.parent


def test_a_kernel_is_compiled_again_when_what_it_calls_changes(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    helper, constants = root / "package/kernels/helper.py", root / "package/counter_rng.py"
    assert call(root, cache) == 11.0
    helper.write_text(helper.read_text().replace("10.0", "20.0"))
    assert call(root, cache) == 21.0
    constants.write_text("SHIFT = 2.0\n")
    assert call(root, cache) == 22.0


def test_what_is_read_from_the_cache_is_not_compiled_again_and_old_folders_go(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for shift in range(MAX_STALE + 3):
        (root / "package/counter_rng.py").write_text(f"SHIFT = {float(shift)}\n")
        assert call(root, cache) == 10.0 + shift
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}
    assert len(kept) == MAX_STALE + 1
    assert call(root, cache) == 12.0 + MAX_STALE
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")} == kept


def test_no_folder_that_can_be_written_is_no_error(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert call(root, tmp_path / "file") == 11.0


def test_kernels_import_nothing_that_the_cache_key_leaves_out() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "__init__.py":  # compiles nothing
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1]
                module = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
                inside = str(module.relative_to(PACKAGE.parent))
                assert module.is_relative_to(PACKAGE) or inside in CONSTANTS, (path, inside)
