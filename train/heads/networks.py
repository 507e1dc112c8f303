"""Heads that are networks: their loss and loaders, and the heads mlp and resnet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from ...policies.display import Progress
from ...policies.features import HIDDEN_STATES, Kind
from ...policies.heads.base import Basis
from .base import HeadEstimator, basis_columns, fit_basis
from .rows import FitRows
from .trainer import FitModule, fit_module

Batch = tuple[Tensor, ...]
"""(inputs..., labels [R, O] in [0, 1], has_label [R, O] bool), rows first."""

STOP_BATCH = 1 << 14
RATES = {"learning_rate": (5e-4, 1e-2), "weight_decay": (1e-5, 1e-1)}


def acceptance_loss(
    network: nn.Module, batch: Sequence[Tensor], rejection_weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy against labels in [0, 1], rejections with weight w, and the number of labels.

    The loss is [w (1 - P)(-ln(1 - p)) + P (-ln p)], summed over the labels, over the sum of the weights
    [w (1 - P) + P] (SpecDec++, arXiv 2405.19715, `train.py`); with w = 1 the mean.

    Args:
        network: from the inputs of a batch to logits [R, O].
        batch: see `Batch`; hidden states are float16, as they are recorded.
        rejection_weight: w.
    """
    *inputs, labels, has_label = batch
    logits = network(*(x.float() for x in inputs))
    # Both weights are 0 where there is no label. Log-sigmoids stay finite where a network is certain.
    accepted = labels * has_label
    rejected = rejection_weight * (1.0 - labels) * has_label
    losses = -accepted * nn.functional.logsigmoid(logits) - rejected * nn.functional.logsigmoid(-logits)
    return losses.sum() / (accepted + rejected).sum().clamp_min(1e-6), has_label.sum()


def batch_loader(tensors: Batch, batch_size: int, seed: int | None = None) -> DataLoader[Batch]:
    """Return a loader of whole batches, shuffled by a seed or in order.

    The sampler yields lists of indices: a loader that collates single rows would spend the epoch in Python.
    """
    data = TensorDataset(*tensors)
    order: Any = SequentialSampler(data)
    if seed is not None:
        order = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    return DataLoader(data, sampler=BatchSampler(order, batch_size, drop_last=False), batch_size=None)


@dataclass(eq=False, repr=False, kw_only=True)
class NetworkEstimator(HeadEstimator):
    """A head that is a network.

    Args:
        features, random_state: see `HeadEstimator`.
        epochs: maximum; the epoch with the least held-out loss is kept.
        batch_size: rows in a step.
        learning_rate, weight_decay: of AdamW.
        trainer: arguments of `lightning.Trainer`, such as `accelerator` or `precision`.

    Attributes:
        rejection_weight: see `acceptance_loss`.
        one_cycle: whether the learning rate follows one cycle; else it is constant.
    """

    epochs: int = 20
    batch_size: int = 1024
    learning_rate: float = 2e-3
    weight_decay: float = 1e-3
    trainer: Mapping[str, Any] | None = None

    rejection_weight: ClassVar[float] = 1.0
    one_cycle: ClassVar[bool] = True

    def _train(self, build: Callable[[], nn.Module], batches: Sequence[Batch], progress: Progress) -> dict[str, Tensor]:
        """Return the weights of a network, trained on one batch of rows and stopped early by another.

        Args:
            build: returns the network with fresh weights.
            batches: all rows to fit on, and all rows for early stopping.
            progress: see `Progress`.
        """
        with torch.random.fork_rng():  # the caller's random state does not change
            torch.manual_seed(self.seed)
            module = FitModule(
                build(),
                partial(acceptance_loss, rejection_weight=self.rejection_weight),
                (lambda optimizer, steps: OneCycleLR(optimizer, self.learning_rate, steps)) if self.one_cycle else None,
                lr=self.learning_rate,
                weight_decay=self.weight_decay,
            )
            fit_module(
                module,
                batch_loader(batches[0], self.batch_size, self.seed),
                batch_loader(batches[1], STOP_BATCH),
                task=f"train {self.form}",
                epochs=self.epochs,
                trainer=self.trainer,
                progress=progress,
            )
        return {name: values.detach().float().cpu() for name, values in module.network.state_dict().items()}


def perceptron(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Return linear layers from the first to the last size, with an activation between them."""
    layers = [module for pair in itertools.pairwise(sizes) for module in (nn.Linear(*pair), activation())]
    return nn.Sequential(*layers[:-1])


def layer_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights `0.weight`, `0.bias`, `2.weight`, ... of a `perceptron` as in heads: `weight.0`, `bias.0`, ..."""
    keys = [(key, *key.split(".")) for key in weights]
    return {f"{part}.{int(module) // 2}": weights[key] for key, module, part in keys}


class ResidualBlocks(nn.Module):
    """Blocks x + SiLU(W x + b).

    Args:
        width: W.
        count: number of blocks.
        shared: use one block `count` times.
    """

    def __init__(self, width: int, count: int, shared: bool = False) -> None:
        super().__init__()
        self.width, self.order = width, [0] * count if shared else list(range(count))
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in set(self.order)])

    def forward(self, x: Tensor) -> Tensor:
        """Return rows [R, W] after all blocks."""
        for at in self.order:
            x = x + nn.functional.silu(self.layers[at](x))
        return x


