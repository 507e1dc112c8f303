"""The package: its public names, and sub-packages that import in one direction."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import specstop as ss

ROOT = Path(__file__).parents[1]
PACKAGES = ("policies", "decode", "collect", "train", "cli")  # each imports only from itself and from those before it
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> list[str]:
    """Return the full name of each module, or name in a module, that a file imports."""
    package = ".".join(["specstop", *path.parent.relative_to(ROOT).parts])
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [f"{module}.{name.name}" for name in node.names]
    return names


def test_imports_run_one_way():
    for path in FILES:
        package = path.relative_to(ROOT).parts[0]
        allowed = PACKAGES[: PACKAGES.index(package) + 1]
        for module in imports(path):
            first, *rest = module.split(".")
            assert first not in PACKAGES, f"{path}: {module} would be a second copy of specstop.{module}"
            assert first != "specstop" or rest[0] in allowed, f"{path}: {package} may not import {module}"


def test_every_public_name_can_be_imported():
    assert {"load_pair", "load_trace", "load_profile", "load_policy", "collect", "measure_profile"} <= set(dir(ss))
    assert {"train", "evaluate", "decode", "bench", "replay", "StopPolicy", "custom_feature"} <= set(dir(ss))
    for name in ss.__all__:
        assert getattr(ss, name) is not None
    assert not hasattr(ss, "evaluat")
    assert ss.__version__[0].isdigit()
    assert (Path(ss.__file__).parent / "py.typed").is_file()


def test_the_import_loads_no_library():
    code = "import sys, specstop; sys.exit(bool({'numpy', 'torch', 'numba', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
