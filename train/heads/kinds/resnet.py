"""The residual head on scalars, on hidden states of draft and target, or on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....policies.features import HIDDEN_STATES, Kind
from ....policies.heads.base import Basis
from ....policies.heads.residual import ResNetHead
from ..basis import fit_basis, flagged_columns
from ..exported import exported
from ..fitting import FitTask
from ..networks import Recipe, seeded, stacked_blocks, train_network
from ..rows import FitRows

WIDTH, BLOCKS, DROPOUT = 64, 3, 0.1


class ResNet(nn.Module):
    """A linear layer to one width, blocks x + SiLU(W x + b), two logits.

    Args:
        inputs: columns of the scalars with the flag of depth 0, then H of each hidden state.
        width: of the blocks.
        blocks: how many.
        dropout: share of the hidden states' numbers that training leaves out.
    """

    def __init__(
        self, inputs: Sequence[int], width: int = WIDTH, blocks: int = BLOCKS, dropout: float = DROPOUT
    ) -> None:
        super().__init__()
        # Their outputs are added up, so that one bias does for all.
        self.enter = nn.ModuleList([nn.Linear(size, width, bias=at == 0) for at, size in enumerate(inputs)])
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        self.leave = nn.Linear(width, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, columns: Tensor, *states: Tensor) -> Tensor:
        """Return logits [R, 2] of standardised columns [R, F' + 1] and hidden states [R, H]."""
        scalars, *others = self.enter
        x: Tensor = scalars(columns)
        for layer, state in zip(others, states, strict=True):
            x = x + layer(self.dropout(state.to(x.dtype)))
        for block in self.blocks:
            x = x + nn.functional.silu(block(x))
        logits: Tensor = self.leave(x)
        return logits


def fit_resnet(task: FitTask) -> tuple[ResNetHead, dict[str, bytes]]:
    """Fit a residual head on the scalars and the hidden states of the rows; see `Fitter`.

    Options' `params`: `width`, `blocks`, `dropout`.
    """
    params = task.options.params
    basis = fit_basis(task.rows, task.names)
    names = [name for name in HIDDEN_STATES if name in task.rows.hidden]
    moments = {name: state_moments(task.rows, name) for name in names}
    inputs = [basis.width + 1, *(len(moments[name][0]) for name in names)]
    width, blocks = int(params.get("width", WIDTH)), int(params.get("blocks", BLOCKS))
    network = seeded(ResNet, task.seed, inputs, width, blocks, float(params.get("dropout", DROPOUT)))
    parts = [_inputs(rows, basis, moments) for rows in (task.rows, task.held_out)]
    weights = train_network(network, parts[0], parts[1], task, Recipe(), "resnet")
    tensors: dict[str, Any] = {
        "mean": basis.mean,
        "scale": basis.scale,
        "enter.weight": weights["enter.0.weight"],
        "enter.bias": weights["enter.0.bias"],
        **stacked_blocks(weights, blocks, width),
        "leave.weight": weights["leave.weight"],
        "leave.bias": weights["leave.bias"],
    }
    for at, name in enumerate(names, 1):
        middle, spread = moments[name]
        tensors |= {f"enter.{name}": weights[f"enter.{at}.weight"], f"mean.{name}": middle, f"scale.{name}": spread}
    return ResNetHead(task.names, exported(tensors, task.names, task.rows)), {}


def state_moments(rows: FitRows, name: str) -> tuple[Tensor, Tensor]:
    """Return (mean, scale) [H] of a hidden state over rows with a drawn token; constant numbers get scale 1."""
    known = rows.hidden[name][rows.drawn].float()
    scale = known.std(0, correction=0)
    return known.mean(0), torch.where(scale > 1e-6, scale, 1.0)


def _inputs(rows: FitRows, basis: Basis, moments: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Return the columns and hidden states, standardised, what is not known yet 0; labels and which are known."""
    first = (rows.depth == 0)[:, None]
    states = []
    for name, (mean, scale) in moments.items():
        state = (rows.hidden[name].float() - mean) / scale
        states.append(state if HIDDEN_STATES[name] is Kind.ANCHOR else torch.where(first, 0.0, state))
    return flagged_columns(basis, rows.features, rows.depth), *states, rows.labels, rows.known
