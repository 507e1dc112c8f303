"""`specstop collect`."""

from __future__ import annotations

import inspect
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...policies.display import Progress
from ...policies.errors import InputError
from ...policies.files import RUN_FILE, prepare_output_dir, staging_path
from ..common import say_defaults
from ..console.interrupt import Interrupted, finish_first
from ..console.output import progress_bars
from ..console.streams import say
from ..options.config import config_saved, running_options, save_config
from ..options.groups import with_groups
from ..options.models import Models
from ..options.prompts import Asked, Long
from ..options.sampling import Filters, Structure
from ..options.shared import (
    TREES,
    Depth,
    Json,
    LiveProfile,
    MaxNewTokens,
    Out,
    Overwrite,
    Quiet,
    Resume,
    Seed,
    Temperature,
)
from .collected import show_estimate, show_trace

if TYPE_CHECKING:
    from ...collect.processes import Place
    from ...collect.shards import Plan
    from ...collect.store.folder import Trace

Shards = Annotated[
    int | None, typer.Option(help="Number of files that the trace is split into; default: one for every 32 prompts.")
]
Repair = Annotated[
    bool, typer.Option("--repair", help="With --resume: put damaged shards aside and collect them again.")
]
Tree = Annotated[
    str | None,
    typer.Option(help=f"Record trees: {TREES}; default: a chain."),
]
Collector = Annotated[
    str,
    typer.Option(
        help="dense: draft from every position of the target's text. live: record the running loop, with timings."
    ),
]
Explore = Annotated[
    float, typer.Option(help="Live collector: share of rounds that are drafted to full depth whatever the policy says.")
]
Mix = Annotated[
    float,
    typer.Option(
        help="Dense collector, --depth 1: share of the target's tokens in the text that the draft reads (SpecDec++)."
    ),
]
LivePolicy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="Live: whose rounds are recorded; default: full depth. One that carries its state from text to text starts anew "
        "with each shard, and gets a single one unless --shards says otherwise.",
    ),
]
Hidden = Annotated[
    str | None,
    typer.Option(
        help="Record last hidden states: draft, target, or draft,target. Float16, on disk at each anchor up to 2 bytes x "
        "width x nodes for the draft (depth 10, width 768: 15 kB, a text of 128 tokens 2 MB), 2 bytes x width for the "
        "target; --dry-run says how much it comes to."
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Live: texts decoded side by side; one that ends gives its place to the next. Default: 1, inside vLLM 8."
    ),
]
Memory = Annotated[
    int | None,
    typer.Option(
        help="Dense collector: MiB for the scores of the positions that are unrolled together; default: a quarter of what "
        "the GPU has free, up to 16 GiB, or a sixteenth of the host's available memory, up to 1 GiB."
    ),
]
Draws = Annotated[
    int,
    typer.Option(
        help="Draws of drafts and acceptances given each text (rejection, block): more of them, less variance."
    ),
]
OffText = Annotated[
    str,
    typer.Option(
        help="Block verification: exact, where the target reads what the draft proposes off the text too, or approximate."
    ),
]
DraftGreedy = Annotated[
    bool,
    typer.Option(
        "--draft-greedy",
        help="The draft proposes its best token while the text is sampled (--verification point): as engines without "
        "draft probabilities do.",
    ),
]
Through = Annotated[
    str | None,
    typer.Option(help="vllm: a live trace of rounds inside vLLM, which decodes the prompts (docs/vllm.md)."),
]
FromVLLM = Annotated[
    Path | None,
    typer.Option(
        "--from-vllm",
        help="Turn vLLM's acceptance records (JSON Lines), or the folder that our class wrote there, into a trace.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Estimate time and disk from a few prompts, and write nothing.")
]


Ray = Annotated[
    str | None,
    typer.Option(
        help="Collect by tasks of Ray: local, or the address of a cluster (auto, HOST:PORT, ray://HOST:PORT) whose machines "
        "all see the files named here. A task that dies is started again."
    ),
]
RayTasks = Annotated[
    int | None,
    typer.Option(min=1, help="Number of tasks; default: the cluster's GPUs with --device cuda, else its cores."),
]

