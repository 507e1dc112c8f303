"""The logistic head: three regressions by scikit-learn on standardised scalars and log-odds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from ...policies.features import feature
from ...policies.heads import Basis, LinearHead
from .fitting import FitTask
from .rows import FitRows


def fit_basis(rows: FitRows, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return (mean, scale) [F'] of the expanded columns over rows with a drawn token; constant columns get scale 1."""
    width = len(names) + sum(feature(name).is_probability for name in names)
    columns = Basis(names, torch.zeros(width), torch.ones(width)).expand(rows.features[rows.drawn]).double()
    mean, scale = columns.mean(0), columns.std(0)
    return mean.float(), torch.where(scale > 1e-6, scale, 1.0).float()


def fit_linear(rows: FitRows, names: Sequence[str], seed: int = 0, strength: float = 1.0) -> LinearHead:
    """Fit `accept` on drawn tokens, `next` behind accepted ones, and `next` at depth 0 on what is known there.

    Args:
        rows: to fit on.
        names: scalar features.
        seed: of the solver.
        strength: C of scikit-learn's regression, the inverse of the penalty.
    """
    mean, scale = fit_basis(rows, names)
    basis = Basis(names, mean, scale)
    drawn, known = rows.drawn, rows.followed_known
    parts = (
        (basis(rows.features[drawn], 1), rows.accepted[drawn]),
        (basis(rows.features[drawn & known], 1), rows.followed[drawn & known]),
        (basis(rows.features[~drawn & known], 0), rows.followed[~drawn & known]),
    )
    weights, biases = zip(*(_regress(x, y, seed, strength) for x, y in parts), strict=True)
    return LinearHead(
        names, {"mean": mean, "scale": scale, "weight": torch.stack(weights), "bias": torch.stack(biases)}
    )


def fit_logistic(task: FitTask) -> tuple[LinearHead, dict[str, bytes]]:
    """Fit the logistic head, `params`: `C`; see `Fitter`."""
    return fit_linear(task.rows, task.names, task.seed, float(task.options.params.get("C", 1.0))), {}


def _regress(x: Tensor, y: Tensor, seed: int, strength: float) -> tuple[Tensor, Tensor]:
    """Return (weight [F'], bias []); labels of one kind only give a constant."""
    if len(y) == 0 or bool(y.all()) or not bool(y.any()):
        odds = torch.logit(torch.tensor((float(y.sum()) + 1.0) / (len(y) + 2.0)))
        return torch.zeros(x.shape[1]), odds
    model = LogisticRegression(C=strength, max_iter=1000, random_state=seed).fit(x.numpy(), y.numpy())
    return torch.from_numpy(model.coef_[0].astype(np.float32)), torch.tensor(float(model.intercept_[0]))
