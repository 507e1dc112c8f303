"""`specstop bench`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from .. import options
from ..output import PHASE_NAMES, check_failures, print_json, progress_bars, say, table

if TYPE_CHECKING:
    from ...decode.benchmark import BenchLine
    from ...decode.models.pair import Pair
    from ...policies.display import Progress

PROMPT_LIMIT = 20


def bench(
    *,
    source: options.PromptSource,
    models: options.Models,
    policy: options.Policies = ["fixed:2", "fixed:4", "fixed:6", "confidence:0.4"],  # noqa: B006
    profile: options.LiveProfile = None,
    library: options.Library = True,
    tree: options.Tree = None,
    verification: options.Verification = "auto",
    batch: options.Batch = 1,
    temperature: options.Temperature = 0.0,
    sampling: options.Sampling,
    max_new_tokens: options.MaxNewTokens = 128,
    wide: options.Wide = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure policies, plain decoding and transformers' loops live, in alternation on the same prompts (default: 20).

    Example: specstop bench --target T --draft D --prompts test.jsonl --policy fixed:4 --policy policy
    """
    from ...policies.profile import Profile
    from ...policies.registry import load_policy

    # Everything is validated before torch is imported and a model is loaded.
    costs = None if profile is None else Profile.load(profile)
    rules = [load_policy(spec) for spec in policy]
    prompts = source.read(models, "test", PROMPT_LIMIT)
    from ...decode.benchmark import bench as run
    from ...decode.settings import Settings

    settings = Settings(
        temperature,
        max_new_tokens,
        max((rule.max_depth for rule in rules), default=0),
        verification=verification,
        tree=tree,
        sampling=sampling.params(),
    )
    with progress_bars(quiet or json) as progress:
        pair, stock = _load(models, library, progress)
        settings = replace(settings, sampling=sampling.params(sampling.grammar(pair)))
        if not quiet:
            options.print_model_defaults(pair, settings)
        settings = settings.for_pair(pair)
        prompts, tokens = source.encode(prompts, pair, max_new_tokens)
        lines = run(
            pair, tokens, rules, ids=[prompt.stream_name for prompt in prompts], settings=settings, library=stock,
            profile=costs, batch=batch,
            progress=progress,
        )  # fmt: skip
    if json:
        print_json({"engines": pair.engines, "lines": [line.to_dict() for line in lines]})
    else:
        show(lines, _title(len(prompts), settings, batch, pair), wide)
        _print_remarks(lines, len(prompts), batch)
    check_failures([line.failure for line in lines if line.failure is not None])
    if any(line.wrong for line in lines):
        raise typer.Exit(1)


def _load(models: options.Models, library: bool, progress: Progress) -> tuple[Pair, Pair | None]:
    """Return the pair, and for transformers' loops the pair with a draft model and the engine `plain`."""
    from ...decode.models.pair import with_engine

    paths = models.find(progress)
    if library and models.drafter == "model" and not models.device.startswith("cpu"):
        stock = models.open(paths, "plain")
        return with_engine(stock, "auto"), stock  # they share weights, because a GPU may have no room for two pairs
    pair = models.open(paths)
    if not library:
        return pair, None
    return pair, pair if pair.engines == ("plain", "plain") else replace(models, drafter="model").open(paths, "plain")


def _title(prompts: int, settings: Any, batch: int, pair: Pair) -> str:
    from ...decode.verify.modes import describe
    from ...policies.learned import sampling_text

    sampled = sampling_text(settings.temperature, settings.sampling.to_dict())
    parts = [f"the first {prompts} prompts (--limit)", sampled, describe(settings.verification)]
    parts += [f"{batch} texts side by side"] if batch > 1 else []
    return ", ".join([*parts, f"engines {' and '.join(pair.engines)}"])


def show(lines: list[BenchLine], title: str, wide: bool = False) -> None:
    """Print a table with a row for each method; `wide`: with tokens per call and the shares of the phases."""
    rows = []
    for line in lines:
        if line.failure is not None:
            more = ["", ""] if wide else []
            rows.append([f"{line.name} FAILED", "-", "-", *more, line.failure.reason])
            continue
        comparison = "faster" if line.ratio.is_above else "slower" if line.ratio.is_below else "no difference"
        verdict = "" if line is lines[0] or line.ratio.low is None else comparison
        named = {PHASE_NAMES.get(phase, phase): share for phase, share in line.shares.items() if share >= 0.005}
        shares = " ".join(f"{phase} {share:.0%}" for phase, share in named.items())
        more = [f"{line.block_efficiency:.2f}" if line.block_efficiency else "", shares] if wide else []
        rows.append([line.name, f"{line.tokens_per_s:.1f}", line.ratio.text(2), *more, verdict])
    columns = ["policy", "tokens/s", "vs plain [95%]", *(["tokens per call", "time"] if wide else []), "verdict"]
    table(title, columns, rows, wide)


def _print_remarks(lines: list[BenchLine], prompts: int, batch: int) -> None:
    """Print differences between texts, and what makes the measurement unreliable."""
    from ...decode.benchmark import MIN_TURNS, texts_per_turn

    turn = texts_per_turn(batch)
    if batch > 1 and (turns := -(-prompts // turn)) < MIN_TURNS:
        say(
            f"{turns} turns of {turn} prompts: too few for an interval; give --limit {MIN_TURNS * turn} or more, with as "
            "many prompts"
        )
    for line in lines:
        if line.ties:
            say(f"{line.name}: {line.ties} of {prompts} texts differ by ties")
        if line.recordings:
            say(f"warning: {line.name}: {line.recordings} calls were recorded as CUDA graphs while it was timed")
        if line.wrong:
            say(f"error: {line.name}: {line.wrong} of {prompts} texts are not those of plain decoding, and not by ties")
