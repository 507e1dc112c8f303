"""`specstop bench`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..common import PHASES, check_failures, find_prompts, fitting, say_defaults
from ..console.output import print_json, progress_bars, table
from ..console.streams import say
from ..options.models import Models
from ..options.prompts import Chat, Long
from ..options.sampling import Filters, Structure
from ..options.shared import (
    Batch,
    Json,
    LiveProfile,
    MaxNewTokens,
    MostDrafted,
    Policies,
    Prompts,
    Quiet,
    Seed,
    Temperature,
    Tree,
    Verification,
)

if TYPE_CHECKING:
    from ...decode.benchmark import BenchLine


def bench(
    *,
    prompts: Prompts = None,
    chat: Chat = False,
    long: Long = "skip",
    models: Models,
    policy: Policies = ["fixed:2", "fixed:4", "fixed:6", "confidence:0.4"],  # noqa: B006
    profile: LiveProfile = None,
    library: Annotated[
        bool,
        typer.Option(
            "--library/--no-library", help="Measure transformers' own generate and its assisted settings as well."
        ),
    ] = True,
    temperature: Temperature = 0.0,
    filters: Filters,
    structure: Structure,
    max_new_tokens: MaxNewTokens = 128,
    depth: MostDrafted = None,
    tree: Tree = None,
    verification: Verification = "auto",
    batch: Batch = 1,
    seed: Seed = 0,
    limit: Annotated[
        int, typer.Option(help="Use only so many prompts, from the first on: each policy decodes each of them.")
    ] = 20,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure policies, plain decoding and transformers' own loops live, alternating on the same prompts."""
    from ...policies.profile import Profile

    costs = None if profile is None else Profile.load(profile)  # report an invalid profile before torch is imported
    from ...decode.benchmark import MIN_TURNS, bench as run, texts_per_turn
    from ...decode.models.pair import with_engine
    from ...decode.settings import Settings
    from ...decode.verify.modes import describe
    from ...policies.learned import sampling_text
    from ...policies.registry import load_policy

    rules = [load_policy(spec) for spec in policy]
    most = max((rule.max_depth for rule in rules), default=0) if depth is None else depth
    settings = Settings(
        temperature, max_new_tokens, most, verification=verification, tree=tree, shaping=filters.shaping()
    )
    with progress_bars(quiet or json) as progress:
        found = models.find(progress)
        chosen = find_prompts(prompts, found.demo, "test", limit)
        stock = None  # transformers' own loops want its own modules, and a draft model
        if library and models.drafter == "model" and not models.device.startswith("cpu"):
            stock = replace(models, engine="plain").open(found)
            pair = with_engine(stock, models.engine)  # which shares its weights: two pairs may not go on a GPU
        else:
            pair = models.open(found)
            if library:
                plain = pair.engines == ("plain", "plain")
                stock = pair if plain else replace(models, engine="plain", drafter="model").open(found)
        settings = replace(settings, shaping=filters.shaping(structure.read(pair)))
        if not quiet:
            say_defaults(pair, settings)
        settings = settings.for_pair(pair)
        chosen, tokens = fitting(chosen, pair, max_new_tokens, chat, long)
        lines = run(
            pair,
            tokens,
            rules,
            ids=[p.stream_name for p in chosen],
            settings=settings,
            library=stock,
            profile=costs,
            seed=seed,
            batch=batch,
            progress=progress,
        )
    faults = [line for line in lines if line.wrong]
    failures = [line.failure for line in lines if line.failure is not None]
    if json:
        print_json({"engines": pair.engines, "lines": [line.to_dict() for line in lines]})
        check_failures(failures)
        if faults:
            raise typer.Exit(1)
        return
    sampled = sampling_text(temperature, settings.shaping.to_dict())
    side = f", {batch} texts side by side" if batch > 1 else ""
    title = f"the first {len(chosen)} prompts (--limit), {sampled}, {describe(verification)}{side}"
    show_bench(lines, f"{title}, engines {' and '.join(pair.engines)}")
    for line in lines:
        if line.ties:
            say(f"{line.name}: {line.ties} of {len(chosen)} texts differ by ties")
    turn = texts_per_turn(batch)
    if batch > 1 and (turns := -(-len(chosen) // turn)) < MIN_TURNS:
        say(
            f"{turns} turn{'s' if turns > 1 else ''} of {turn} prompts: too few for an interval; give --limit "
            f"{MIN_TURNS * turn} or more, with as many prompts"
        )
    for line in lines:
        if line.recordings:
            say(f"warning: {line.name}: {line.recordings} calls were recorded as CUDA graphs while it was timed")
    for line in faults:
        say(f"error: {line.name}: {line.wrong} of {len(chosen)} texts are not those of plain decoding, and not by ties")
    check_failures(failures)
    if faults:
        raise typer.Exit(1)


def show_bench(lines: list[BenchLine], title: str) -> None:
    """Print the table."""
    rows = [
        (
            line.name if line.failure is None else f"{line.name} FAILED",
            f"{line.tokens_per_s:.1f}" if line.failure is None else "-",
            line.ratio.text(2) if line.failure is None else "-",
            f"{line.block_efficiency:.2f}" if line.block_efficiency and line.failure is None else "",
            " ".join(
                f"{PHASES.get(phase, phase)} {share:.0%}" for phase, share in line.shares.items() if share >= 0.005
            )
            if line.failure is None
            else line.failure.reason,
        )
        for line in lines
    ]
    table(title, ("decoding", "tokens/s", "of plain [95%]", "tokens per call", "where the time goes"), rows)
