"""Chances as labels of a classifier that takes two classes: each row counts as both, with their weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from ...policies.contract import Array


def constant(y: Array) -> bool:
    """Whether labels [M], bits or chances, are all of one kind."""
    return len(y) == 0 or bool((y >= 1).all()) or bool((y <= 0).all())


def two_classes(x: Any, y: Array) -> tuple[Any, Array, Array | None]:
    """Return rows, classes and weights of rows [M, F], an array or a sparse matrix, with labels [M]; bits have no weights."""
    if y.dtype == bool:
        return x, y, None
    # The weighted log loss of a row and its copy, y (-ln p) + (1 - y)(-ln(1 - p)), is the cross-entropy against the chance.
    double = sparse.vstack([x, x], format="csr") if sparse.issparse(x) else np.concatenate([x, x])
    return double, np.repeat([True, False], len(y)), np.concatenate([y, 1.0 - y]).astype(np.float64)
