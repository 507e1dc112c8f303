"""What `collect` prints: the trace, how far it is, or what a run would take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ..console.output import human_bytes, human_seconds, next_step, print_json, table
from ..console.streams import say
from ..options.config import running_options
from .info import describe_trace, trace_json

if TYPE_CHECKING:
    from ...collect.estimates import Estimate
    from ...collect.processes import Place
    from ...collect.store.folder import Trace


def show_trace(trace: Trace, place: Place, json: bool) -> None:
    """Print what was collected; a process that others have yet to join says only how far the trace is."""
    out = trace.folder
    if not trace.complete:
        have = f"{len(trace.finished)} of {trace.header.shards}"
        if json:
            print_json({"rank": place.rank, "world": place.world, "complete": False, "shards": have})
        else:
            typer.echo(f"{out}: process {place.rank} of {place.world} is done; {have} shards are there")
        return
    if json:
        print_json(trace_json(trace))
        return
    facts, rows = describe_trace(trace)
    table(
        f"{out}: {facts['positions']} positions of {facts['prompts']} prompts",
        ("depth", "P(A >= depth)", "positions"),
        rows,
    )
    header = trace.header
    sampled = {"temperature": header.temperature or None, **dict(sorted(header.shaping.items())), "processors": None}
    # Processors have no option of their own: they are given in Python alone.
    options = [word for k, v in sampled.items() if v is not None for word in (f"--{k.replace('_', '-')}", v)]
    asked = running_options()
    drafter = asked.get("drafter") or "model"
    draft = header.draft if drafter == "model" else asked.get("draft")
    named = {"--target": header.target, "--draft": draft, "--drafter": None if drafter == "model" else drafter}
    models = [word for option, value in named.items() if value for word in (option, value)]
    chat = ["--chat"] if asked.get("chat") else []
    wanted = asked.get("verification") or "auto"
    mode = ["--verification", header.verification] if header.temperature and wanted != "auto" else []
    prompts = asked.get("prompts") or "PROMPTS"
    next_step("profile", *models, *chat, *options, *mode, "--prompts", prompts, "--out", "profile.json")


def show_estimate(expected: Estimate, world: int, json: bool) -> None:
    """Print what a run would take."""
    facts = {
        "prompts": expected.prompts,
        "shards": expected.shards,
        "tried": expected.sample,
        "rows": expected.rows,
        "disk_bytes": expected.disk_bytes,
        "free_bytes": expected.free_bytes,
        "seconds": expected.seconds / world,
        "processes": world,
    }
    if json:
        print_json(facts)
    else:
        table(
            f"expected, from {expected.sample} of {expected.prompts} prompts",
            ("what", "value"),
            [
                ("rows", f"{expected.rows}"),
                ("shards", f"{expected.shards}"),
                ("disk", f"{human_bytes(expected.disk_bytes)} of {human_bytes(expected.free_bytes)} free"),
                ("time", f"{human_seconds(expected.seconds / world)} with {world} process{'es' * (world > 1)}"),
            ],
        )
    if not expected.fits:
        say("warning: the trace will not fit on the disk; choose another --out, or fewer prompts")
