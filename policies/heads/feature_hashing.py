"""HashedFeatures: which tokens, depths and ranges of scalars come together, as places in tables that are looked up by a hash.

What the draft gets right depends on the context, and a few tokens with the margin of the last one say much of it. Language
models hash their n-grams for the same reason: a table for all combinations would be too large, and most never come up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import PolicyError
from ..features import TOKEN_FEATURES
from .base import Array, kernels

DEPTH = "depth"
"""In a cross: the depth of the decision, be it a feature that is read or not."""

MOST_STRIDE = 1 << 20
"""With ids below 2^24 all sums stay far below 2^63."""


class HashedFeatures:
    """Places of C hashed features in tables of `size`, laid end to end: what they join, each times a stride, modulo size.

    Args:
        names: F features, in the order of the columns.
        strides: [C, F + 1] int64 of each feature, and of the depth; 0 = not in this cross.
        edges: [J, E] float32, ascending, for the J scalars that are crossed, in their order: they count by the range they
            fall in.
        size: of each table; best a prime.

    Attributes:
        columns, edges, strides: as `kernels.heads.cross_places` reads them.
    """

    def __init__(self, names: Sequence[str], strides: Array, edges: Array, size: int) -> None:
        used = np.flatnonzero((strides != 0).any(0)).tolist()
        scalars = [at for at in used if at < len(names) and names[at] not in TOKEN_FEATURES]
        if edges.ndim != 2 or len(edges) != len(scalars):
            raise PolicyError(f"weights: expected edges for {len(scalars)} crossed scalars, got {list(edges.shape)}")
        if (np.diff(edges, axis=1) < 0).any() or ((strides < 0) | (strides > MOST_STRIDE)).any():
            raise PolicyError(f"weights: expected ascending edges, and strides between 0 and {MOST_STRIDE}")
        # (feature, row of `edges`) of each column in use: -1 for the depth, which is no feature, and for what has no ranges.
        row = {at: which for which, at in enumerate(scalars)}
        cells = [(at if at < len(names) else -1, row.get(at, -1)) for at in used]
        self.columns: Array = np.array(cells, dtype=np.int64).reshape(-1, 2)
        self.edges, self.strides = np.array(edges), strides[:, used].copy()
        self._size = size

    def places(self, features: Array, depth: Array) -> Array:
        """Return [R, C] int64 below C times the size, the places of features [R, F] float32 at depths [R]."""
        out = np.empty((len(features), len(self.strides)), dtype=np.int64)
        kernels().cross_places(features, depth, self.columns, self.edges, self.strides, self._size, out)
        return out
