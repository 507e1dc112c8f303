"""`specstop policies`."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import typer

from ..console.output import print_json, table
from ..options.shared import Json


def policies(
    no_plugins: Annotated[bool, typer.Option("--no-plugins", help="Do not look for installed plugins.")] = False,
    json: Json = False,
) -> None:
    """List built-in and installed policies, their modules, and whether they load."""
    from ...policies.storage.registry import SWITCH, listed_policies

    if no_plugins:
        os.environ[SWITCH] = "0"
    found = listed_policies()
    if json:
        print_json([{**dataclasses.asdict(policy), "loads": not policy.problem} for policy in found])
        return
    rows = [(p.name, p.where, p.module, p.problem or "yes", p.what) for p in found]
    table(
        "Policies: a name as below, or the path of a policy folder", ("name", "where", "module", "loads", "what"), rows
    )
