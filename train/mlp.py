"""The MLP head, trained through Lightning; module and data module work with a Trainer of your own."""

from __future__ import annotations

import itertools
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..policies.heads import Basis, MLPHead
from ..policies.progress import Progress, silent
from .fitting import FitTask
from .linear import fit_basis
from .rows import FitRows


class StopHeadModule(lightning.LightningModule):
    """Two logits, `accept` and `next`, from standardised columns; binary cross-entropy on the rows that have a label.

    Args:
        width: input columns, F' + 1 (the flag for depth 0).
        hidden: widths of the hidden layers.
        rate: learning rate of AdamW.
    """

    def __init__(self, width: int, hidden: Sequence[int] = (64, 64), rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = [width, *hidden, 2]
        self.layers = nn.ModuleList([nn.Linear(i, o) for i, o in itertools.pairwise(sizes)])
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return [R, 2] logits for columns [R, F' + 1]."""
        for index, layer in enumerate(self.layers):
            x = layer(x if index == 0 else nn.functional.silu(x))
        return x

    def _loss(self, batch: list[Tensor]) -> Tensor:
        columns, labels, known = batch
        losses = nn.functional.binary_cross_entropy_with_logits(self(columns), labels, reduction="none")
        return (losses * known).sum() / known.sum().clamp_min(1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss of a batch (columns, labels [R, 2], known [R, 2])."""
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log the held-out loss."""
        self.log("held_out_loss", self._loss(batch), batch_size=int(batch[2].sum()))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW under a one-cycle schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.rate, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TraceDataModule(lightning.LightningDataModule):
    """Batches of training and held-out rows, put through a basis.

    Args:
        rows, held_out: from `fit_rows`.
        basis: standardises them.
        batch: rows a step.
        seed: of the shuffling.
    """

    def __init__(self, rows: FitRows, held_out: FitRows, basis: Basis, batch: int = 1024, seed: int = 0) -> None:
        super().__init__()
        self.parts, self.basis, self.batch, self.seed = (rows, held_out), basis, batch, seed

    def _data(self, rows: FitRows) -> TensorDataset:
        first = rows.depth == 0
        columns = torch.where(first[:, None], self.basis(rows.features, 0), self.basis(rows.features, 1))
        columns = torch.cat([columns, first[:, None].float()], 1)
        labels = torch.stack([rows.accepted, rows.followed], 1).float()
        return TensorDataset(columns, labels, torch.stack([rows.drawn, rows.followed_known], 1).float())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches of the training rows."""
        shuffle = torch.Generator().manual_seed(self.seed)
        return DataLoader(_Batches(self._data(self.parts[0]), self.batch, shuffle), batch_size=None)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the held-out rows in order."""
        return DataLoader(_Batches(self._data(self.parts[1]), 1 << 16, None), batch_size=None)


class _Batches(torch.utils.data.IterableDataset[tuple[Tensor, ...]]):
    """Whole batches by index: a row at a time would spend the epoch in Python."""

    def __init__(self, data: TensorDataset, batch: int, shuffle: torch.Generator | None) -> None:
        self.data, self.batch, self.shuffle = data, batch, shuffle

    def __len__(self) -> int:
        return -(-len(self.data) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        count = len(self.data)
        order = torch.arange(count) if self.shuffle is None else torch.randperm(count, generator=self.shuffle)
        for at in order.split(self.batch):
            yield self.data[at]


class _Report(Callback):
    def __init__(self, progress: Progress, epochs: int) -> None:
        self.progress, self.epochs = progress, epochs

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.progress("train mlp", trainer.current_epoch + 1, self.epochs)


def fit_mlp(
    rows: FitRows,
    held_out: FitRows,
    names: Sequence[str],
    seed: int = 0,
    epochs: int = 20,
    progress: Progress = silent,
) -> MLPHead:
    """Train the network and keep the epoch with the least held-out loss.

    The caller's torch random state is left as it was.
    """
    mean, scale = fit_basis(rows, names)
    basis = Basis(names, mean, scale)
    with torch.random.fork_rng(), _quiet(), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        module = StopHeadModule(basis.width + 1)
        best = ModelCheckpoint(folder, monitor="held_out_loss", save_weights_only=True)
        callbacks = [best, EarlyStopping("held_out_loss", patience=5), _Report(progress, epochs)]
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, datamodule=TraceDataModule(rows, held_out, basis, seed=seed))
        state = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    tensors = {
        f"{part}.{i}": state[f"layers.{i}.{part}"] for i in range(len(module.layers)) for part in ("weight", "bias")
    }
    return MLPHead(names, {"mean": mean, "scale": scale, **tensors})


def fit_network(task: FitTask) -> tuple[MLPHead, dict[str, bytes]]:
    """Fit the network; see `Fitter`."""
    return fit_mlp(task.rows, task.held_out, task.names, task.seed, progress=task.progress), {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's advice about hardware and workers off the console."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
