"""`specstop collect`."""

from __future__ import annotations

from pathlib import Path

from .common import find_pair, find_prompts, open_pair
from .config import save_config
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
    Out,
    Overwrite,
    Prompts,
    Quiet,
    Resume,
    Seed,
    Set,
    Target,
    Temperature,
)


def collect(
    out: Out,
    prompts: Prompts = None,
    target: Target = None,
    draft: Draft = None,
    depth: Depth = 10,
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    limit: Limit = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
    set: Set = [],  # noqa: B006
) -> None:
    """Record what the draft proposes at every position of the target's text, and what the target accepts."""
    from ..collect.run import collect as run

    with progress_bars(quiet or json) as progress:
        names = find_pair(target, draft, progress)
        chosen = find_prompts(prompts, names[2], "train", limit)
        pair = open_pair(*names[:2], device, dtype)
        trace = run(
            pair,
            chosen,
            out,
            target=names[0],
            draft=names[1],
            depth=depth,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
        save_config(Path(out))
    from .info import describe_trace

    facts, rows = describe_trace(trace)
    if json:
        print_json(facts)
        return
    table(
        f"{out}: {facts['anchors']} anchors of {facts['prompts']} prompts",
        ("depth", "P(A >= depth)", "anchors"),
        rows,
    )
