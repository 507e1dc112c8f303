"""A Lightning Trainer as `train` runs it: early stopping, a checkpoint to go on from, a logger by name, a quiet console."""

from __future__ import annotations

import logging
import pickle
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import loggers
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from ...policies.display import Progress
from ...policies.errors import InputError, close_match
from ...policies.files import read_json, write_json
from .fitting import FitOptions

MONITOR = "held_out_loss"
PATIENCE = 5
LAST = "last.ckpt"

FITTED = "fit.json"
"""The file beside a checkpoint that says of which fit it is."""

LOGGERS = {"csv": "CSVLogger", "tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLFlowLogger"}
"""Short names; a class of `lightning.pytorch.loggers` serves as well."""


class Patience(EarlyStopping):
    """Early stopping that a resumed run remembers: Lightning restores how long it has waited, and trains an epoch more."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Stop at once where the run that is gone on from had stopped."""
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience


class Reseed(Callback):
    """Seeds each step by its number, so that a resumed run draws what it would have drawn (dropout, say)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: lightning.Trainer, *args: Any) -> None:
        """Seed torch."""
        torch.manual_seed(hash((self.seed, trainer.global_step)) % 2**63)


class Report(Callback):
    """Tells a `Progress` of each batch: an epoch of a large target's texts takes many minutes."""

    def __init__(self, task: str, progress: Progress, epochs: int) -> None:
        self.task, self.progress, self.epochs = task, progress, epochs

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin, or go on after the epochs of a run that was cut off."""
        self._tell(trainer, 0)

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        """Count the batch."""
        last = trainer.is_last_batch and trainer.current_epoch + 1 >= self.epochs
        if not last:  # that one ends the task, below
            self._tell(trainer, args[-1] + 1)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """End the task, early or not."""
        done = trainer.current_epoch * int(trainer.num_training_batches)
        self.progress(self.task, done, done)

    def _tell(self, trainer: lightning.Trainer, batches: int) -> None:
        each = int(trainer.num_training_batches)
        self.progress(self.task, trainer.current_epoch * each + batches, self.epochs * each)


def find_logger(name: str | None, folder: Path | None) -> Any:
    """Return a logger of Lightning that writes into `folder`, or False for none.

    Args:
        name: csv, tensorboard, wandb, mlflow, none, or a class of `lightning.pytorch.loggers`; None = csv where there is a
            folder.
        folder: of the run.

    Raises:
        InputError: an unknown name, no folder to write into, or a package that is not installed.
    """
    if name == "none" or (name is None and folder is None):
        return False
    wanted = LOGGERS.get(name or "csv", name or "csv")
    kind: Any = getattr(loggers, wanted, None)
    if not (isinstance(kind, type) and issubclass(kind, loggers.Logger)):
        known = [*LOGGERS, "none"]
        raise InputError(
            f"--logger: unknown logger {name!r}{close_match(str(name), known)}; expected {', '.join(known)}"
        )
    if folder is None:
        raise InputError(f"--logger {name}: give a work folder with --checkpoints for it to write into")
    make: Any = kind
    try:
        return make(save_dir=str(folder), name="logs")
    except ModuleNotFoundError as error:
        raise InputError(f"--logger {name}: {' '.join(str(error).split())}") from None
    except Exception as error:  # services raise errors of their own where there is no account or no connection
        raise InputError(f"--logger {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from None


def make_trainer(
    options: FitOptions, folder: Path, epochs: int, callbacks: Sequence[Callback] = ()
) -> tuple[lightning.Trainer, ModelCheckpoint]:
    """Return a Trainer that stops early on `held_out_loss`, and the callback that knows its best checkpoint.

    Args:
        options: accelerator, devices, precision, logger.
        folder: where checkpoints are written.
        epochs: at most.
        callbacks: further ones.

    Raises:
        InputError: no such accelerator, device or precision, or more than one device.
    """
    # Without a version counter the last checkpoint is always called `LAST`, which is what `--resume` looks for.
    best = ModelCheckpoint(folder, monitor=MONITOR, save_last=True, enable_version_counter=False)
    # Not into `folder`: where there is no work folder it is one that goes with the run.
    logger = find_logger(options.logger, options.checkpoints)
    try:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator=options.accelerator,
            devices=_devices(options.devices),
            precision=cast(Any, options.precision),  # it refuses what is none
            logger=logger,
            callbacks=[best, Patience(MONITOR, patience=PATIENCE), *callbacks],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(folder),
            num_sanity_val_steps=0,
            log_every_n_steps=10,
        )
    except (ValueError, RuntimeError, TypeError, ImportError, MisconfigurationException) as error:
        said = " ".join(str(error).split())[:300]
        raise InputError(f"--accelerator, --devices, --precision: {said}") from None
    if trainer.num_devices > 1:  # each would be shown all batches: rows are read in a stream that nothing deals out
        raise InputError(
            f"--devices: expected one device, not {trainer.num_devices}; give 1, or which one with a comma, such as 3,"
        )
    return trainer, best


def check_trainer(options: FitOptions, folder: Path) -> None:
    """Refuse options that no Trainer takes, before the work whose results it is to fit; `InputError` as `make_trainer`."""
    with _quiet():
        make_trainer(options, folder, 1)


def best_epoch(
    module: lightning.LightningModule,
    data: lightning.LightningDataModule,
    options: FitOptions,
    folder: Path,
    epochs: int,
    report: Report,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Fit without advice on the console, and return the weights of the best epoch.

    Args:
        module, data: what is fitted, on what.
        options: of the Trainer.
        folder: of checkpoints, where `options.resume` goes on from the last one.
        epochs: at most.
        report: is told of each batch.
        seed: of what is drawn while it is fitted.

    Raises:
        InputError: as `make_trainer`; the checkpoint is not of such a run; or no epoch left a loss that is a number.
        KeyboardInterrupt: the run was interrupted, which Lightning would turn into the end of the process.
    """
    with _quiet():
        trainer, best = make_trainer(options, folder, epochs, [report, Reseed(seed)])
    again = str(folder / LAST) if options.resume and (folder / LAST).exists() else None
    stopped = False
    try:
        with _quiet():
            trainer.fit(module, datamodule=data, ckpt_path=again, weights_only=True)
        state: dict[str, torch.Tensor] = torch.load(best.best_model_path, weights_only=True, map_location="cpu")[
            "state_dict"
        ]
    except SystemExit:  # with exit code 1 for SIGINT and 0 for SIGTERM, and no word
        stopped = True
    except (RuntimeError, ValueError, KeyError, OSError, pickle.UnpicklingError) as error:
        if again is None:
            raise
        # What torch says of a file that it cannot read is advice to unpickle it all the same.
        unread = isinstance(error, pickle.UnpicklingError)
        reason = "it is damaged" if unread else " ".join(str(error).split())[:200]
        raise InputError(
            f"--resume: {again} is not a checkpoint of such a run: {reason}; remove it to begin anew with what else is there"
        ) from None
    if trainer.received_sigterm and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.raise_signal(signal.SIGTERM)  # Lightning has kept it from the process, which it would have ended
    if stopped:
        raise KeyboardInterrupt
    loss = best.best_model_score
    if (loss is not None and not loss.isfinite()) or not all(bool(t.isfinite().all()) for t in state.values()):
        raise InputError(
            "--learning-rate: training diverged: no epoch left a held-out loss that is a number; give less"
        )
    return state


