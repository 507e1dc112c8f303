"""Fitting a network by lightning: stock early stopping and checkpoints, progress, no output of its own."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from ...policies.display import Progress, silent
from ...policies.errors import InputError

MONITOR = "held_out_loss"
PATIENCE = 5
LAST = "last.ckpt"


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


def make_trainer(folder: Path, epochs: int, trainer: Mapping[str, Any], callbacks: list[Callback]) -> lightning.Trainer:
    """Return a Trainer for the CPU, without logger and console output unless `trainer` says otherwise.

    Args:
        folder: of checkpoints and logs.
        epochs: maximum.
        trainer: further arguments of `lightning.Trainer`, such as `accelerator`, `devices` or `precision`.
        callbacks: in addition to those in `trainer`.

    Raises:
        InputError: lightning refuses an argument, or it would use several devices.
    """
    arguments = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "log_every_n_steps": 10, "default_root_dir": str(folder), "max_epochs": epochs, **trainer,
    }  # fmt: skip
    arguments["callbacks"] = [*callbacks, *arguments.get("callbacks", ())]
    try:
        made = lightning.Trainer(**arguments)
    except (ValueError, RuntimeError, TypeError, ImportError, MisconfigurationException) as error:
        reason = " ".join(str(error).split())[:300].replace("Trainer.__init__() ", "")
        raise InputError(f"--trainer: {reason}") from None
    if made.num_devices > 1:  # each would read all batches
        raise InputError(f"--trainer devices: expected one device, not {made.num_devices}")
    return made


def fit_module(
    module: lightning.LightningModule,
    training: Any,
    validation: Any = None,
    *,
    task: str,
    epochs: int,
    trainer: Mapping[str, Any] | None = None,
    progress: Progress = silent,
    folder: Path | None = None,
    resume: bool = False,
) -> None:
    """Train a module until its held-out loss has not fallen for `PATIENCE` epochs, and load the weights of the best epoch.

    Args:
        module: logs the held-out loss as `MONITOR`.
        training, validation: data loaders; `training` may be a data module with both.
        task: name for the progress.
        epochs: maximum.
        trainer: see `make_trainer`.
        progress: see `Progress`.
        folder: keeps checkpoints; None = a temporary one.
        resume: continue from the last checkpoint in `folder`, if there is one.

    Raises:
        InputError: as `make_trainer`; the checkpoint is of another network; or training diverged.
        KeyboardInterrupt: the run was interrupted; lightning would end the process.
    """
    with contextlib.ExitStack() as stack:
        keeps = folder is not None
        folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        best = ModelCheckpoint(folder, monitor=MONITOR, save_last=keeps, enable_version_counter=False)
        callbacks = [best, EarlyStopping(MONITOR, patience=PATIENCE), ReportProgress(task, progress)]
        stack.enter_context(_quiet())
        made = make_trainer(folder, epochs, trainer or {}, callbacks)
        last = folder / LAST if resume and (folder / LAST).exists() else None
        interrupted = False
        try:
            made.fit(module, training, validation, ckpt_path=last, weights_only=True)
        except SystemExit:  # lightning ends the process for SIGINT and SIGTERM, without a message
            interrupted = True
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            if last is None:
                raise
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"--resume: {last} is not a checkpoint of this network ({reason}); remove it") from None
        if made.received_sigterm and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)  # lightning has kept it from the process
        if interrupted:
            raise KeyboardInterrupt
        state = torch.load(best.best_model_path, weights_only=True, map_location="cpu")["state_dict"]
        loss = best.best_model_score
    if (loss is not None and not loss.isfinite()) or not all(
        bool(values.isfinite().all()) for values in state.values()
    ):
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
