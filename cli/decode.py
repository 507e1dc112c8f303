"""`specstop decode`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..policies.errors import InputError
from .common import PHASES, find_prompts, find_target, fitting, open_pair, percent
from .console import print_json, progress_bars, table
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
    Prompts,
    Seed,
    Set,
    Target,
    Temperature,
)
from .prompt_options import Chat, Long
from .sampling_options import UNUSED, with_shaping

if TYPE_CHECKING:
    from ..decode.records import Tally
    from ..decode.verify.sampling import Shaping


@with_shaping
def decode(
    text: Annotated[list[str] | None, typer.Argument(help="Prompts to continue; or use --prompts.")] = None,
    prompts: Prompts = None,
    chat: Chat = False,
    long: Long = "refuse",
    target: Target = None,
    draft: Draft = None,
    policy: Annotated[
        str, typer.Option(help="fixed:4, confidence:0.4, a policy folder, or plugin?key=value.")
    ] = "fixed:4",
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 128,
    depth: Depth = 20,
    verification: Annotated[
        str,
        typer.Option(
            help="auto (the fastest lossless one), match, rejection, rejection_replace, block (chains): lossless. "
            "target_init, typical: LOSSY, they change the output distribution."
        ),
    ] = "auto",
    tree: Annotated[
        str | None,
        typer.Option(help="Draft trees: children by depth (4,2,2,1), fork:4x5 or parents:-1,-1,0; default: a chain."),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            help="Where candidates come from: model (the draft model), lookup (the text itself, no --draft), or a plugin."
        ),
    ] = "model",
    shaping: Shaping = UNUSED,
    stop: Annotated[list[str], typer.Option(help="End the text after this string; repeatable.")] = [],  # noqa: B006
    guard: Annotated[
        str,
        typer.Option(
            help="warn once a learned policy's live acceptance leaves the band its calibration predicts; fallback: draft the "
            "best fixed length then; off."
        ),
    ] = "warn",
    seed: Seed = 0,
    limit: Limit = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    engine: Engine = "auto",
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write the texts alone: no progress, no tables.")] = False,
    config: Config = None,
    set: Set = [],  # noqa: B006
) -> None:
    """Generate with a policy. Under every lossless verification the text is the target's own, whatever the policy."""
    from ..collect.prompts import Prompt
    from ..decode.records import Tally
    from ..decode.run import decode as run
    from ..decode.settings import Settings, stop_strings
    from ..decode.verify.modes import describe, resolve_mode
    from ..policies.storage.registry import load_policy

    if text and prompts:
        raise InputError("expected prompts as arguments or --prompts, not both")
    rule = load_policy(policy)
    with progress_bars(quiet or json) as progress:
        names = find_target(target, draft, drafter, progress)
    if text:
        chosen = [Prompt(str(i), t) for i, t in enumerate(text)]
    else:
        chosen = find_prompts(prompts, names[2], "test", limit or (None if prompts else 1))
    pair = open_pair(*names[:2], device, dtype, engine)
    settings = Settings(
        temperature,
        max_new_tokens,
        depth,
        verification=verification,
        tree=tree,
        shaping=shaping,
        stops=stop_strings(pair, stop),
        guard=guard,
    )
    texts = {p.id: p.text for p in chosen}  # as they were given, which is how they are shown
    kept, tokens = fitting(chosen, pair, max_new_tokens, chat, long)
    mode = resolve_mode(verification, rule, settings.topology, temperature)
    shown = -1

    def stream(number: int, new: str) -> None:
        nonlocal shown
        if number != shown:
            name = kept[number].id
            title = f"[{number + 1} of {len(kept)}: {name}]\n" if len(kept) > 1 else ""
            sys.stdout.write(("\n\n" if shown >= 0 else "") + title + texts[name])
            shown = number
        sys.stdout.write(new)
        sys.stdout.flush()

    generations = run(
        pair,
        tokens,
        rule,
        settings=settings,
        ids=[p.id for p in kept],
        seed=seed,
        drafter=drafter,
        on_text=None if json else stream,
    )
    tally = Tally.of(generations)
    if json:
        print_json(
            {
                **tally.summary(),
                "verification": describe(mode),
                "acceptance": tally.acceptance(),
                "texts": [g.text for g in generations],
            }
        )
        return
    sys.stdout.write("\n" if shown >= 0 else "")
    if quiet:
        return
    sys.stdout.write("\n")
    show_tally(tally, f"{rule.name}, {describe(mode)}")


def show_tally(tally: Tally, title: str) -> None:
    """Print what a run took, and acceptance by depth."""
    facts, phases = tally.summary(), tally.shares()
    rows = [
        ("tokens/s", f"{tally.tokens_per_s:.1f}"),
        ("tokens, seconds", f"{facts['tokens']}, {facts['seconds']:.2f}"),
        ("target calls", str(facts["target_calls"])),
        ("mean tokens per target call", f"{tally.block_efficiency:.2f}"),
        ("drafted, verified, wasted", f"{facts['drafted']}, {facts['verified']}, {facts['wasted']}"),
        *(
            (f"time: {PHASES.get(phase, phase)}", f"{seconds:.2f} s, {percent(seconds, tally.seconds)}")
            for phase, seconds in phases.items()
        ),
    ]
    table(title, ("what", "value"), rows)
    depths = [(str(k), f"{p:.3f}", str(n)) for k, p, n in tally.acceptance()]
    if depths:
        table(
            "acceptance by depth",
            ("depth", "P(A >= depth)", "rounds"),
            depths,
        )
