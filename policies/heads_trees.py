"""The head of boosted trees, as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .errors import PolicyError
from .forest import forest
from .heads_base import NO_ARRAYS, NO_VECTORS, Arrays, OnDevice, TensorHead, expect, take

_FOREST = ("feature", "threshold", "missing_left", "leaf", "base")
DEEPEST_TREE = 16
MANY, PART = 32, 128
"""Rows from which on trees are walked, and how many at a time: their nodes then stay in the processor's caches."""


class TreesHead(TensorHead):
    """Two boosted ensembles as complete binary trees of one depth D, walked by gathers.

    Args:
        names: features.
        tensors: `feature` int64 and `threshold` float32 [2, T, 2^D - 1], `missing_left` bool of the same shape,
            `leaf` [2, T, 2^D], `base` [2]. A row goes left where x < threshold.
    """

    kind = "xgboost"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self._tensors = take(tensors, _FOREST)
        split, leaf = self._tensors["feature"], self._tensors["leaf"]
        self.depth = int(leaf.shape[-1]).bit_length() - 1 if leaf.dim() == 3 else 0
        if not 0 <= self.depth <= DEEPEST_TREE:
            raise PolicyError(f"weights: expected leaf of 1 to {2**DEEPEST_TREE} leaves a tree, got {list(leaf.shape)}")
        inner = (2, split.shape[1] if split.dim() == 3 else -1, 2**self.depth - 1)
        for name in ("feature", "threshold", "missing_left"):
            expect(self._tensors[name], inner, name)
        expect(leaf, (*inner[:2], 2**self.depth), "leaf")
        expect(self._tensors["base"], (2,), "base")
        if split.numel() and not 0 <= int(split.min()) <= int(split.max()) < len(names):
            raise PolicyError(f"xgboost head: a split reads a feature outside 0..{len(names) - 1}")
        trees = inner[0] * inner[1]
        missing = self._tensors["missing_left"].reshape(-1)
        self._placed = OnDevice(
            split.reshape(-1),
            self._tensors["threshold"].reshape(-1),
            missing,
            leaf.reshape(-1),
            torch.arange(trees) * inner[2],
            torch.arange(trees) * 2**self.depth - inner[2],
            self._tensors["base"],
        )
        self._all_missing_left = bool(missing.all())
        self._one = forest(*(self._tensors[name] for name in _FOREST)) if trees else None

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], accept and next; see `Head`."""
        flat = features.reshape(-1, features.shape[-1])
        *_, base = placed = self._placed(features.device)
        if len(flat) < MANY:
            leaves = self._compared(flat, *placed)
        else:
            leaves = torch.cat([self._walked(part, *placed) for part in flat.split(PART)])
        scores = leaves.view(len(flat), 2, -1).sum(-1) + base
        return scores.view(*features.shape[:-1], 2)

    def _compared(
        self, x: Tensor, split: Tensor, threshold: Tensor, missing: Tensor, leaf: Tensor, inner_at: Tensor,
        leaf_at: Tensor, base: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the leaves [R, 2 T] of rows [R, F]: all splits are compared at once, in few operations."""
        values = x.index_select(1, split)
        right = values >= threshold  # false for missing values
        if not self._all_missing_left:
            right |= values.isnan() & ~missing
        step = right.long() + 1
        at = torch.zeros(len(x), len(inner_at), dtype=torch.int64, device=x.device)
        for _ in range(self.depth):
            at = 2 * at + step.gather(1, at + inner_at)
        return leaf[at + leaf_at]

    def _walked(
        self, x: Tensor, split: Tensor, threshold: Tensor, missing: Tensor, leaf: Tensor, inner_at: Tensor,
        leaf_at: Tensor, base: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return what `_compared` does: only the splits on the way are looked at, which is less work for many rows."""
        at = torch.zeros(len(x), len(inner_at), dtype=torch.int64, device=x.device)
        for _ in range(self.depth):
            node = at + inner_at
            values = x.gather(1, split[node])
            right = values >= threshold[node]
            if not self._all_missing_left:
                right |= values.isnan() & ~missing[node]
            at = 2 * at + 1 + right
        return leaf[at + leaf_at]

    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row; see `Head`."""
        if self._one is not None:
            return self._one(features)
        row: list[float] = self.logits(torch.tensor([[*features]]), depth)[0].tolist()
        return row
