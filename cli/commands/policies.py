"""`specstop policies`: what is installed, policies or drafters."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import typer

from ..console.output import print_json, table
from ..options.shared import Json


def policies(
    drafters: Annotated[bool, typer.Option("--drafters", help="List drafters in the place of policies.")] = False,
    no_plugins: Annotated[bool, typer.Option("--no-plugins", help="Do not look for installed plugins.")] = False,
    json: Json = False,
) -> None:
    """List built-in and installed policies, or drafters: their modules, and whether they load."""
    from ...policies.registry import SWITCH

    if no_plugins:
        os.environ[SWITCH] = "0"
    if drafters:
        from ...decode.drafters.spec import DRAFTERS

        title, found = "Drafters: a name as below", DRAFTERS.listed()
    else:
        from ...policies.registry import POLICIES

        title, found = "Policies: a name as below, or the path of a policy folder", POLICIES.listed()
    if json:
        print_json([{**dataclasses.asdict(one), "loads": not one.problem} for one in found])
        return
    rows = [(one.name, one.where, one.module, one.problem or "yes", one.what) for one in found]
    table(title, ("name", "where", "module", "loads", "what"), rows)
