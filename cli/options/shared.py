"""The options that commands share: one name, one help text, one default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .config import apply_settings, load_config

Target = Annotated[str | None, typer.Option(help="Target model: a folder or a hub name. Default: the shipped pair.")]
Draft = Annotated[str | None, typer.Option(help="Draft model of the same tokenizer: a folder or a hub name.")]
Drafter = Annotated[
    str,
    typer.Option(
        help="Where candidates come from: model (the draft model), or without one lookup, suffix, medusa:PATH, hydra:PATH, "
        "ctc:PATH, ctc-released:PATH, layer:PATH (`specstop train-drafter`), or a plugin; two at once: suffix+model, "
        "lookup+medusa:PATH."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help='Prompts: .jsonl, .csv or .parquet with "prompt" (and "id", "group"), .txt, a folder, hf:org/name.'
    ),
]
Traces = Annotated[Path, typer.Option(help="Trace folder of `specstop collect`.")]
ProfileFile = Annotated[Path, typer.Option("--profile", help="Latency profile of `specstop profile`.")]
LiveProfile = Annotated[
    Path | None,
    typer.Option(
        "--profile", help="Latency profile: chains are filled up to a cheaper size, policies hear what rounds take."
    ),
]
Policies = Annotated[
    list[str],
    typer.Option("--policy", help="fixed:4, confidence:0.4, a policy folder, or plugin?key=value; repeatable."),
]
Out = Annotated[Path, typer.Option(help="Folder or file that the result is written to.")]
Device = Annotated[str, typer.Option(help="Device that the models run on: cpu, cuda, cuda:1, ...")]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="Where accelerate puts the target's layers: auto (all GPUs, then host and disk), a device, or a JSON object of "
        "devices by module. The draft stays on --device. Default: all on --device."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Number type of the models: float32, bfloat16, float16 or float64. Quantised ones keep their own."
    ),
]
Engine = Annotated[
    str, typer.Option(help="How models compute: auto, plain (transformers), packed (reordered weights), compact.")
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 = greedy.")]
Verification = Annotated[
    str,
    typer.Option(
        help="auto (a learned policy's own, else the fastest lossless one: block for chains that sample, else match), "
        "match, rejection, rejection_replace, block (chains), point: lossless. typical: LOSSY, it changes the "
        "output distribution."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of everything random in this command: sampling noise, splits, fits.")]
MaxNewTokens = Annotated[int, typer.Option(help="Longest text in new tokens.")]
Depth = Annotated[
    int,
    typer.Option(help="Most tokens of the rounds that are recorded or timed: what is trained on them drafts no more."),
]
TREES = (
    "children by depth (4,2,2,1), fork:4x5, medusa-63 (Medusa's), ctc-released (with that drafter) or parents:-1,-1,0"
)
"""What names a tree, for help texts (`decode.topology.parse_tree`)."""
Tree = Annotated[str | None, typer.Option(help=f"Draft trees: {TREES}; default: the policy's own, or a chain.")]
MostDrafted = Annotated[
    int | None, typer.Option("--depth", help="Most tokens drafted in a round; default: as many as the policy drafts.")
]
Limit = Annotated[int | None, typer.Option(help="Use only so many prompts, from the first on.")]
Batch = Annotated[
    int, typer.Option(help="Texts that are decoded side by side; one that ends gives its place to the next.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON in the place of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
# Both are read before all other options, whose defaults they set.
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=load_config,
        is_eager=True,
        help="Read options from a YAML file, such as the run.yaml beside a result.",
    ),
]
Set = Annotated[
    list[str],
    typer.Option("--set", callback=apply_settings, is_eager=True, help="Set an option as key=value; repeatable."),
]
