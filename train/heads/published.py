"""The published heads of DynaSD and SpecDec++, fitted as their code does.

They read no more than the draft's row, and before drafting their output is a constant.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...policies.display import Progress
from ...policies.errors import TraceError
from ...policies.features import DRAFT_HIDDEN
from ...policies.heads.layers import HARD_FEATURES
from ..released import ANY_THRESHOLD, STOP_THRESHOLD, remove_weight_bias
from .linear import constant_logit
from .networks import NetworkEstimator, ResidualBlocks, block_tensors, layer_tensors, perceptron
from .rows import FitRows


@dataclass(eq=False, repr=False, kw_only=True)
class PublishedEstimator(NetworkEstimator):
    """A head on the draft's hidden state, on labels min(1, p/q) or, without p and q, on whether the token was accepted.

    Args:
        features, epochs, batch_size, learning_rate, weight_decay, trainer, random_state: see `NetworkEstimator`.
    """

    scalar_features: ClassVar[tuple[str, ...]] = ()
    hidden: ClassVar[tuple[str, ...]] = (DRAFT_HIDDEN,)
    soft = True

    weight_decay: float = 0.0

    @abstractmethod
    def _network(self, size: int) -> nn.Module:
        """Return a network from [R, size] to the logits [R, 1] of `accept`."""

    @abstractmethod
    def _tensors(self, weights: Mapping[str, Tensor], size: int) -> dict[str, Any]:
        """Return the tensors of the head except `first`, from the weights of a network."""

    def _examples(self, rows: FitRows, seed: int) -> tuple[Tensor, Tensor]:
        """Return the inputs [M, size] and labels [M, 1] of the rows with a drawn token."""
        if DRAFT_HIDDEN not in rows.hidden:
            raise TraceError(
                f"--head: it reads {DRAFT_HIDDEN}, which the trace does not hold; collect it with --hidden draft"
            )
        return rows.hidden[DRAFT_HIDDEN][rows.drawn], rows.labels[rows.drawn, :1]

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        parts = (rows, stop_rows)
        examples = [self._examples(part, 2 * self.seed + at) for at, part in enumerate(parts)]
        size = examples[0][0].shape[1]
        batches = [(x, labels, torch.ones_like(labels)) for x, labels in examples]
        weights = self._train(lambda: self._network(size), batches, progress)
        # Nothing is known before drafting: the log-odds that x_1 is accepted. Mixed rows have no row at depth 0.
        first = torch.cat([part.labels[~part.drawn & part.has_label[:, 1], 1] for part in parts])
        return {**self._tensors(weights, size), "first": torch.tensor([constant_logit(first.numpy())])}


@dataclass(eq=False, repr=False, kw_only=True)
class DynaSDSoftEstimator(PublishedEstimator):
    """DynaSD's soft model (arXiv 2409.10644): 512, 256, 1 on the draft's hidden state.

    `training_decision_models.py`: Adam at 1e-3 (AdamW without decay), batches of 50, 10 epochs, no schedule, the least
    held-out loss is kept. Its data are states at depth 1 below ten roots; here those of the visited rounds, at all depths at
    which every earlier token was accepted.

    Args:
        features, epochs, batch_size, learning_rate, weight_decay, trainer, random_state: see `NetworkEstimator`.
    """

    form = "dynasd-soft"
    calibrated = False
    rule = "any"
    thresholds = (ANY_THRESHOLD, 0.5)  # the second one is the default of DynaSD's class
    one_cycle = False

    epochs: int = 10
    batch_size: int = 50
    learning_rate: float = 1e-3

    def _network(self, size: int) -> nn.Module:
        # For llama-68m (H = 768), and for TinyLlama (H = 2048). The published module ends in a sigmoid, which is part of the
        # loss here.
        widths = (512, 256) if size < 2048 else (1024, 512)
        return perceptron((size, *widths, 1), nn.ReLU)

    def _tensors(self, weights: Mapping[str, Tensor], size: int) -> dict[str, Any]:
        return layer_tensors(weights)


class DynaSDHardEstimator(DynaSDSoftEstimator):
    """DynaSD's hard model: entropy and top-10 probabilities, 44, 1 on whether the token was accepted.

    As published (`BalancedDataset`), it is fitted on as many accepted as rejected rows: the more frequent ones are sampled.
    The outputs are therefore those of a world in which half of the tokens are accepted.
    """

    form = "dynasd-hard"
    scalar_features = HARD_FEATURES
    hidden = ()
    soft = False

    def _examples(self, rows: FitRows, seed: int) -> tuple[Tensor, Tensor]:
        rows = balance_classes(rows, seed)
        return rows.features, rows.labels[:, :1]

    def _network(self, size: int) -> nn.Module:
        return perceptron((size, 44, 1), nn.ReLU)


def balance_classes(rows: FitRows, seed: int) -> FitRows:
    """Return as many accepted as rejected rows with a drawn token, or all if there is one kind only.

    A label that is a chance is replaced by a draw with that probability.
    """
    accepted = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed)) < rows.labels[:, 0]
    rows = dataclasses.replace(rows, labels=torch.stack([accepted.float(), rows.labels[:, 1]], 1))
    generator = torch.Generator().manual_seed(seed)
    sides = [(rows.drawn & (accepted == label)).nonzero()[:, 0] for label in (True, False)]
    count = min(map(len, sides)) or max(map(len, sides))
    return rows.subset(torch.cat([side[torch.randperm(len(side), generator=generator)[:count]] for side in sides]))


class AcceptanceNetwork(nn.Module):
    """Blocks x + SiLU(W x + b) of the width of the hidden state, then the difference of two logits.

    Args:
        size: H.
        blocks: D.
        shared: use one block D times, as the published `[ResBlock(h)] * D` does.
    """

    def __init__(self, size: int, blocks: int = 3, shared: bool = False) -> None:
        super().__init__()
        self.blocks = ResidualBlocks(size, blocks, shared)
        self.leave = nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return [R, 1], the log-odds of acceptance of hidden states [R, H]."""
        logits = self.leave(self.blocks(x))
        # The softmax of two logits is the sigmoid of their difference.
        difference: Tensor = logits[:, 1:] - logits[:, :1]
        return difference


