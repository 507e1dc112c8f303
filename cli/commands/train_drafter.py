"""`specstop train-drafter`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common import find_prompts, flat
from ..console.output import next_step, output, print_json, progress_bars, table
from ..options.config import config_saved
from ..options.models import Models
from ..options.prompts import Chat, Long
from ..options.shared import (
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
    Seed,
    Target,
)
from ..options.training import Training, key_values

if TYPE_CHECKING:
    from ...decode.drafters.folder import TrainedDrafter


def train_drafter(
    *,
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
    batch_size: Annotated[int, typer.Option(help="Texts in a training step.")] = 2,
    learning_rate: Annotated[float, typer.Option(help="Learning rate at its peak.")] = 1e-3,
    training: Training,
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "cpu",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit a drafter on the target's own texts and hidden states, and save it as a folder."""
    trainer = key_values("trainer", training.trainer)
    from ...collect.prompts.read import apply_chat_template
    from ...train.drafters.run import check_asked, train_drafter as run

    check_asked(out, kind, depth, max_new_tokens, temperature, seed, training.checkpoints, overwrite)
    with progress_bars(quiet or json) as progress, config_saved(out):
        # As for lookup, no draft model stands beside the target; that of the shipped pair is left alone.
        found = Models(target, drafter="lookup").find(progress)._replace(draft=None)
        chosen = find_prompts(prompts, found.demo, "train", limit)
        pair = Models(device=device, device_map=device_map, dtype=dtype, engine="plain").open(found)
        trained = run(
            pair, apply_chat_template(chosen, pair.tokenizer) if chat else chosen, out, kind,
            depth=depth, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, epochs=epochs,
            batch_size=batch_size, learning_rate=learning_rate, trainer=trainer, work=training.checkpoints,
            resume=training.resume,
            long=long, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    if json:
        print_json(dict(trained.metrics))
        return
    show_drafter(trained, out)
    # The shipped pair brings prompts of its own.
    told = ("PROMPT", "--target", target, *(("--chat",) if chat else ())) if target else ()
    next_step("decode", *told, "--drafter", f"{kind}:{out}")


def show_drafter(trained: TrainedDrafter, out: Path) -> None:
    """Print what was trained, and acceptance by depth."""
    metrics = dict(trained.metrics)
    shares = metrics.pop("acceptance", [])
    table(f"{out}: a {trained.kind} drafter", ("what", "value"), flat(metrics))
    rows = [(str(depth), f"{share:.3f}") for depth, share in enumerate(shares, 1)]
    if rows:  # none where no text was long enough to measure it
        table("acceptance by depth, greedy texts of prompts held out", ("depth", "P(A >= depth)"), rows)
    output().print(f"the drafter is in {out}; its README.md has this table")
