"""Networks on rows that are more than scalars, through Lightning: one module and one data module for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ...policies.errors import TraceError
from .batches import Batches
from .fitting import FitTask
from .rows import FitRows
from .trainer import MONITOR, Report, best_epoch, claim_fit, work_folder

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, where `FitOptions` does not say otherwise.

    Attributes:
        epochs: at most; the epoch with the least held-out loss is kept.
        batch: rows a step.
        rate: learning rate.
        decay: weight decay.
        rejection_weight: w of the loss, see `RowsModule`.
        constant: keep the learning rate as it is; else one cycle.
    """

    epochs: int = 20
    batch: int = 1024
    rate: float = 2e-3
    decay: float = 1e-3
    rejection_weight: float = 1.0
    constant: bool = False


class LabelledModule(lightning.LightningModule):
    """What is trained on rows; cross-entropy against labels in [0, 1], rejections with weight w.

    The loss is [w (1 - P)(-ln(1 - p)) + P (-ln p)], summed over the labels that are known, over the sum of the weights
    [w (1 - P) + P] (SpecDec++, arXiv 2405.19715, `train.py`); with w = 1 the ordinary mean.

    Attributes:
        rate, decay: of AdamW.
        weight: w.
        constant: keep the rate; else one cycle.
    """

    rate, decay, weight, constant = 2e-3, 1e-3, 1.0, False

    def _loss(self, batch: Sequence[Tensor]) -> Tensor:
        *inputs, labels, known = batch
        logits = self(*inputs)
        # Both weights are 0 where a label is not known; log-sigmoids stay finite where a network is sure.
        accepted = labels * known
        rejected = self.weight * (1.0 - labels) * known
        losses = -accepted * nn.functional.logsigmoid(logits) - rejected * nn.functional.logsigmoid(-logits)
        return losses.sum() / (accepted + rejected).sum().clamp_min(1e-6)

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        """Return the loss of a batch (inputs..., labels [R, O], known [R, O])."""
        return self._loss(batch)

    def validation_step(self, batch: Sequence[Tensor], index: int) -> None:
        """Log the held-out loss."""
        # Lightning averages over batches by `batch_size`: weighed by labels, not by rows, of which some have none.
        self.log(MONITOR, self._loss(batch), batch_size=max(1, int(batch[-1].sum())))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig | torch.optim.Optimizer:
        """Return AdamW, under a one-cycle schedule unless the rate is constant."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=self.decay)
        if self.constant:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.rate, max(steps, 2))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class RowsModule(LabelledModule):
    """Any network on rows.

    Args:
        network: from the inputs of a batch to logits [R, O].
        rate, decay, rejection_weight, constant: see `LabelledModule`.
    """

    def __init__(
        self,
        network: nn.Module,
        rate: float = 2e-3,
        decay: float = 1e-3,
        rejection_weight: float = 1.0,
        constant: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["network"])
        self.network = network
        self.rate, self.decay, self.weight, self.constant = rate, decay, rejection_weight, constant

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return logits [R, O]."""
        logits: Tensor = self.network(*inputs)
        return logits


class RowsDataModule(lightning.LightningDataModule):
    """Batches of training and held-out rows.

    Args:
        rows, held_out: (inputs..., labels, known), rows first.
        batch: rows a step.
        seed: of the shuffling.
    """

    def __init__(self, rows: Sequence[Tensor], held_out: Sequence[Tensor], batch: int = 1024, seed: int = 0) -> None:
        super().__init__()
        self.parts, self.batch, self.seed = (rows, held_out), batch, seed

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches of the training rows."""
        # `Batches` yields whole batches: the loader's own batching is off.
        return DataLoader(Batches(TensorDataset(*self.parts[0]), self.batch, self), batch_size=None)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the held-out rows in order."""
        return DataLoader(Batches(TensorDataset(*self.parts[1]), 1 << 14, None), batch_size=None)


