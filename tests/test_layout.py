"""Packages are listed in pyproject.toml and import in one direction."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = ("policies", "decode", "collect", "train", "cli")  # each imports only from itself and from those before it
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    return ".".join(["specstop", *path.relative_to(ROOT).with_suffix("").parts])


@functools.cache
def imports(path: Path) -> list[str]:
    """Return the dotted module and name of each import statement."""
    here = module_name(path).split(".")
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names += [".".join([*module, name.name]) for name in node.names]
    return names


def test_pyproject_lists_every_package() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {f"specstop.{relative(path.parent).replace('/', '.')}" for path in FILES}
    assert set(setuptools["packages"]) == {"specstop", *folders}


def test_imports_run_one_way() -> None:
    for path in FILES:
        package = path.relative_to(ROOT).parts[0]
        allowed = PACKAGES[: PACKAGES.index(package) + 1]
        for module in imports(path):
            first, *rest = module.split(".")
            assert first not in PACKAGES, f"{relative(path)}: {module} would be a second copy of specstop.{module}"
            if first == "specstop":
                assert rest[0] in allowed, f"{relative(path)}: {package} may not import {module}"


def test_no_two_modules_import_each_other() -> None:
    names = {module_name(path) for path in FILES if path.name != "__init__.py"}
    graph = {}
    for path in FILES:
        if module_name(path) in names:
            targets = set(imports(path)) | {name.rpartition(".")[0] for name in imports(path)}
            graph[module_name(path)] = (targets & names) - {module_name(path)}
    assert sum(map(len, graph.values())) > 30
    graphlib.TopologicalSorter(graph).prepare()
