"""`specstop collect`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..policies.errors import InputError
from ..policies.progress import Progress
from .common import find_pair, open_pair
from .config import save_config
from .console import human_bytes, human_seconds, print_json, progress_bars, say, table
from .interrupt import finish_first
from .options import (
    Config,
    Depth,
    Device,
    Draft,
    Dtype,
    Engine,
    Json,
    Limit,
    MaxNewTokens,
    Out,
    Overwrite,
    Quiet,
    Resume,
    Seed,
    Set,
    Target,
    Temperature,
)
from .prompt_options import (
    Asked,
    Chat,
    Column,
    Deduplicate,
    Group,
    Preset,
    ShuffleSeed,
    Side,
    Source,
    Split,
    SplitSeed,
    TestShare,
)

if TYPE_CHECKING:
    from ..collect.estimate import Estimate
    from ..collect.processes import Place
    from ..collect.shards import Plan
    from ..collect.store import Trace

INTERRUPTED = 130

Shards = Annotated[int | None, typer.Option(help="Parts the trace is written in; default: one for every 32 prompts.")]
Repair = Annotated[bool, typer.Option("--repair", help="With --resume: collect damaged shards again.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what it would take, from a few prompts.")]


def collect(
    out: Out,
    prompts: Source = None,
    preset: Preset = None,
    split: Split = None,
    column: Column = None,
    group: Group = None,
    side: Side = None,
    test_share: TestShare = 0.2,
    split_seed: SplitSeed = 0,
    shuffle_seed: ShuffleSeed = None,
    deduplicate: Deduplicate = False,
    limit: Limit = None,
    chat: Chat = False,
    target: Target = None,
    draft: Draft = None,
    depth: Depth = 10,
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    shards: Shards = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    engine: Engine = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    repair: Repair = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
    set: Set = [],  # noqa: B006
) -> None:
    """Record what the draft proposes at every position of the target's text, and what the target accepts.

    Under torchrun, srun or accelerate each process collects the shards that RANK and WORLD_SIZE deal to it.
    """
    from ..collect.estimate import estimate
    from ..collect.processes import read_place
    from ..collect.prompts import apply_chat_template
    from ..collect.run import plan_run

    place = read_place(os.environ)
    asked = Asked(
        prompts, preset, split, column, group, side, test_share, split_seed, shuffle_seed, deduplicate, limit, chat
    )
    if repair and not resume and place.world == 1:
        raise InputError(
            "--repair: expected --resume with it; `specstop merge --repair` only moves damaged shards aside"
        )
    with progress_bars(quiet or json) as progress:
        names = find_pair(target, draft, progress)
        chosen = asked.read(names[2])
        pair = open_pair(*names[:2], place.device(device), dtype, engine)
        plan = plan_run(
            pair,
            apply_chat_template(chosen, pair.tokenizer) if chat else chosen,
            target=names[0],
            draft=names[1],
            depth=depth,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            shards=shards,
            source=asked.described(),
        )
        expected = estimate(plan, out) if dry_run else None
        trace = None if dry_run else _record(plan, out, place, resume, overwrite, repair, progress)
    if expected is not None:
        _show_estimate(expected, place.world, json)
    elif trace is not None:
        _show(trace, place, json)


def _record(
    plan: Plan, out: Path, place: Place, resume: bool, overwrite: bool, repair: bool, progress: Progress
) -> Trace:
    """Collect; on Ctrl-C finish the shard, say how to go on, and exit."""
    from ..collect.shards import record

    if overwrite and place.world > 1:
        raise InputError("--overwrite: expected one process, since others may write already; remove the folder first")
    with finish_first("the shard that is begun") as stop:
        trace = record(
            plan, out, place=place, resume=resume, overwrite=overwrite, repair=repair, stop=stop, progress=progress
        )
        stopped = stop()
    save_config(out)
    if stopped and not trace.complete:
        say(
            f"specstop: {len(trace.finished)} of {plan.header.shards} shards are finished; go on with: "
            f"specstop collect --config {out / 'run.yaml'} --resume"
        )
        raise typer.Exit(INTERRUPTED)
    return trace


def _show(trace: Trace, place: Place, json: bool) -> None:
    """Print what was collected; a process that others have yet to join says only how far the trace is."""
    from .info import describe_trace, trace_json

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
        f"{out}: {facts['anchors']} anchors of {facts['prompts']} prompts",
        ("depth", "P(A >= depth)", "anchors"),
        rows,
    )


def _show_estimate(expected: Estimate, world: int, json: bool) -> None:
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