def train_network(
    network: nn.Module, rows: Sequence[Tensor], held_out: Sequence[Tensor], task: FitTask, recipe: Recipe, name: str
) -> Mapping[str, Tensor]:
    """Train a network and return its weights at the epoch with the least held-out loss.

    The caller's torch random state is left as it was.

    Args:
        network: freshly made.
        rows, held_out: see `RowsDataModule`.
        task: seed, progress and options.
        recipe: where the options do not say otherwise.
        name: of the head, for the progress.
    """
    options = task.options
    epochs = options.epochs or recipe.epochs
    rate = float(options.learning_rate or options.params.get("learning_rate", recipe.rate))
    decay = float(options.params.get("weight_decay", recipe.decay))
    module = RowsModule(network, rate, decay, recipe.rejection_weight, recipe.constant)
    data = RowsDataModule(rows, held_out, options.batch_size or recipe.batch, task.seed)
    state = train_module(module, data, task, epochs, name)
    return {key.removeprefix("network."): value.detach().float().cpu() for key, value in state.items()}


def train_module(
    module: lightning.LightningModule, data: lightning.LightningDataModule, task: FitTask, epochs: int, name: str
) -> dict[str, Tensor]:
    """Train a module and return its weights at the epoch with the least held-out loss; see `train_network`."""
    report = Report(f"train {name}", task.progress, epochs)
    told = task.options
    # The optimizer and its schedule go on as they were saved, whatever is asked for now.
    asked = {
        "learning rate": told.learning_rate, "batch size": told.batch_size, "epochs": epochs,
        "hyper-parameters": dict(sorted(told.params.items())),
    }  # fmt: skip
    with torch.random.fork_rng(), work_folder(task.options) as folder:
        claim_fit(folder, {"head": name, "seed": task.seed, "features": list(task.names), **asked, **task.of})
        return best_epoch(module, data, task.options, folder, epochs, report, task.seed)


class Perceptron(nn.Module):
    """Linear layers with an activation between them.

    Args:
        sizes: of the input, the hidden layers and the output.
        between: the activation.
    """

    def __init__(self, sizes: Sequence[int], between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(i, o) for i, o in itertools.pairwise(sizes)])
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [R, out] of inputs [R, in]."""
        x = x.to(self.layers[0].weight.dtype)  # type: ignore[arg-type]  # hidden states come as recorded, in float16
        for at, layer in enumerate(self.layers):
            x = layer(self._between(x) if at else x)
        return x


def layer_tensors(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the weights `layers.0.weight` and on under the names that heads have: `weight.0`, `bias.0`, ..."""
    layers = (key.split(".") for key in weights if key.startswith("layers."))
    return {f"{part}.{at}": weights[f"layers.{at}.{part}"].detach().float().cpu() for _, at, part in layers}


def seeded(make: type[Network], seed: int, *arguments: object) -> Network:
    """Return a network with fresh weights of this seed, the caller's random state left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(*arguments)


def stacked_blocks(weights: Mapping[str, Tensor], count: int, width: int) -> dict[str, Tensor]:
    """Return the layers `blocks.0`, `blocks.1`, ... as one `block.weight` [B, W, W] and one `block.bias` [B, W]."""
    found = {}
    for part, shape in (("weight", (width, width)), ("bias", (width,))):
        parts = [weights[f"blocks.{at}.{part}"] for at in range(count)]
        found[f"block.{part}"] = torch.stack(parts) if parts else torch.zeros(0, *shape)
    return found


def states(rows: FitRows, name: str, who: str) -> Tensor:
    """Return the hidden states [M, H] of the rows; `TraceError` where there are none."""
    if name not in rows.hidden:
        model = name.removesuffix("_hidden")
        raise TraceError(
            f"--head {who}: it reads {name}, which the trace does not hold; collect it with --hidden {model}"
        )
    return rows.hidden[name]


def opening(task: FitTask) -> Tensor:
    """Return [1], the log-odds of x_1 accepted: what a head that knows nothing before drafting says there."""
    parts = (task.rows, task.held_out)  # mixed rows know nothing of it
    first = torch.cat([rows.label("followed")[(rows.depth == 0) & rows.followed_known] for rows in parts])
    # One more of each kind (Laplace), so that the log-odds are finite where all are alike.
    return torch.logit((first.float().sum(0, keepdim=True) + 1.0) / (len(first) + 2.0))
