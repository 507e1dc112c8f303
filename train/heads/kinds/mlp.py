"""The MLP head, trained through Lightning. Module and data module work with a Trainer of your own:

visited = visits(arrays, [replay(arrays, FixedLength(4), profile)])
rows = fit_rows(arrays, names, visited)
basis = fit_basis(rows, names)
module = StopHeadModule(basis.width + 1, hidden=(128, 128))
lightning.Trainer(max_epochs=30).fit(module, datamodule=TraceDataModule(rows, held_out, basis))
head = module.to_head(names, basis, rows)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ....policies.heads.build import Basis, MLPHead
from ....policies.progress import Progress, silent
from ..basis import basis_columns, fit_basis
from ..batches import Batches
from ..exported import exported
from ..fitting import FitOptions, FitTask
from ..rows import FitRows
from ..trainer import LAST, MONITOR, Report, fit_best, make_trainer, quiet, work_folder

EPOCHS, BATCH, RATE, DECAY = 20, 1024, 2e-3, 1e-3
WIDTH, LAYERS = 64, 2


class StopHeadModule(lightning.LightningModule):
    """Two logits, `accept` and `next`, from standardised columns; binary cross-entropy on the rows that have a label.

    Args:
        width: input columns, F' + 1 (the flag for depth 0).
        hidden: widths of the hidden layers.
        rate: learning rate of AdamW.
        decay: its weight decay.
    """

    def __init__(
        self, width: int, hidden: Sequence[int] = (WIDTH,) * LAYERS, rate: float = RATE, decay: float = DECAY
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = [width, *hidden, 2]
        self.layers = nn.ModuleList([nn.Linear(i, o) for i, o in itertools.pairwise(sizes)])
        self.rate, self.decay = rate, decay

    def to_head(self, names: Sequence[str], basis: Basis, rows: FitRows | None = None) -> MLPHead:
        """Return the head that a policy runs, with the weights as they are now.

        Args:
            names: the basis's features.
            basis: that the columns were put through.
            rows: that the module was fitted on: live, features are held within the range that they had there; None = as
                they come.
        """
        fitted: dict[str, Any] = {"mean": basis.mean, "scale": basis.scale}
        for at, layer in enumerate(self.layers):
            fitted |= {f"{part}.{at}": getattr(layer, part).detach().float().cpu() for part in ("weight", "bias")}
        return MLPHead(names, exported(fitted, names, rows))

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
        self.log(MONITOR, self._loss(batch), batch_size=int(batch[2].sum()))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW under a one-cycle schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=self.decay)
        steps = max(2, int(self.trainer.estimated_stepping_batches))
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

    def __init__(self, rows: FitRows, held_out: FitRows, basis: Basis, batch: int = BATCH, seed: int = 0) -> None:
        super().__init__()
        self.parts, self.basis, self.batch, self.seed = (rows, held_out), basis, batch, seed

    def _data(self, rows: FitRows) -> TensorDataset:
        columns = torch.from_numpy(basis_columns(self.basis, rows.features, rows.depth))
        columns = torch.cat([columns, (rows.depth == 0)[:, None].float()], 1)
        labels = rows.labels
        return TensorDataset(columns, labels, torch.stack([rows.drawn, rows.followed_known], 1).float())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches of the training rows."""
        return DataLoader(Batches(self._data(self.parts[0]), self.batch, self), batch_size=None)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the held-out rows in order."""
        return DataLoader(Batches(self._data(self.parts[1]), 1 << 16, None), batch_size=None)


def fit_mlp(
    rows: FitRows,
    held_out: FitRows,
    names: Sequence[str],
    seed: int = 0,
    epochs: int | None = None,
    progress: Progress = silent,
    options: FitOptions | None = None,
) -> MLPHead:
    """Train the network and keep the epoch with the least held-out loss.

    The caller's torch random state is left as it was.

    Args:
        rows, held_out: to fit on, and to stop early on.
        names: scalar features.
        seed: of weights and shuffling.
        epochs: at most; None = 20, or as the options say.
        progress: see `Progress`.
        options: of the Trainer, and `params`: `width`, `layers`, `weight_decay`, `learning_rate`.
    """
    options = options or FitOptions()
    most = epochs or options.epochs or EPOCHS
    basis = fit_basis(rows, names)
    params = options.params
    rate = float(options.learning_rate or params.get("learning_rate", RATE))
    hidden = (int(params.get("width", WIDTH)),) * int(params.get("layers", LAYERS))
    with torch.random.fork_rng(), quiet(), work_folder(options) as folder:
        torch.manual_seed(seed)
        module = StopHeadModule(basis.width + 1, hidden, rate, float(params.get("weight_decay", DECAY)))
        trainer, best = make_trainer(options, folder, most, [Report("train mlp", progress, most)])
        data = TraceDataModule(rows, held_out, basis, options.batch_size or BATCH, seed)
        state = fit_best(trainer, best, module, data, folder / LAST if options.resume else None)
    module.load_state_dict(state)
    return module.to_head(names, basis, rows)


def fit_network(task: FitTask) -> tuple[MLPHead, dict[str, bytes]]:
    """Fit the network; see `Fitter`."""
    head = fit_mlp(task.rows, task.held_out, task.names, task.seed, progress=task.progress, options=task.options)
    return head, {}
