"""`specstop train-drafter`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import (
    Device,
    DeviceMap,
    Dtype,
    Json,
    MaxNewTokens,
    Models,
    Out,
    Overwrite,
    PromptSource,
    Quiet,
    Seed,
    Target,
    config_saved,
    key_values,
)
from ..output import flat, next_step, output, print_json, progress_bars, table

if TYPE_CHECKING:
    from ...decode.drafters.folder import TrainedDrafter


def train_drafter(
    *,
    out: Out,
    kind: Annotated[
        str, typer.Option(help="medusa, hydra (heads), ctc, or layer (one autoregressive transformer layer).")
    ],
    source: PromptSource,
    target: Target = None,
    depth: Annotated[int, typer.Option(help="Number of tokens that it learns to propose.")] = 4,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature of half of the target's texts; the other half is greedy.")
    ] = 0.7,
    epochs: Annotated[int | None, typer.Option(help="Maximum epochs; training stops early.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts in a training step.")] = 2,
    learning_rate: Annotated[float, typer.Option(help="Learning rate at its peak.")] = 1e-3,
    trainer: Annotated[
        list[str],
        typer.Option(help="Argument of lightning's Trainer as key=value, such as accelerator=gpu; repeatable."),
    ] = [],  # noqa: B006
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the recorded texts and the checkpoints; an interrupted run continues from it."
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit a drafter on the target's own texts and hidden states, and save it as a folder.

    Example: specstop train-drafter --target T --prompts train.jsonl --kind medusa --out drafter
    """
    arguments = key_values("--trainer", trainer)
    from ...train.drafters.fit import check_arguments, train_drafter as run

    check_arguments(out, kind, depth, max_new_tokens, temperature, seed, checkpoints, overwrite)
    with progress_bars(quiet or json) as progress, config_saved(out):
        models = Models(target, None, "lookup", device, device_map, dtype)  # without a draft model
        prompts = source.read(models, "train")
        pair = models.open(models.find(progress), "plain")
        trained = run(
            pair, source.apply_template(prompts, pair), out, kind, depth=depth, max_new_tokens=max_new_tokens,
            temperature=temperature, seed=seed, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate,
            trainer=arguments, work=checkpoints, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    if json:
        print_json(dict(trained.metrics))
        return
    show_drafter(trained, out)
    # The shipped pair has its own prompts.
    words = ("PROMPT", "--target", target, *(("--chat",) if source.chat else ())) if target else ()
    next_step("decode", *words, "--drafter", f"{kind}:{out}")


def show_drafter(trained: TrainedDrafter, out: Path) -> None:
    """Print the metrics of a drafter, and acceptance by depth."""
    metrics = dict(trained.metrics)
    shares = metrics.pop("acceptance", [])
    table(f"{out}: a {trained.kind} drafter", ("what", "value"), flat(metrics))
    rows = [(str(depth), f"{share:.3f}") for depth, share in enumerate(shares, 1)]
    if rows:  # there are none if no text was long enough to measure it
        table("acceptance by depth, greedy texts of prompts held out", ("depth", "P(A >= depth)"), rows)
    output().print(f"the drafter is in {out}; its README.md has this table")
