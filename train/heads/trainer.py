"""Fitting a network by lightning, for heads and drafters: one module, stock early stopping and checkpoints, progress."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...policies.display import Progress, silent
from ...policies.errors import InputError

MONITOR = "held_out_loss"
PATIENCE = 5
LAST = "last.ckpt"

Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor | int]]
"""Returns the mean loss of a network on a batch, and the number of items that it is a mean of."""

Schedule = Callable[[Optimizer, int], LRScheduler]
"""Returns a learning rate schedule for a number of steps."""


class FitModule(lightning.LightningModule):
    """A network, its loss, and AdamW.

    Args:
        network: to fit.
        loss: see `Loss`.
        schedule: of the learning rate; None = constant.
        adam: arguments of `torch.optim.AdamW`.
    """

    def __init__(self, network: nn.Module, loss: Loss, schedule: Schedule | None = None, **adam: Any) -> None:
        super().__init__()
        self.network, self.loss, self.schedule, self.adam = network, loss, schedule, adam

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self.network, batch)[0]

    def validation_step(self, batch: Any, index: int) -> None:
        """Log the held-out loss."""
        loss, count = self.loss(self.network, batch)
        self.log(MONITOR, loss, batch_size=max(1, int(count)))  # weights the mean over batches

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig | Optimizer:
        """Return AdamW with the schedule."""
        optimizer = AdamW(self.network.parameters(), **self.adam)
        if self.schedule is None:
            return optimizer
        schedule = self.schedule(optimizer, max(2, int(self.trainer.estimated_stepping_batches)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ReportProgress(Callback):
    """Reports every batch to a `Progress`: an epoch of a drafter takes many minutes."""

    def __init__(self, task: str, progress: Progress) -> None:
        self.task, self.progress = task, progress

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        """Report the batches so far, those of an earlier run included."""
        self.progress(self.task, trainer.global_step, int(trainer.estimated_stepping_batches))

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Report the end, also if training stopped early."""
        self.progress(self.task, trainer.global_step, trainer.global_step)


def make_trainer(
    folder: Path, epochs: int, arguments: Mapping[str, Any], callbacks: list[Callback]
) -> lightning.Trainer:
    """Return a Trainer for the CPU, without logger and console output unless `arguments` say otherwise.

    Args:
        folder: of checkpoints and logs.
        epochs: maximum.
        arguments: further arguments of `lightning.Trainer`, such as `accelerator`, `devices` or `precision`.
        callbacks: in addition to those in `arguments`.

    Raises:
        InputError: lightning refuses an argument, or it would use several devices.
    """
    settings = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "log_every_n_steps": 10, "default_root_dir": str(folder), "max_epochs": epochs,
        **arguments,
    }  # fmt: skip
    settings["callbacks"] = [*callbacks, *settings.get("callbacks", ())]
    try:
        with _quiet():
            trainer = lightning.Trainer(**settings)
    except (ValueError, RuntimeError, TypeError, ImportError, MisconfigurationException) as error:
        reason = " ".join(str(error).split())[:300].replace("Trainer.__init__() ", "")
        raise InputError(f"--trainer: {reason}") from None
    if trainer.num_devices > 1:  # each would read all batches
        raise InputError(f"--trainer devices: expected one device, not {trainer.num_devices}")
    return trainer


def fit_module(
    module: FitModule,
    training: Any,
    validation: Any,
    *,
    task: str,
    epochs: int,
    trainer: Mapping[str, Any] | None = None,
    progress: Progress = silent,
    folder: Path | None = None,
) -> None:
    """Train a module until its held-out loss has not fallen for `PATIENCE` epochs, and load the weights of the best epoch.

    Args:
        module: with fresh weights.
        training, validation: data loaders.
        task: name for the progress.
        epochs: maximum.
        trainer: see `make_trainer`.
        progress: see `Progress`.
        folder: keeps checkpoints, from the last of which training continues; None = a temporary one.

    Raises:
        InputError: as `make_trainer`; the checkpoint is of another network; or training diverged.
        KeyboardInterrupt: the run was interrupted; lightning would end the process.
    """
    with contextlib.ExitStack() as stack:
        is_kept = folder is not None
        folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        best = ModelCheckpoint(folder, monitor=MONITOR, save_last=is_kept, enable_version_counter=False)
        callbacks = [best, EarlyStopping(MONITOR, patience=PATIENCE), ReportProgress(task, progress)]
        runner = make_trainer(folder, epochs, trainer or {}, callbacks)
        stack.enter_context(_quiet())
        last = folder / LAST if (folder / LAST).exists() else None
        is_interrupted = False
        try:
            runner.fit(module, training, validation, ckpt_path=last, weights_only=True)
        except SystemExit:  # lightning ends the process for SIGINT and SIGTERM, without a message
            is_interrupted = True
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            if last is None:
                raise
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"--checkpoints: {last} is not a checkpoint of this network ({reason}); remove it"
            ) from None
        if runner.received_sigterm and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)  # lightning has kept it from the process
        if is_interrupted:
            raise KeyboardInterrupt
        state = torch.load(best.best_model_path, weights_only=True, map_location="cpu")["state_dict"]
        loss = best.best_model_score
    if (loss is not None and not loss.isfinite()) or not all(bool(x.isfinite().all()) for x in state.values()):
        raise InputError(
            "--param learning_rate: training diverged, no epoch has a finite held-out loss; choose a smaller one"
        )
    module.load_state_dict(state)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress lightning's advice on hardware and workers."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("lightning.pytorch", "lightning.fabric"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning.*")
            warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
