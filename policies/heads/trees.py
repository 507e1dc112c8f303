"""The head of boosted trees, as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PolicyError
from ..typing import Array
from .base import Head, check_shape

MAX_TREE_DEPTH = 16


class TreesHead(Head):
    """Two boosted ensembles of complete binary trees of one depth D.

    Args:
        names: features.
        tensors: `feature` int64 and `threshold` float32 [2, T, 2^D - 1], `missing_left` bool of the same shape,
            `leaf` [2, T, 2^D], `base` [2]. A row goes left where x < threshold. See `Head` for ranges.
    """

    kind = "xgboost"
    _kernel = "score_trees"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors, ("feature", "threshold", "missing_left", "leaf", "base"))
        t = self._tensors
        split, leaf = t["feature"], t["leaf"]
        depth = int(leaf.shape[-1]).bit_length() - 1 if leaf.ndim == 3 else 0
        if not 0 <= depth <= MAX_TREE_DEPTH:
            raise PolicyError(
                f"weights: expected leaf of 1 to {2**MAX_TREE_DEPTH} leaves a tree, got {list(leaf.shape)}"
            )
        trees = split.shape[1] if split.ndim == 3 else -1
        for name in ("feature", "threshold", "missing_left"):
            check_shape(t, name, 2, trees, 2**depth - 1)
        check_shape(t, "leaf", 2, trees, 2**depth)
        check_shape(t, "base", 2)
        if split.size and not 0 <= split.min() <= split.max() < len(names):
            raise PolicyError(f"xgboost head: a split reads a feature outside 0..{len(names) - 1}")
        arrays = (
            (2 * split + ~t["missing_left"]).astype(np.uint32).reshape(-1),  # odd = unknown goes right
            t["threshold"].flatten(),
            leaf.flatten(),
            t["base"].astype(np.float64),
            depth,
        )
        self._arguments = ((self.bounds[0], *arrays), (self.bounds[1], *arrays))
