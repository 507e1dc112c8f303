"""`specstop merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...policies.errors import TraceError
from ..console.output import print_json
from ..console.streams import results, say
from ..options.shared import Json

_NAMED = 8


def merge(
    trace: Annotated[Path, typer.Argument(help="A trace folder that several processes have written.")],
    repair: Annotated[bool, typer.Option("--repair", help="Move damaged shards aside, to be collected again.")] = False,
    json: Json = False,
) -> None:
    """Check that every shard of a trace is there and whole, and write its index."""
    from ...collect.store.folder import merge as run

    checked = run(trace, repair=repair)
    for path in checked.moved:
        say(f"specstop: a damaged shard was moved to {path}")
    if checked.missing:
        named = ", ".join(map(str, checked.missing[:_NAMED])) + (", ..." if len(checked.missing) > _NAMED else "")
        raise TraceError(
            f"{trace}: not complete, {len(checked.missing)} of its shards missing ({named}); run the collect command again "
            "with --resume, as one process or as several"
        )
    if json:
        print_json(checked.facts())
    else:
        typer.echo(f"{trace}: complete, {checked.rows} rows; the index is written", file=results())
