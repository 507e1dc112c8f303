"""The logistic head: three regressions by scikit-learn on standardised scalars and log-odds."""

from __future__ import annotations

import numpy as np
from scipy.special import logit
from sklearn.linear_model import LogisticRegression

from ....policies.contract import Array
from ....policies.heads.layers import LinearHead
from ..basis import basis_columns, fit_basis
from ..exported import exported
from ..fitting import FitTask
from ..soft_classes import constant, two_classes


def fit_logistic(task: FitTask) -> tuple[LinearHead, dict[str, bytes]]:
    """Fit `accept` on drawn tokens, `next` after accepted ones, and `next` at depth 0 on what is known there; see `Fitter`.

    Options' `params`: `C` of scikit-learn's regression, the inverse of the penalty.
    """
    rows, names, strength = task.rows, task.names, float(task.options.params.get("C", 1.0))
    basis = fit_basis(rows, names)
    columns = basis_columns(basis, rows.features, rows.depth)
    drawn, known = rows.drawn.numpy(), rows.followed_known.numpy()
    accepted, followed = rows.label("accepted").numpy(), rows.label("followed").numpy()
    parts = (
        (columns[drawn], accepted[drawn]),
        (columns[drawn & known], followed[drawn & known]),
        (columns[~drawn & known], followed[~drawn & known]),
    )
    weights, biases = zip(*(_regress(x, y, task.seed, strength) for x, y in parts), strict=True)
    fitted = {"mean": basis.mean, "scale": basis.scale, "weight": np.stack(weights), "bias": np.array(biases)}
    return LinearHead(names, exported(fitted, names, rows)), {}


def _regress(x: Array, y: Array, seed: int, strength: float) -> tuple[Array, np.float32]:
    """Return (weight [F'], bias) float32; labels of one kind only give a constant."""
    if constant(y):
        return np.zeros(x.shape[1], dtype=np.float32), np.float32(logit((float(y.sum()) + 1.0) / (len(y) + 2.0)))
    model = LogisticRegression(C=strength, max_iter=1000, random_state=seed).fit(*two_classes(x, y))
    return model.coef_[0].astype(np.float32), np.float32(model.intercept_[0])
