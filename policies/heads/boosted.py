"""The head of boosted trees, as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PolicyError
from .base import NO_HIDDEN, Array, Hidden, TensorHead, expect, kernels

DEEPEST_TREE = 16


class TreesHead(TensorHead):
    """Two boosted ensembles as complete binary trees of one depth D.

    Args:
        names: features.
        tensors: `feature` int64 and `threshold` float32 [2, T, 2^D - 1], `missing_left` bool of the same shape,
            `leaf` [2, T, 2^D], `base` [2]. A row goes left where x < threshold. See `TensorHead` for ranges.
    """

    kind = "xgboost"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors, ("feature", "threshold", "missing_left", "leaf", "base"))
        split, leaf = self._tensors["feature"], self._tensors["leaf"]
        self.depth = int(leaf.shape[-1]).bit_length() - 1 if leaf.ndim == 3 else 0
        if not 0 <= self.depth <= DEEPEST_TREE:
            raise PolicyError(f"weights: expected leaf of 1 to {2**DEEPEST_TREE} leaves a tree, got {list(leaf.shape)}")
        inner = (2, split.shape[1] if split.ndim == 3 else -1, 2**self.depth - 1)
        for name in ("feature", "threshold", "missing_left"):
            expect(self._tensors[name], inner, name)
        expect(leaf, (*inner[:2], 2**self.depth), "leaf")
        expect(self._tensors["base"], (2,), "base")
        if split.size and not 0 <= split.min() <= split.max() < len(names):
            raise PolicyError(f"xgboost head: a split reads a feature outside 0..{len(names) - 1}")
        trees = (
            (2 * split + ~self._tensors["missing_left"]).astype(np.uint32).reshape(-1),  # odd = unknown goes right
            self._tensors["threshold"].flatten(),
            leaf.flatten(),
            self._tensors["base"].astype(np.float64),
            self.depth,
        )
        self._packed = [(bounds, *trees) for bounds in (self.bounds, self.first_bounds)]

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], accept and next; see `Head`."""
        out = np.empty((len(features), 2))
        kernels().score_trees(features, *self._packed[0 if depth else 1], out)
        return out
