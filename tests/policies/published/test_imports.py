"""Published rules are written as a plugin is: with the public names of `specstop.policies` alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import specstop.policies
import specstop.policies.published

FILES = sorted(Path(specstop.policies.published.__file__).parent.glob("*.py"))
ALLOWED = ("__future__", "collections", "copy", "dataclasses", "math", "numba", "numpy", "pathlib", "typing")


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_published_rule_imports_public_names_only(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert all(name.name.split(".")[0] in ALLOWED for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert (node.level, node.module) == (2, None), f"line {node.lineno}: import it from specstop.policies"
            assert {name.name for name in node.names} <= set(specstop.policies.__all__)
        elif isinstance(node, ast.ImportFrom):
            assert str(node.module).split(".")[0] in ALLOWED
