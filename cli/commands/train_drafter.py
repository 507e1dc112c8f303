"""`specstop train-drafter`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...policies.errors import InputError
from ..common import find_prompts, find_target, flat, open_pair
from ..console.output import next_step, output, print_json, progress_bars, table
from ..options.config import config_saved
from ..options.prompts import Chat, Long
from ..options.shared import (
    Config,
    Device,
    DeviceMap,
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
)

if TYPE_CHECKING:
    from ...decode.drafters.folder import TrainedDrafter


def train_drafter(
    out: Out,
    kind: Annotated[
        str, typer.Option(help="medusa, hydra (heads), ctc, or layer (one autoregressive transformer layer).")
    ],
    prompts: Prompts = None,
    chat: Chat = False,
    long: Long = "skip",
    target: Target = None,
    depth: Annotated[int, typer.Option(help="Number of tokens that it learns to propose.")] = 4,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature of half of the target's texts; the other half is greedy.")
    ] = 0.7,
    epochs: Annotated[int | None, typer.Option(help="Maximum epochs; training stops early.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Texts in a training step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    accelerator: Annotated[str, typer.Option(help="Where Lightning trains: cpu, gpu, mps or auto.")] = "cpu",
    devices: Annotated[
        str, typer.Option(help="Devices that Lightning trains on: a count, a list such as 0,1, or auto.")
    ] = "1",
    precision: Annotated[
        str, typer.Option(help="Precision that Lightning trains in: 32-true, bf16-mixed or 16-mixed.")
    ] = "32-true",
    checkpoints: Annotated[
        Path | None, typer.Option(help="Work folder for the target's texts and states, checkpoints and logs.")
    ] = None,
    resume: Resume = False,
    logger: Annotated[
        str | None, typer.Option(help="csv, tensorboard, wandb, mlflow or none; default: csv, in --checkpoints.")
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "cpu",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
    set: Set = [],  # noqa: B006
) -> None:
    """Fit a drafter on the target's own texts and hidden states, and save it as a folder."""
    if resume and checkpoints is None:
        raise InputError("--resume: give the work folder of the interrupted run with --checkpoints")
    from ...collect.prompts.read import apply_chat_template
    from ...train.drafters.run import train_drafter as run
    from ...train.heads.fitting import FitOptions

    options = FitOptions(
        accelerator, devices, precision, epochs, batch_size, learning_rate, checkpoints, resume, logger
    )
    with progress_bars(quiet or json) as progress, config_saved(out):
        names = find_target(target, None, kind, progress)
        chosen = find_prompts(prompts, names[2], "train", limit)
        pair = open_pair(names[0], None, device, dtype, "plain", device_map=device_map)
        trained = run(
            pair, apply_chat_template(chosen, pair.tokenizer) if chat else chosen, out, kind,
            depth=depth, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, fit_options=options,
            long=long, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    if json:
        print_json(dict(trained.metrics))
        return
    show_drafter(trained, out)
    next_step("decode", *(("--target", target) if target else ()), "--drafter", f"{kind}:{out}")


def show_drafter(trained: TrainedDrafter, out: Path) -> None:
    """Print what was trained, and acceptance by depth."""
    metrics = dict(trained.metrics)
    shares = metrics.pop("acceptance")
    table(f"{out}: a {trained.kind} drafter", ("what", "value"), flat(metrics))
    rows = [(str(depth), f"{share:.3f}") for depth, share in enumerate(shares, 1)]
    table("acceptance by depth, greedy texts of prompts held out", ("depth", "P(A >= depth)"), rows)
    output().print(f"the drafter is in {out}; its README.md has this table")
