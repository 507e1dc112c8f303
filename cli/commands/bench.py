"""`specstop bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import options
from ..output import PHASE_NAMES, print_json, print_stderr, progress_bars, show_drafters, table

if TYPE_CHECKING:
    from ...decode.benchmark import BenchLine
    from ...decode.models.pair import Pair
    from ...policies.display import Progress

PROMPT_LIMIT = 20
POLICIES = ["fixed:2", "fixed:4", "fixed:6", "confidence:0.4"]


def bench(
    *,
    source: options.PromptSource,
    models: options.Models,
    policy: list[str] = POLICIES,
    profile: Path | None = None,
    library: bool = True,
    tree: str | None = None,
    verification: str = "auto",
    batch: int = 1,
    sampling: options.Sampling,
    max_new_tokens: int = 128,
    wide: bool = False,
    json: bool = False,
    quiet: bool = False,
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
    from ...decode.verify.modes import describe_mode
    from ...policies.learned import sampling_text

    deepest = max((rule.max_depth for rule in rules), default=0)
    settings = Settings(sampling.temperature, max_new_tokens, deepest, verification=verification, tree=tree)
    with progress_bars(quiet or json) as progress:
        pair, stock = _load(models, library, progress)
        settings = replace(settings, sampling=sampling.params(pair))
        if not quiet:
            options.print_model_defaults(pair, settings)
        settings = settings.for_pair(pair)
        prompts, tokens = source.encode(prompts, pair, max_new_tokens)
        lines = run(
            pair, tokens, rules, ids=[prompt.stream_name for prompt in prompts], settings=settings, library=stock,
            profile=costs, batch=batch, progress=progress,
        )  # fmt: skip
    if json:
        print_json({"engines": pair.engines, "lines": [line.to_dict() for line in lines]})
    else:
        sampled = sampling_text(settings.temperature, settings.sampling.to_dict())
        title = f"the first {len(prompts)} prompts (--limit), {sampled}, {describe_mode(settings.verification)}"
        title += f", {batch} texts side by side" if batch > 1 else ""
        show(lines, f"{title}, engines {' and '.join(pair.engines)}", wide)
        if pair.device.type == "cuda":
            recorded = ", ".join(f"{line.name} {line.recordings}" for line in lines)
            print_stderr(f"calls recorded as CUDA graphs while timed (more than 0 is unfair): {recorded}")
        for line in lines:
            if line.ties:
                print_stderr(f"{line.name}: {line.ties} of {len(prompts)} texts differ by ties")
            if line.wrong:
                print_stderr(f"error: {line.name}: {line.wrong} texts are not those of plain decoding, and not by ties")
    for line in lines:
        if line.failure is not None:
            raise line.failure
    if any(line.wrong for line in lines):
        raise typer.Exit(1)


def _load(models: options.Models, library: bool, progress: Progress) -> tuple[Pair, Pair | None]:
    """Return the pair, and for transformers' loops the pair with a draft model and the engine `plain`."""
    from ...decode.models.pair import with_engine

    if library and models.drafters == "model" and not models.device.startswith("cpu"):
        stock = models.open(progress, "plain")
        return with_engine(stock, "auto"), stock  # they share weights, because a GPU may have no room for two pairs
    pair = models.open(progress)
    if not library or pair.engines == ("plain", "plain"):
        return pair, pair if library else None
    # The drafter lookup loads no draft model.
    drafter = "lookup" if models.target is not None and models.draft is None else "model"
    return pair, replace(models, drafter=[drafter]).open(engine="plain")


def show(lines: list[BenchLine], title: str, wide: bool = False) -> None:
    """Print a table with a row for each method; `wide`: with tokens per call and the shares of the phases."""
    rows, routes = [], any(line.drafters for line in lines)
    for line in lines:
        if line.failure is not None:
            rows.append([f"{line.name} FAILED", "-", "-", line.failure.reason, *[""] * (routes + 2 * wide)])
            continue
        comparison = "faster" if line.ratio.is_above else "slower" if line.ratio.is_below else "no difference"
        verdict = "" if line is lines[0] or line.ratio.low is None else comparison
        shares = (f"{PHASE_NAMES.get(name, name)} {share:.0%}" for name, share in line.shares.items() if share >= 0.005)
        more = [f"{line.block_efficiency:.2f}" if line.block_efficiency else "", " ".join(shares)] if wide else []
        more = [show_drafters(line.drafters)] * routes + more
        rows.append([line.name, f"{line.tokens_per_s:.1f}", line.ratio.text(2), verdict, *more])
    columns = ["policy", "tokens/s", "vs plain [95%]", "verdict", *["rounds by drafter"] * routes]
    columns += ["tokens per call", "time"] if wide else []
    table(title, columns, rows, wide)
