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

import torch
from torch import Tensor, nn

from ....policies.heads.build import Basis, MLPHead
from ....policies.progress import Progress, silent
from ..basis import basis_columns, fit_basis
from ..exported import exported
from ..fitting import FitOptions, FitTask
from ..networks import LabelledModule, RowsDataModule
from ..rows import FitRows
from ..trainer import Report, best_epoch, work_folder

EPOCHS, BATCH, RATE, DECAY = 20, 1024, 2e-3, 1e-3
WIDTH, LAYERS = 64, 2


class StopHeadModule(LabelledModule):
    """Two logits, `accept` and `next`, from standardised columns.

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


class TraceDataModule(RowsDataModule):
    """Batches of training and held-out rows, put through a basis.

    Args:
        rows, held_out: from `fit_rows`.
        basis: standardises them.
        batch: rows a step.
        seed: of the shuffling.
    """

    def __init__(self, rows: FitRows, held_out: FitRows, basis: Basis, batch: int = BATCH, seed: int = 0) -> None:
        super().__init__(_tensors(rows, basis), _tensors(held_out, basis), batch, seed)


def _tensors(rows: FitRows, basis: Basis) -> tuple[Tensor, Tensor, Tensor]:
    """Return the columns with the flag for depth 0, labels and which of them are known."""
    columns = torch.from_numpy(basis_columns(basis, rows.features, rows.depth))
    # Columns that are not known at depth 0 are 0 there, which elsewhere is their mean: the flag tells the two apart.
    columns = torch.cat([columns, (rows.depth == 0)[:, None].float()], 1)
    return columns, rows.labels, torch.stack([rows.drawn, rows.followed_known], 1).float()


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
    with torch.random.fork_rng(), work_folder(options) as folder:
        torch.manual_seed(seed)
        module = StopHeadModule(basis.width + 1, hidden, rate, float(params.get("weight_decay", DECAY)))
        data = TraceDataModule(rows, held_out, basis, options.batch_size or BATCH, seed)
        state = best_epoch(module, data, options, folder, most, Report("train mlp", progress, most))
    module.load_state_dict(state)
    return module.to_head(names, basis, rows)


def fit_network(task: FitTask) -> tuple[MLPHead, dict[str, bytes]]:
    """Fit the network; see `Fitter`."""
    head = fit_mlp(task.rows, task.held_out, task.names, task.seed, progress=task.progress, options=task.options)
    return head, {}
