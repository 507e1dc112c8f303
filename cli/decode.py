"""`specstop decode`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..policies.errors import InputError
from .common import find_pair, find_prompts, open_pair, percent
from .console import print_json, progress_bars, table
from .options import (
    Config,
    Depth,
    Device,
    Draft,
    Dtype,
    Json,
    Limit,
    MaxNewTokens,
    Prompts,
    Quiet,
    Seed,
    Set,
    Target,
    Temperature,
)

if TYPE_CHECKING:
    from ..decode.records import Tally


def decode(
    text: Annotated[list[str] | None, typer.Argument(help="Prompts; or use --prompts.")] = None,
    prompts: Prompts = None,
    target: Target = None,
    draft: Draft = None,
    policy: Annotated[
        str, typer.Option(help="fixed:4, confidence:0.4, a policy folder, or plugin?key=value.")
    ] = "fixed:4",
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 128,
    depth: Depth = 20,
    seed: Seed = 0,
    limit: Limit = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
    set: Set = [],  # noqa: B006
) -> None:
    """Generate with a policy; the text is the target's own, whatever the policy (match verification, lossless)."""
    from ..collect.prompts import Prompt
    from ..decode.records import Tally
    from ..decode.run import decode as run
    from ..decode.settings import Settings
    from ..policies.specs import load_policy

    settings = Settings(temperature, max_new_tokens, depth)
    if text and prompts:
        raise InputError("expected prompts as arguments or --prompts, not both")
    rule = load_policy(policy)
    with progress_bars(quiet or json) as progress:
        names = find_pair(target, draft, progress)
    if text:
        chosen = [Prompt(str(i), t) for i, t in enumerate(text)]
    else:
        chosen = find_prompts(prompts, names[2], "test", limit or (None if prompts else 1))
    pair = open_pair(*names[:2], device, dtype)
    shown = -1

    def stream(number: int, new: str) -> None:
        nonlocal shown
        if number != shown:
            sys.stdout.write(("\n\n" if shown >= 0 else "") + chosen[number].text)
            shown = number
        sys.stdout.write(new)
        sys.stdout.flush()

    generations = run(
        pair,
        [p.text for p in chosen],
        rule,
        settings=settings,
        ids=[p.id for p in chosen],
        seed=seed,
        on_text=None if json or quiet else stream,
    )
    tally = Tally.of(generations)
    if json:
        assert pair.tokenizer is not None
        texts = [str(pair.tokenizer.decode(list(g.tokens), skip_special_tokens=True)) for g in generations]
        print_json({**tally.summary(), "acceptance": tally.acceptance(), "texts": texts})
        return
    sys.stdout.write("\n\n" if shown >= 0 else "")
    show_tally(tally, rule.name)


def show_tally(tally: Tally, name: str) -> None:
    """Print what a run took, and acceptance by depth."""
    facts, phases = tally.summary(), tally.shares()
    rows = [
        ("tokens/s", f"{tally.tokens_per_s:.1f}"),
        ("tokens, seconds", f"{facts['tokens']}, {facts['seconds']:.2f}"),
        ("target calls", str(facts["target_calls"])),
        ("block efficiency (tokens per call)", f"{tally.block_efficiency:.2f}"),
        ("drafted, verified, wasted", f"{facts['drafted']}, {facts['verified']}, {facts['wasted']}"),
        *(
            (f"time: {phase}", f"{seconds:.2f} s, {percent(seconds, tally.seconds)}")
            for phase, seconds in phases.items()
        ),
    ]
    table(f"{name}, match verification (lossless)", ("what", "value"), rows)
    depths = [(str(k), f"{p:.3f}", str(n)) for k, p, n in tally.acceptance()]
    if depths:
        table(
            "acceptance by depth",
            ("depth", "P(A >= depth)", "rounds"),
            depths,
        )