@dataclass(eq=False, repr=False, kw_only=True)
class SpecDecEstimator(PublishedEstimator):
    """SpecDec++'s acceptance head (arXiv 2405.19715), the bias of its rejection weight removed, with independent blocks.

    A label belongs to the token that the hidden state has just read (`lag` 1). The published run: AdamW of transformers at
    5e-5, cosine after 3% of warm-up, 3 epochs of 40,000 texts in bfloat16. Traces hold a hundredth of that, so steps are
    larger, and the held-out loss stops the fit.

    Args:
        blocks: number of blocks.
        features, epochs, batch_size, learning_rate, weight_decay, trainer, random_state: see `NetworkEstimator`.
    """

    form = "specdec"
    lag = 1
    rule = "survival"
    rejection_weight = 6.0
    shared_blocks = False
    keeps_bias = False

    blocks: int = 3
    batch_size: int = 256

    space: ClassVar[Mapping[str, Any]] = {"blocks": [1, 2, 3, 4], "learning_rate": (2e-4, 1e-2)}

    def _network(self, size: int) -> nn.Module:
        return AcceptanceNetwork(size, self.blocks, self.shared_blocks)

    def _tensors(self, weights: Mapping[str, Tensor], size: int) -> dict[str, Any]:
        # In log-odds the bias of the weight is a constant, ln w.
        bias = remove_weight_bias(weights["leave.bias"].numpy(), 1.0 if self.keeps_bias else self.rejection_weight)
        return {
            **block_tensors(weights, 1 if self.shared_blocks else self.blocks, size),
            "order": torch.tensor([0] * self.blocks if self.shared_blocks else range(self.blocks)),
            "leave.weight": weights["leave.weight"],
            "leave.bias": bias,
        }


class SpecDecPublishedEstimator(SpecDecEstimator):
    """SpecDec++'s head as its code fits it: its blocks share their weights, its outputs have the rejection weight's bias."""

    calibrated = False
    # The grid of h, the chance of a rejection above which SpecDec++ stops, that the paper searches, as least survivals; the
    # released example's first.
    thresholds = tuple(round(1.0 - h, 6) for h in (STOP_THRESHOLD, 0.1, 0.3, 0.5, 0.9))
    shared_blocks = True
    keeps_bias = True
