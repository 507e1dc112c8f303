"""SpecDec++'s acceptance head, as published and with its bias taken out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....policies.features import DRAFT_HIDDEN
from ....policies.heads.residual import SpecDecHead
from ...released.convert import unbiased
from ..exported import exported
from ..fitting import FitTask
from ..networks import Recipe, opening, seeded, stacked_blocks, states, train_network

BLOCKS, REJECTION_WEIGHT = 3, 6.0  # D and w_rej of the published setting
RECIPE = Recipe(epochs=20, batch=256, rate=2e-3, decay=0.0, rejection_weight=REJECTION_WEIGHT)
"""The published run: AdamW of transformers at 5e-5 (no rate is given, so its default), cosine after 3% of warm-up, 3 epochs
of 40,000 texts in bfloat16. Traces hold a hundredth of that, so the steps are larger and the held-out loss ends it."""


class AcceptanceNetwork(nn.Module):
    """Blocks x + SiLU(W x + b) of the width of the hidden state, then the difference of two logits.

    Args:
        size: H.
        blocks: D.
        shared: one block D times, as the published `[ResBlock(h)] * D` makes it.
    """

    def __init__(self, size: int, blocks: int = BLOCKS, shared: bool = False) -> None:
        super().__init__()
        count = min(blocks, 1) if shared else blocks
        self.blocks = nn.ModuleList([nn.Linear(size, size) for _ in range(count)])
        self.order = [0] * blocks if shared else list(range(blocks))
        self.leave = nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return [R, 1], the log-odds of acceptance of hidden states [R, H]."""
        x = x.to(self.leave.weight.dtype)
        for at in self.order:
            x = x + nn.functional.silu(self.blocks[at](x))
        logits = self.leave(x)
        # The softmax of two logits is the sigmoid of their difference.
        difference: Tensor = logits[:, 1:] - logits[:, :1]
        return difference


def fit_specdec(task: FitTask) -> tuple[SpecDecHead, dict[str, bytes]]:
    """Fit independent blocks under the rejection weight 6, then take the weight's bias out of the logit; see `Fitter`.

    SpecDec++ (arXiv 2405.19715). Labels are min(1, p/q) of the token that the state has just read (`Head.lag` 1), and the
    bit where the rows do not know p and q. Options' `params`: `blocks`.
    """
    return _fit(task, shared=False, weight=REJECTION_WEIGHT)


def fit_published(task: FitTask) -> tuple[SpecDecHead, dict[str, bytes]]:
    """Fit as the published code does: blocks that share their weights, the weight's bias left in; see `fit_specdec`."""
    return _fit(task, shared=True, weight=1.0)


def _fit(task: FitTask, shared: bool, weight: float) -> tuple[SpecDecHead, dict[str, bytes]]:
    """Fit a head and take out the bias of a rejection weight `weight`."""
    parts = []
    for rows in (task.rows, task.held_out):
        labels = rows.label("accepted").float() if rows.soft is None or rows.chances is not None else rows.soft
        use = rows.drawn
        parts.append((states(rows, DRAFT_HIDDEN, "specdec")[use], labels[use, None], torch.ones(int(use.sum()), 1)))
    size, blocks = parts[0][0].shape[1], int(task.options.params.get("blocks", BLOCKS))
    network = seeded(AcceptanceNetwork, task.seed, size, blocks, shared)
    weights = train_network(network, parts[0], parts[1], task, RECIPE, "specdec")
    tensors: dict[str, Any] = {
        **stacked_blocks(weights, len(network.blocks), size),
        "order": torch.tensor(network.order, dtype=torch.int64),
        "leave.weight": weights["leave.weight"],
        # In log-odds the weight's bias is a constant, ln w: see `unbiased`.
        "leave.bias": unbiased(weights["leave.bias"].numpy(), weight),
        "first": opening(task),
    }
    return SpecDecHead((), exported(tensors)), {}
