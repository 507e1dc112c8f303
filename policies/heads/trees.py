"""The head of boosted trees, as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..contract import Array
from ..errors import PolicyError
from .base import Head, size_of

MAX_TREE_DEPTH = 16


class TreesHead(Head):
    """Two boosted ensembles of complete binary trees of one depth D; a row goes left where x < threshold.

    Tensors: `feature` int64, `threshold`, `missing_left` bool [2, T, 2^D - 1], `leaf` [2, T, 2^D], `base` [2].
    """

    kind = "xgboost"
    _kernel = "score_trees"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        depth = size_of(tensors, "leaf").bit_length() - 1
        if not 0 <= depth <= MAX_TREE_DEPTH:
            raise PolicyError(f"weights: expected leaf of 1 to {2**MAX_TREE_DEPTH} leaves a tree")
        inner = 2, size_of(tensors, "feature", 1), 2**depth - 1
        shapes = {**dict.fromkeys(("feature", "threshold", "missing_left"), inner), "leaf": (*inner[:2], 2**depth)}
        super().__init__(names, tensors, {**shapes, "base": (2,)})
        split = tensors["feature"]
        if split.size and not 0 <= split.min() <= split.max() < len(names):
            raise PolicyError(f"xgboost head: a split reads a feature outside 0..{len(names) - 1}")
        arrays = (
            (2 * split + ~tensors["missing_left"]).astype(np.uint32).reshape(-1),  # odd = unknown goes right
            tensors["threshold"].flatten(),
            tensors["leaf"].flatten(),
            tensors["base"].astype(np.float64),
            depth,
        )
        self._arguments = ((self.bounds[0], *arrays), (self.bounds[1], *arrays))
