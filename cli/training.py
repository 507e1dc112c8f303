"""The options of training networks through Lightning, heads and drafters alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..policies.errors import InputError
from .options import Resume

if TYPE_CHECKING:
    from ..train.heads.fitting import FitOptions


@dataclass(frozen=True)
class Training:
    """Options by the names of the fields of `FitOptions`."""

    epochs: Annotated[int | None, typer.Option(help="Maximum epochs of a network; training stops early.")] = None
    batch_size: Annotated[
        int | None, typer.Option(help="Rows in a training step of a neural head, or texts in one of a drafter.")
    ] = None
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate of a network, at its peak.")] = None
    accelerator: Annotated[str, typer.Option(help="Where Lightning trains networks: cpu, gpu, mps or auto.")] = "cpu"
    devices: Annotated[
        str, typer.Option(help="The device that Lightning trains on: 1, or which one with a comma, such as 3,")
    ] = "1"
    precision: Annotated[
        str, typer.Option(help="Precision that Lightning trains in: 32-true, bf16-mixed or 16-mixed.")
    ] = "32-true"
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Work folder: checkpoints and logs of a network, trials of a search, the texts a drafter learns from."
        ),
    ] = None
    resume: Resume = False
    logger: Annotated[
        str | None, typer.Option(help="csv, tensorboard, wandb, mlflow or none; default: csv, in --checkpoints.")
    ] = None

    def fit_options(self, **more: Any) -> FitOptions:
        """Return them with further ones.

        Raises:
            InputError: --resume without the folder of a run to go on from.
        """
        if self.resume and self.checkpoints is None:
            raise InputError("--resume: give the work folder of the interrupted run with --checkpoints")
        from ..train.heads.fitting import FitOptions

        return FitOptions(**vars(self), **more)
