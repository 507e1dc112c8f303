"""`specstop policies`."""

from __future__ import annotations

import dataclasses

from ..output import print_json, table


def policies(drafters: bool = False, wide: bool = False, json: bool = False) -> None:
    """List built-in and installed policies or drafters, and whether they load.

    Example: specstop policies --wide
    """
    if drafters:
        from ...decode.drafters.spec import DRAFTERS as registry

        title = "Drafters"
    else:
        from ...policies.registry import POLICIES as registry

        title = "Policies: a name below, or the path of a policy folder"
    plugins = registry.listed()
    if json:
        print_json([{**dataclasses.asdict(one), "loads": not one.problem} for one in plugins])
    elif wide:
        columns = ("name", "where", "module", "loads", "description")
        rows = [[one.name, one.where, one.module, one.problem or "yes", one.what] for one in plugins]
        table(title, columns, rows, wide)
    else:
        short = [[one.name, f"does not load: {one.problem}" if one.problem else one.what] for one in plugins]
        table(title, ("name", "description"), short)