def block_tensors(weights: Mapping[str, Tensor], blocks: int, width: int) -> dict[str, Tensor]:
    """Return the weights of `ResidualBlocks` called `blocks` as in heads: `block.weight` [B, W, W], `block.bias` [B, W]."""
    stacked = {}
    for part, shape in (("weight", (width, width)), ("bias", (width,))):
        parts = [weights[f"blocks.layers.{at}.{part}"] for at in range(blocks)]
        stacked[f"block.{part}"] = torch.stack(parts) if parts else torch.zeros(0, *shape)
    return stacked


def flagged_columns(basis: Basis, rows: FitRows) -> Tensor:
    """Return [M, F' + 1] float32, the columns of `basis_columns`, then whether the depth is 0.

    Columns that are unknown at depth 0 are 0 there, which elsewhere is their mean. The flag distinguishes the two.
    """
    columns = torch.from_numpy(basis_columns(basis, rows.features, rows.depth))
    return torch.cat([columns, (~rows.drawn)[:, None].float()], 1)


@dataclass(eq=False, repr=False, kw_only=True)
class MLPEstimator(NetworkEstimator):
    """A small network on scalar features, with both outputs.

    Args:
        width: of the hidden layers.
        layers: number of hidden layers.
        features, epochs, batch_size, learning_rate, weight_decay, trainer, random_state: see `NetworkEstimator`.
    """

    form = "mlp"

    width: int = 64
    layers: int = 2

    space: ClassVar[Mapping[str, Any]] = {"width": [16, 32, 64, 128], "layers": [1, 2, 3], **RATES}

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        basis = fit_basis(rows, self.feature_names_)
        sizes = [basis.width + 1, *(self.width,) * self.layers, 2]
        batches = [(flagged_columns(basis, part), part.labels, part.has_label) for part in (rows, stop_rows)]
        weights = self._train(lambda: perceptron(sizes, nn.SiLU), batches, progress)
        return {"mean": basis.mean, "scale": basis.scale, **layer_tensors(weights)}


class ResNet(nn.Module):
    """A linear layer to one width, blocks x + SiLU(W x + b), two logits.

    Args:
        inputs: number of columns of the scalars with the flag of depth 0, then H of each hidden state.
        width: of the blocks.
        blocks: number of blocks.
        dropout: share of the hidden states' numbers that are dropped in training.
    """

    def __init__(self, inputs: Sequence[int], width: int, blocks: int, dropout: float = 0.0) -> None:
        super().__init__()
        # The outputs are summed, so only the first layer has a bias.
        self.enter = nn.ModuleList([nn.Linear(size, width, bias=at == 0) for at, size in enumerate(inputs)])
        self.blocks = ResidualBlocks(width, blocks)
        self.leave = nn.Linear(width, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, columns: Tensor, *states: Tensor) -> Tensor:
        """Return logits [R, 2] of standardised columns [R, F' + 1] and hidden states [R, H]."""
        scalars, *others = self.enter
        x: Tensor = scalars(columns)
        for layer, state in zip(others, states, strict=True):
            x = x + layer(self.dropout(state))
        logits: Tensor = self.leave(self.blocks(x))
        return logits


@dataclass(eq=False, repr=False, kw_only=True)
class ResNetEstimator(NetworkEstimator):
    """A residual network on scalar features, on hidden states of draft and target, or on both.

    Args:
        width: of the blocks.
        blocks: number of blocks.
        dropout: see `ResNet`.
        features, epochs, batch_size, learning_rate, weight_decay, trainer, random_state: see `NetworkEstimator`.
    """

    form = "resnet"
    any_hidden = True

    width: int = 64
    blocks: int = 3
    dropout: float = 0.1

    space: ClassVar[Mapping[str, Any]] = {
        "width": [32, 64, 128],
        "blocks": [1, 2, 3],
        "dropout": [0.0, 0.1, 0.3],
        **RATES,
    }

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        basis = fit_basis(rows, self.feature_names_)
        moments = {name: state_moments(rows, name) for name in HIDDEN_STATES if name in rows.hidden}

        def batch(part: FitRows) -> Batch:
            states = []
            for name, (mean, scale) in moments.items():
                state = (part.hidden[name].float() - mean) / scale
                is_known = HIDDEN_STATES[name] is Kind.ANCHOR or part.drawn[:, None]
                states.append(state * is_known)  # an unknown state counts as its mean
            return flagged_columns(basis, part), *states, part.labels, part.has_label

        inputs = [basis.width + 1, *(len(mean) for mean, _ in moments.values())]
        weights = self._train(
            lambda: ResNet(inputs, self.width, self.blocks, self.dropout), [batch(rows), batch(stop_rows)], progress
        )
        tensors: dict[str, Any] = {"mean": basis.mean, "scale": basis.scale}
        tensors |= {"enter.weight": weights["enter.0.weight"], "enter.bias": weights["enter.0.bias"]}
        tensors |= block_tensors(weights, self.blocks, self.width)
        tensors |= {name: weights[name] for name in ("leave.weight", "leave.bias")}
        for at, (name, (mean, scale)) in enumerate(moments.items(), 1):
            tensors |= {f"enter.{name}": weights[f"enter.{at}.weight"], f"mean.{name}": mean, f"scale.{name}": scale}
        return tensors


def state_moments(rows: FitRows, name: str) -> tuple[Tensor, Tensor]:
    """Return (mean, scale) [H] of a hidden state over rows with a drawn token; constant numbers have scale 1."""
    states = rows.hidden[name][rows.drawn].float()
    scale = states.std(0, correction=0)
    return states.mean(0), torch.where(scale > 1e-6, scale, 1.0)
