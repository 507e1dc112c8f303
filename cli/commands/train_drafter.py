"""`specstop train-drafter`."""

from __future__ import annotations

from pathlib import Path

from .. import options
from ..output import next_step, print_json, progress_bars, write
from .info import show_artefact


def train_drafter(
    *,
    out: Path,
    kind: str,
    source: options.PromptSource,
    target: str | None = None,
    depth: int = 4,
    outputs: int = 0,
    max_new_tokens: int = 128,
    temperature: float = 0.7,
    epochs: int | None = None,
    batch_size: int = 2,
    learning_rate: float = 1e-3,
    trainer: list[str] | None = None,
    checkpoints: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    device_map: str | None = None,
    dtype: str = "float32",
    overwrite: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Fit a drafter on texts and hidden states of the target, and save it as a folder.

    Example: specstop train-drafter --target T --prompts train.jsonl --kind medusa --out drafter
    """
    arguments = options.key_values("--trainer", trainer)
    models = options.Models(target, None, ["lookup"], device, device_map, dtype)  # without a draft model
    prompts = source.read(models, "train")
    from ...train.drafters.fit import check_arguments, train_drafter as run

    check_arguments(out, kind, depth, outputs, max_new_tokens, temperature, seed, checkpoints, overwrite)
    with progress_bars(quiet or json) as progress:
        pair = models.open(progress, "plain")
        trained = run(
            pair, source.apply_template(prompts, pair), out, kind, depth=depth, outputs=outputs,
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, epochs=epochs, batch_size=batch_size,
            learning_rate=learning_rate, trainer=arguments, work=checkpoints, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    if json:
        print_json(dict(trained.metrics))
        return
    show_artefact(out)
    write(f"the drafter is in {out}; its README.md has this table")
    # The shipped pair has its own prompts.
    words = ("PROMPT", *options.repeated("target", "chat")) if target else ()
    next_step("decode", *words, "--drafter", f"{kind}:{out}")
