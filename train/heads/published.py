"""The published heads of DynaSD and SpecDec++, fitted as their code does.

They read no more than the draft's row, and before drafting their output is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...policies.display import Progress
from ...policies.errors import TraceError
from ...policies.features import DRAFT_HIDDEN
from ...policies.heads.layers import HARD_FEATURES
from ..released import ANY_THRESHOLD, STOP_THRESHOLD, unbiased
from .linear import constant_logit
from .networks import NetworkEstimator, layer_tensors, perceptron, stacked_blocks
from .rows import FitRows


def draft_states(rows: FitRows) -> Tensor:
    """Return the draft's hidden states [M, H]; raise `TraceError` if the rows have none."""
    if DRAFT_HIDDEN not in rows.hidden:
        raise TraceError(
            f"--head: it reads {DRAFT_HIDDEN}, which the trace does not hold; collect it with --hidden draft"
        )
    return rows.hidden[DRAFT_HIDDEN]


def first_logit(rows: FitRows, stop_rows: FitRows) -> Tensor:
    """Return [1], the log-odds that x_1 is accepted, for heads that know nothing before drafting."""
    parts = (rows, stop_rows)  # mixed rows have no row at depth 0
    first = torch.cat([part.label("followed")[(part.depth == 0) & part.followed_known] for part in parts])
    return torch.tensor([constant_logit(first.float().numpy())])


@dataclass(eq=False, repr=False, kw_only=True)
class DynaSDEstimator(NetworkEstimator):
    """DynaSD's two models (arXiv 2409.10644), which differ in input, label and width.

    `training_decision_models.py`: Adam at 1e-3 (AdamW without decay), batches of 50, 10 epochs, no schedule, the least
    held-out loss is kept.

    Args:
        features, epochs, batch_size, learning_rate, weight_decay, trainer, random_state: see `NetworkEstimator`.
    """

    calibrated = False
    rule = "any"
    thresholds = (ANY_THRESHOLD, 0.5)  # the second one is the default of DynaSD's class
    one_cycle = False

    epochs: int = 10
    batch_size: int = 50
    learning_rate: float = 1e-3
    weight_decay: float = 0.0

    def _layers(
        self, hidden: Sequence[int], rows: FitRows, stop_rows: FitRows, inputs: Sequence[tuple[Tensor, Tensor]],
        progress: Progress,
    ) -> Mapping[str, Any]:  # fmt: skip
        """Return the tensors of a head of linear layers, fitted on (x [M, in], labels [M])."""
        sizes = [inputs[0][0].shape[1], *hidden, 1]
        batches = [(x, labels[:, None].float(), torch.ones(len(x), 1)) for x, labels in inputs]
        # The published module ends in a sigmoid, which is part of the loss here.
        weights = self._train(lambda: perceptron(sizes, nn.ReLU), batches, progress)
        return {**layer_tensors(weights), "first": first_logit(rows, stop_rows)}


class DynaSDSoftEstimator(DynaSDEstimator):
    """DynaSD's soft model: the draft's hidden state, 512, 256, 1 on the labels min(1, p/q).

    Its data are states at depth 1 below ten roots; here those of the visited rounds, at all depths at which every earlier
    token was accepted.
    """

    form = "dynasd-soft"
    scalar_features = ()
    hidden = (DRAFT_HIDDEN,)
    soft = True
    widths = (512, 256)  # for llama-68m, H = 768
    widths_large = (1024, 512)  # for TinyLlama, H = 2048
    large = 2048

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        if rows.chances is None:
            raise TraceError("--head: its labels are min(1, p/q), and the rows have no p and q of the drawn tokens")
        inputs = [(draft_states(part)[part.drawn], part.label("accepted")[part.drawn]) for part in (rows, stop_rows)]
        widths = self.widths if inputs[0][0].shape[1] < self.large else self.widths_large
        return self._layers(widths, rows, stop_rows, inputs, progress)


class DynaSDHardEstimator(DynaSDEstimator):
    """DynaSD's hard model: entropy and top-10 probabilities, 44, 1 on whether the token was accepted.

    As published (`BalancedDataset`), it is fitted on as many accepted as rejected rows: the more frequent ones are sampled.
    The outputs are therefore those of a world in which half of the tokens are accepted.
    """

    form = "dynasd-hard"
    scalar_features = HARD_FEATURES
    widths = (44,)

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        used = [part.subset(balanced(part, 2 * self.seed + at)) for at, part in enumerate((rows, stop_rows))]
        inputs = [(part.features, part.accepted) for part in used]
        return self._layers(self.widths, rows, stop_rows, inputs, progress)


