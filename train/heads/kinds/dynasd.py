"""DynaSD's two models, fitted on traces as published."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ....policies.errors import TraceError
from ....policies.features import DRAFT_HIDDEN
from ....policies.heads.layers import HardHead, SoftHead
from ..exported import exported
from ..fitting import FitTask
from ..networks import Perceptron, Recipe, layer_tensors, opening, seeded, states, train_network
from ..rows import FitRows

SOFT_LAYERS, SOFT_LAYERS_WIDE, HARD_LAYERS = (512, 256), (1024, 512), (44,)
"""Hidden widths: of the soft model for llama-68m (H = 768), for TinyLlama (H = 2048), and of the hard model."""

RECIPE = Recipe(epochs=10, batch=50, rate=1e-3, decay=0.0, constant=True)  # AdamW without decay is Adam
"""`training_decision_models.py`: Adam at 1e-3, batches of 50, 10 epochs, no schedule, the least held-out loss is kept."""

WIDE = 2048
"""H from which on the soft model has the hidden widths that the published code has for TinyLlama."""


def fit_soft(task: FitTask) -> tuple[SoftHead, dict[str, bytes]]:
    """Fit the soft model: hidden state, 512, 256, 1 on the labels min(1, p/q); see `Fitter`.

    DynaSD (arXiv 2409.10644). Its data are states at depth 1 below ten roots; here those of the rounds that are visited, at
    all depths, where every earlier token was accepted.
    """
    parts = [
        (states(rows, DRAFT_HIDDEN, "dynasd-soft")[rows.drawn], soft(rows)[rows.drawn, None])
        for rows in (task.rows, task.held_out)
    ]
    size = parts[0][0].shape[1]
    sizes = (size, *(SOFT_LAYERS if size < WIDE else SOFT_LAYERS_WIDE), 1)
    return SoftHead((), exported(_fit(sizes, parts, task, "dynasd-soft"))), {}


def fit_hard(task: FitTask) -> tuple[HardHead, dict[str, bytes]]:
    """Fit the hard model: entropy and top-10 probabilities, 44, 1 on whether the token was accepted; see `Fitter`.

    As published, accepted and rejected rows are balanced: of the more frequent ones as many as of the others are drawn
    (`BalancedDataset`). The outputs are therefore those of a world in which half the tokens are accepted.
    """
    parts = []
    for at, rows in enumerate((task.rows, task.held_out)):
        use = balanced(rows, 2 * task.seed + at)
        parts.append((rows.features[use], rows.accepted[use, None].float()))
    fitted = _fit((len(task.names), *HARD_LAYERS, 1), parts, task, "dynasd-hard")
    return HardHead(task.names, exported(fitted, task.names, task.rows)), {}


def soft(rows: FitRows) -> Tensor:
    """Return [M], min(1, p/q) of the drawn tokens; `TraceError` where the rows do not have it."""
    if rows.chances is not None:
        return rows.chances[:, 0]
    if rows.soft is None:
        raise TraceError("--head dynasd-soft: the rows have no chances p and q of the drawn tokens")
    return rows.soft


def balanced(rows: FitRows, seed: int) -> Tensor:
    """Return the places of as many accepted rows as rejected ones, of those with a drawn token; all where one is missing."""
    generator = torch.Generator().manual_seed(seed)
    sides = [(rows.drawn & (rows.accepted == label)).nonzero()[:, 0] for label in (True, False)]
    count = min(map(len, sides)) or max(map(len, sides))
    return torch.cat([side[torch.randperm(len(side), generator=generator)[:count]] for side in sides])


def _fit(sizes: Sequence[int], parts: Sequence[tuple[Tensor, Tensor]], task: FitTask, name: str) -> dict[str, Tensor]:
    """Train the layers and return the tensors of the head."""
    # The published module ends in a sigmoid, which the loss has in it here.
    network = seeded(Perceptron, task.seed, sizes, nn.functional.relu)
    data = [(x, labels, torch.ones_like(labels)) for x, labels in parts]
    weights = train_network(network, data[0], data[1], task, RECIPE, name)
    return {**layer_tensors(weights), "first": opening(task)}