_OF_RECORDS = ("from_vllm", "out", "target", "draft", "overwrite", "json", "quiet")
"""Options that --from-vllm takes."""


def collect(
    *,
    out: Out,
    asked: Asked,
    long: Long = "skip",
    models: Models,
    depth: Depth = 10,
    tree: Tree = None,
    collector: Collector = "dense",
    policy: LivePolicy = None,
    profile: LiveProfile = None,
    verification: Annotated[
        str,
        typer.Option(
            help="Whose rounds are recorded. Dense: match or point (replay is exact path by path), rejection, "
            "rejection_replace or block (drawn given the text: exact in law). Live: any, as in `specstop decode`. auto: the "
            "fastest that can be replayed, block for chains that sample, match for trees, drafters and live rounds."
        ),
    ] = "auto",
    draft_greedy: DraftGreedy = False,
    draws: Draws = 1,
    off_text: OffText = "exact",
    explore: Explore = 0.0,
    mix: Mix = 0.0,
    hidden: Hidden = None,
    batch: Batch = None,
    memory: Memory = None,
    from_vllm: FromVLLM = None,
    through: Through = None,
    temperature: Temperature = 0.0,
    filters: Filters,
    structure: Structure,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    shards: Shards = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    repair: Repair = False,
    dry_run: DryRun = False,
    ray: Ray = None,
    ray_tasks: RayTasks = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Record what the draft proposes at every position of the target's text, and what the target accepts.

    Under torchrun or accelerate each process collects the shards that RANK and WORLD_SIZE deal to it; srun sets neither.
    """
    from ...policies.profile import Profile

    costs = None if profile is None else Profile.load(profile)  # report an invalid profile before torch is imported
    from ...collect.estimates import estimate
    from ...collect.plan import plan_run
    from ...collect.processes import read_place
    from ...collect.prompts.kept import keep_prompts, kept_prompts, require_stored
    from ...collect.prompts.read import apply_chat_template
    from ...collect.store.folder import PROMPTS_FILE
    from ...decode.settings import Settings
    from ...policies.registry import load_policy

    place = read_place(os.environ)
    if from_vllm is not None:
        _check_runs_nothing()
        _import_vllm(from_vllm, out, models.target or "", models.draft or "", overwrite, json)
        return
    if repair and not resume and place.world == 1:
        raise InputError(
            "--repair: expected --resume with it; `specstop merge --repair` only moves damaged shards aside"
        )
    if ray is not None:
        if dry_run or overwrite or repair or place.world > 1:
            raise InputError("--ray: expected neither --dry-run, --overwrite, --repair nor torchrun with it")
        require_stored(asked.prompts)
        _by_ray(out, ray, ray_tasks, resume, quiet, json)
        return
    if not dry_run:
        prepare_output_dir(out, overwrite=overwrite, resume=resume or place.world > 1)
    options, kept = asdict(asked), None
    if resume or place.world > 1:
        folder = staging_path(out) if overwrite and staging_path(out).exists() else out
        kept = kept_prompts(folder, options)
        if kept is not None and resume:
            say(f"goes on with the prompts kept in {folder / PROMPTS_FILE}; the source is not read again")
    if kept is None and place.world > 1:
        require_stored(asked.prompts)
    with progress_bars(quiet or json) as progress:
        found = models.find(progress)
        read = asked.read(found.demo) if kept is None else kept
        pair = replace(models, device=place.device(models.device)).open(found)
        chosen = apply_chat_template(read, pair.tokenizer) if asked.chat and kept is None else read
        if not quiet:
            say_defaults(pair, Settings(temperature, max_new_tokens, shaping=filters.shaping()))
        planned = partial(
            plan_run,
            pair,
            target=found.target,
            draft=(found.draft or "") if models.drafter == "model" else models.drafter,
            depth=depth,
            tree=tree,
            collector=collector,
            policy=load_policy(policy) if policy else None,
            verification=_verification(verification, draft_greedy),
            draws=draws,
            off_text=off_text,
            explore=explore,
            mix=mix,
            completions=None if asked.completions is None else {(p.id, p.sample): p.completion or "" for p in chosen},
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            shards=shards,
            source=asked.described(),
            hidden=_hidden_names(hidden),
            memory=memory,
            shaping=filters.shaping(structure.read(pair)),
            long=long,
            batch=batch,
            through=through,
            profile=costs,
        )
        plan = replace(planned(prompts=chosen), prompt_options=options)
        if place.world > 1 and not dry_run and (first := keep_prompts(out, chosen, options)) != chosen:
            plan = replace(planned(prompts=first), prompt_options=options)  # another process has read them before
        expected = estimate(plan, out) if dry_run else None
        trace = None if dry_run else _record(plan, out, place, resume, overwrite, repair, progress)
    if expected is not None:
        show_estimate(expected, place.world, json)
    elif trace is not None:
        show_trace(trace, place, json)


def _by_ray(out: Path, ray: str, tasks: int | None, resume: bool, quiet: bool, json: bool) -> None:
    """Collect by tasks of Ray."""
    from ...collect.processes import Place
    from ..ray_tasks import by_tasks

    show_trace(by_tasks(out, ray, tasks, resume, quiet or json), Place(), json)


def _verification(name: str, draft_greedy: bool) -> str:
    """Return the verification that two options ask for."""
    if draft_greedy and name not in ("auto", "match", "point"):
        raise InputError(f"--draft-greedy: is --verification point; leave out --verification {name}")
    return "point" if draft_greedy else name


def _hidden_names(hidden: str | None) -> list[str]:
    """Return the names of the hidden states that --hidden asks for."""
    models = [word.strip() for word in (hidden or "").split(",") if word.strip()]
    if hidden is not None and (not models or set(models) - {"draft", "target"}):
        raise InputError(f"--hidden: expected draft, target, or draft,target, not {hidden!r}")
    return [f"{model}_hidden" for model in models]


def _check_runs_nothing() -> None:
    """Refuse options of a run beside --from-vllm; a `run.yaml` holds each of them, at its default."""
    usual = inspect.signature(with_groups(collect)).parameters
    named = {name: value for name, value in running_options().items() if name in usual and name not in _OF_RECORDS}
    if odd := [f"--{name.replace('_', '-')}" for name, value in named.items() if value != usual[name].default]:
        raise InputError(f"{', '.join(odd)}: --from-vllm reads what vLLM recorded, and collects nothing; leave it out")


def _import_vllm(records: Path, out: Path, target: str, draft: str, overwrite: bool, json: bool) -> None:
    """Make a trace of another engine's records."""
    from ...collect.engines.vllm_records import import_vllm
    from ...collect.processes import Place

    with config_saved(out):
        trace = import_vllm(records, out, target=target, draft=draft, overwrite=overwrite)
    show_trace(trace, Place(), json)


def _record(
    plan: Plan, out: Path, place: Place, resume: bool, overwrite: bool, repair: bool, progress: Progress
) -> Trace:
    """Collect; on a signal finish the shard, and end with how to go on."""
    from ...collect.shards import record

    if overwrite and place.world > 1:
        raise InputError("--overwrite: expected one process, since others may write already; remove the folder first")
    with finish_first("the shard that is begun") as stop, config_saved(out):
        trace = record(
            plan, out, place=place, resume=resume, overwrite=overwrite, repair=repair, stop=stop, progress=progress
        )
        # What grows in place is not put there whole, with its run.yaml. A resumed trace keeps that which it began with.
        if not (resume and (trace.folder / RUN_FILE).exists()):
            save_config(trace.folder)
        if stop.number is not None and not trace.complete:
            raise Interrupted(
                stop.number,
                f"interrupted with {len(trace.finished)} of {plan.header.shards} shards finished; go on with: "
                f"specstop collect --config {trace.folder / RUN_FILE} --resume",
            )
    return trace
