"""The logistic head: three regressions by scikit-learn on standardised scalars and log-odds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from scipy.special import logit
from sklearn.linear_model import LogisticRegression

from ...policies.contract import Array
from ...policies.display import Progress
from .base import HeadEstimator, basis_columns, fit_basis
from .rows import FitRows


@dataclass(eq=False, repr=False, kw_only=True)
class LogisticEstimator(HeadEstimator):
    """Logistic regressions on scalar features and the log-odds of probabilities.

    Args:
        C: inverse strength of the L2 penalty.
        features, random_state: see `HeadEstimator`.
    """

    form = "logistic"

    C: float = 1.0

    space: ClassVar[Mapping[str, Any]] = {"C": (1e-3, 1e2)}

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        basis = fit_basis(rows, self.feature_names_)
        columns = basis_columns(basis, rows.features, rows.depth)
        weight, bias = np.zeros((3, basis.width), dtype=np.float32), np.zeros(3, dtype=np.float32)
        for output, (label, use) in enumerate(rows.outputs):
            x, y = columns[use.numpy()], rows.label(label)[use].numpy()
            if is_constant(y):
                bias[output] = constant_logit(y)
                continue
            model = LogisticRegression(C=self.C, max_iter=1000, random_state=self.seed).fit(*as_classes(x, y))
            weight[output], bias[output] = model.coef_[0], model.intercept_[0]
        return {"mean": basis.mean, "scale": basis.scale, "weight": weight, "bias": bias}


def is_constant(y: Array) -> bool:
    """Return whether labels [M], bool or chances, are all accepted or all rejected."""
    return len(y) == 0 or bool((y >= 1).all()) or bool((y <= 0).all())


def constant_logit(y: Array) -> float:
    """Return the log-odds of labels [M] with one more of each kind (Laplace), so that they are finite."""
    return float(logit((float(y.sum()) + 1.0) / (len(y) + 2.0)))


def as_classes(x: Any, y: Array) -> tuple[Any, Array, Array | None]:
    """Return rows, classes and weights for a classifier of rows [M, F], an array or a sparse matrix, with labels [M].

    A label that is a chance becomes two rows, one of each class, with the chances as weights: their weighted log loss
    y (-ln p) + (1 - y)(-ln(1 - p)) is the cross-entropy.
    """
    if y.dtype == bool:
        return x, y, None
    double = sparse.vstack([x, x], format="csr") if sparse.issparse(x) else np.concatenate([x, x])
    return double, np.repeat([True, False], len(y)), np.concatenate([y, 1.0 - y]).astype(np.float64)
