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

from torch import Tensor, nn

from ....policies.heads.base import Basis
from ....policies.heads.layers import MLPHead
from ..basis import fit_basis, flagged_columns
from ..exported import exported
from ..fitting import FitTask
from ..networks import LabelledModule, RowsDataModule, layer_tensors, seeded, train_module
from ..rows import FitRows

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
        fitted = {"mean": basis.mean, "scale": basis.scale, **layer_tensors(self.state_dict())}
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
    return flagged_columns(basis, rows.features, rows.depth), rows.labels, rows.known


def fit_network(task: FitTask) -> tuple[MLPHead, dict[str, bytes]]:
    """Train the network and keep the epoch with the least held-out loss; see `Fitter`.

    Options' `params`: `width`, `layers`, `weight_decay`, `learning_rate`.
    """
    options, params = task.options, task.options.params
    basis = fit_basis(task.rows, task.names)
    rate = float(options.learning_rate or params.get("learning_rate", RATE))
    hidden = (int(params.get("width", WIDTH)),) * int(params.get("layers", LAYERS))
    decay = float(params.get("weight_decay", DECAY))
    module = seeded(StopHeadModule, task.seed, basis.width + 1, hidden, rate, decay)
    data = TraceDataModule(task.rows, task.held_out, basis, options.batch_size or BATCH, task.seed)
    module.load_state_dict(train_module(module, data, task, options.epochs or EPOCHS, "mlp"))
    return module.to_head(task.names, basis, task.rows), {}