def balanced(rows: FitRows, seed: int) -> Tensor:
    """Return the indices of as many accepted as rejected rows with a drawn token; of all if there is one kind only."""
    generator = torch.Generator().manual_seed(seed)
    sides = [(rows.drawn & (rows.accepted == label)).nonzero()[:, 0] for label in (True, False)]
    count = min(map(len, sides)) or max(map(len, sides))
    return torch.cat([side[torch.randperm(len(side), generator=generator)[:count]] for side in sides])


class AcceptanceNetwork(nn.Module):
    """Blocks x + SiLU(W x + b) of the width of the hidden state, then the difference of two logits.

    Args:
        size: H.
        blocks: D.
        shared: use one block D times, as the published `[ResBlock(h)] * D` does.
    """

    def __init__(self, size: int, blocks: int = 3, shared: bool = False) -> None:
        super().__init__()
        self.order = [0] * blocks if shared else list(range(blocks))
        self.blocks = nn.ModuleList([nn.Linear(size, size) for _ in sorted(set(self.order))])
        self.leave = nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return [R, 1], the log-odds of acceptance of hidden states [R, H]."""
        for at in self.order:
            x = x + nn.functional.silu(self.blocks[at](x))
        logits = self.leave(x)
        # The softmax of two logits is the sigmoid of their difference.
        difference: Tensor = logits[:, 1:] - logits[:, :1]
        return difference


@dataclass(eq=False, repr=False, kw_only=True)
class SpecDecEstimator(NetworkEstimator):
    """SpecDec++'s acceptance head (arXiv 2405.19715), the bias of its rejection weight removed, with independent blocks.

    Labels are min(1, p/q) of the token that the hidden state has just read (`lag` 1), or whether it was accepted if the rows
    lack p and q. The published run: AdamW of transformers at 5e-5, cosine after 3% of warm-up, 3 epochs of 40,000 texts in
    bfloat16. Traces hold a hundredth of that, so steps are larger, and the held-out loss stops the fit.

    Args:
        blocks: number of blocks.
        features, epochs, batch_size, learning_rate, weight_decay, trainer, random_state: see `NetworkEstimator`.
    """

    form = "specdec"
    scalar_features = ()
    hidden = (DRAFT_HIDDEN,)
    soft = True
    lag = 1
    rule = "survival"
    rejection_weight = 6.0
    shared_blocks = False
    keeps_bias = False

    blocks: int = 3
    batch_size: int = 256
    weight_decay: float = 0.0

    space: ClassVar[Mapping[str, Any]] = {"blocks": [1, 2, 3, 4], "learning_rate": (2e-4, 1e-2)}

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        batches = []
        for part in (rows, stop_rows):
            labels = part.label("accepted").float()[part.drawn, None]
            batches.append((draft_states(part)[part.drawn], labels, torch.ones_like(labels)))
        size = batches[0][0].shape[1]
        weights = self._train(lambda: AcceptanceNetwork(size, self.blocks, self.shared_blocks), batches, progress)
        # In log-odds the bias of the weight is a constant, ln w.
        bias = unbiased(weights["leave.bias"].numpy(), 1.0 if self.keeps_bias else self.rejection_weight)
        return {
            **stacked_blocks(weights, 1 if self.shared_blocks else self.blocks, size),
            "order": torch.tensor([0] * self.blocks if self.shared_blocks else range(self.blocks)),
            "leave.weight": weights["leave.weight"],
            "leave.bias": bias,
            "first": first_logit(rows, stop_rows),
        }


def _survivals(stops: Sequence[float]) -> tuple[float, ...]:
    """Return the least survival of each h, the chance of a rejection above which SpecDec++ stops; `STOP_THRESHOLD` first."""
    return tuple(round(1.0 - h, 6) for h in sorted(stops, key=lambda h: (h != STOP_THRESHOLD, h)))


class SpecDecPublishedEstimator(SpecDecEstimator):
    """SpecDec++'s head as its code fits it: its blocks share their weights, its outputs have the rejection weight's bias."""

    calibrated = False
    thresholds = _survivals((0.1, 0.3, 0.5, 0.7, 0.9))  # the grid of h that the paper searches
    shared_blocks = True
    keeps_bias = True
