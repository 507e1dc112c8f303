"""What `collect` prints: the trace, how far it is, or what a run would take."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from ..console.output import human_bytes, human_seconds, next_step, output, print_json, table
from ..console.streams import say
from ..options.config import running_options
from ..options.sampling import Filters
from .info import describe_trace, trace_json

if TYPE_CHECKING:
    from ...collect.estimates import Estimate
    from ...collect.processes import Place
    from ...collect.schema import Header
    from ...collect.store.folder import Trace


def show_trace(trace: Trace, place: Place, json: bool) -> None:
    """Print what was collected; a process that others have yet to join says only how far the trace is."""
    from ...collect.pair_options import pair_options

    out = trace.folder
    if not trace.complete:
        have = f"{len(trace.finished)} of {trace.header.shards}"
        if json:
            print_json({"rank": place.rank, "world": place.world, "complete": False, "shards": have})
        else:
            output().print(
                f"{out}: process {place.rank} of {place.world} is done; {have} shards are there", soft_wrap=True
            )
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
    if (note := facts.get("note on acceptance")) is not None:
        output().print(f"Note: {note}", soft_wrap=True)
    header = trace.header
    asked = running_options()
    names = [one.name for one in fields(Filters) if one.name != "model_defaults"]
    given = {name: asked[name] for name in names if asked.get(name) is not None}
    # Processors, and what the model sets beside these options, have no option of their own.
    shaped = {name: value for name, value in header.shaping.items() if name in names}
    sampled = {"temperature": header.temperature or None, **dict(sorted((given | shaped).items()))}
    options = [word for k, v in sampled.items() if v is not None for word in (f"--{k.replace('_', '-')}", v)]
    options += [] if asked.get("model_defaults", True) else ["--no-model-defaults"]
    chat = ["--chat"] if asked.get("chat") else []
    source = asked.get("prompts")
    prompts = "PROMPTS" if source in (None, "-") else source  # a pipe is read once
    told = [*chat, *options, *_rounds(header, asked.get("through")), "--prompts", prompts]
    next_step("profile", *pair_options(header), *told, "--out", "profile.json")


def _rounds(header: Header, through: str | None) -> list[str]:
    """Return the options under which `profile` times rounds as a trace holds them, where it would not by itself."""
    from ...decode.topology import chain
    from ...decode.verify.modes import resolve_mode
    from ...policies.fixed import FixedLength

    shape = ["--depth", str(header.depth)]
    if through is not None:
        return ["--through", through, *shape]
    if not header.tree.is_chain:
        shape += ["--tree", header.tree.name]
    usual = resolve_mode("auto", FixedLength(header.depth), chain(header.depth), header.temperature)
    # At temperature 0 all modes accept alike.
    other = header.temperature > 0 and header.verification != usual
    return [*(["--verification", header.verification] if other else []), *shape]


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
