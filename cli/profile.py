"""`specstop profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import find_pair, find_prompts, flat, open_pair
from .config import given_config, save_config
from .console import print_json, progress_bars, table
from .options import (
    Config,
    Depth,
    Device,
    Draft,
    Dtype,
    Engine,
    Json,
    Overwrite,
    Policies,
    Prompts,
    Quiet,
    Set,
    Target,
    Temperature,
)
from .streams import say


def profile(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    prompts: Prompts = None,
    target: Target = None,
    draft: Draft = None,
    policy: Policies = [],  # noqa: B006
    depth: Depth = 10,
    temperature: Temperature = 0.0,
    tree: Annotated[str | None, typer.Option(help="Time rounds of this tree too: 4,2,2,1, fork:4x5, ...")] = None,
    budget: Annotated[float, typer.Option(help="Seconds at most; a quiet machine needs a fraction of them.")] = 90.0,
    repeats: Annotated[
        int | None, typer.Option(help="Repetitions, however noisy; by default as many as noise and --budget say.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    engine: Engine = "auto",
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
    set: Set = [],  # noqa: B006
) -> None:
    """Measure what draft steps, verifications and decisions cost on this machine, through the decoding loop."""
    from ..collect.prompts import encode
    from ..collect.run import facts, reading_room
    from ..decode.profile import measure_profile
    from ..decode.profile.measuring import Effort
    from ..policies.costs import MARK
    from ..policies.outputs import claim_file, refuse_inputs
    from ..policies.specs import load_policy

    claim_file(out, MARK, overwrite=overwrite)
    saved = claim_file(out.with_name(out.name + ".run.yaml"), b"command: profile", overwrite=True)
    refuse_inputs(saved, [given_config(saved)])
    with progress_bars(quiet or json) as progress:
        names = find_pair(target, draft, progress)
        rules = [load_policy(spec).limited(depth) for spec in policy]
        chosen = find_prompts(prompts, names[2], "train", 32)
        pair = open_pair(*names[:2], device, dtype, engine)
        measured = measure_profile(
            pair,
            encode(chosen, pair.tokenizer, reading_room(pair, 1)),
            depth=depth,
            tree=tree,
            temperature=temperature,
            policies=rules,
            effort=Effort(budget, repetitions=repeats),
            facts=facts(pair),
            progress=progress,
        )
    measured.save(out)
    if measured.noise is not None and measured.noise.is_noisy:
        say(f"warning: {measured.noise.text}")
    save_config(saved.parent, saved.name)
    from .info import _profile

    described = _profile(out)
    if json:
        print_json(described)
    else:
        table(str(out), ("what", "value"), flat(described))