def _devices(text: str) -> Any:
    """Return what a Trainer takes: a count, numbers written with a comma, or "auto"."""
    if text.lstrip("-").isdigit():
        return int(text)
    if "," in text:
        try:
            return [int(part) for part in text.split(",") if part]
        except ValueError:
            raise InputError(f"--devices: expected 1, or which one with a comma, such as 3, but got {text!r}") from None
    return text


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's advice about hardware and workers off the console."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
    known = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in known]
    for logger in known:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning.*")
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        for logger, level in zip(known, levels, strict=True):
            logger.setLevel(level)


def claim_fit(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write down in a work folder of which fit its checkpoints are.

    Raises:
        InputError: the checkpoint there is of another fit, which nothing in its weights need tell.
    """
    # One of an earlier version has no such file, and is gone on from as it was then.
    if (folder / LAST).exists() and (folder / FITTED).exists():
        kept = read_json(folder / FITTED, "--checkpoints")
        if not isinstance(kept, dict):
            raise InputError(f"--checkpoints: expected an object in {folder / FITTED}, not {str(kept)[:80]!r}")
        apart = {name: (str(kept.get(name)), str(value)) for name, value in facts.items() if kept.get(name) != value}
        differ = [f"{name} {there[:40]}, not {here[:40]}" for name, (there, here) in apart.items()]
        if differ:
            raise InputError(
                f"--resume: the checkpoint in {folder} is of a run with {'; '.join(differ)}; give the same, or choose "
                "another --checkpoints"
            )
    write_json(folder / FITTED, facts)


@contextmanager
def work_folder(options: FitOptions) -> Iterator[Path]:
    """Yield the folder for checkpoints: the given one, or one that is gone afterwards."""
    path = options.checkpoints
    if path is not None:
        if (path / LAST).exists() and not options.resume:
            raise InputError(f"--checkpoints: {path} has those of another run; pass --resume, or choose another folder")
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
