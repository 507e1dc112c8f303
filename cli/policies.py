"""`specstop policies`."""

from __future__ import annotations

from .console import print_json, table
from .options import Json


def policies(json: Json = False) -> None:
    """List built-in and installed policies."""
    from ..policies.specs import BUILTINS, plugins

    rows = [(name, "built in", builtin.usage) for name, builtin in BUILTINS.items()]
    rows += [(name, point.dist.name if point.dist else "?", point.value) for name, point in plugins().items()]
    if json:
        print_json([dict(zip(("name", "where", "what"), row, strict=True)) for row in rows])
        return
    table("Policies: a name as below, or the path of a policy folder", ("name", "where", "what"), rows)
