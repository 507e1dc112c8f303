"""Heads that look values up: boosted trees, and a logistic regression on scalars and tokens with a weight for each token.

Greedy, on a small pair, the AUC of `next` was .79 with tokens and .70 with ten scalars and no token. What a token says
depends on its context, so hashed features join a token with its parent, its depth or the range of a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..contract import Array
from ..errors import PolicyError
from ..features import TOKEN_FEATURES, Kind, feature
from .base import NO_HIDDEN, Basis, Head, Hidden, basis_shapes, kernels, size_of

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
        self.arguments = ((self.bounds[0], *arrays), (self.bounds[1], *arrays))


DEPTH = "depth"
"""In a cross: the depth of the decision, whether or not it is a feature."""

MAX_STRIDE = 1 << 20  # with ids below 2^24 all sums stay far below 2^63


class HashedFeatures:
    """Indices of C hashed features in consecutive tables of `size`: sum of stride times value, modulo size.

    Args:
        names: F features, in the order of the columns.
        strides: [C, F + 1] int64 of each feature, and of the depth; 0 = not in this cross.
        edges: [J, E] float32, ascending, for the J crossed scalars in their order; the value is the range they fall in.
        size: of each table; best a prime.
    """

    def __init__(self, names: Sequence[str], strides: Array, edges: Array, size: int) -> None:
        used = np.flatnonzero((strides != 0).any(0)).tolist()
        scalars = [at for at in used if at < len(names) and names[at] not in TOKEN_FEATURES]
        if edges.ndim != 2 or len(edges) != len(scalars):
            raise PolicyError(f"weights: expected edges for {len(scalars)} crossed scalars, got {list(edges.shape)}")
        if (np.diff(edges, axis=1) < 0).any() or ((strides < 0) | (strides > MAX_STRIDE)).any():
            raise PolicyError(f"weights: expected ascending edges, and strides between 0 and {MAX_STRIDE}")
        # [U, 2] feature (-1 = the depth), and row of `edges` (-1 = no ranges) of each crossed column.
        cells = [(at if at < len(names) else -1, scalars.index(at) if at in scalars else -1) for at in used]
        self.columns: Array = np.array(cells, dtype=np.int64).reshape(-1, 2)
        self.edges, self.strides, self._size = np.array(edges), strides[:, used].copy(), size

    def places(self, features: Array, depth: Array) -> Array:
        """Return [R, C] int64, the indices of features [R, F] float32 at depths [R]."""
        values = np.empty((len(features), len(self.columns)), dtype=np.int64)
        for i, (column, which) in enumerate(self.columns.tolist()):
            value = features[:, column] if column >= 0 else depth
            values[:, i] = value if which < 0 else (self.edges[which] < value[:, None]).sum(1)  # NaN is above no edge
        places: Array = values @ self.strides.T % self._size
        return places + self._size * np.arange(len(self.strides))


class TokenHead(Head):
    """Accept and next, each a sum: a bias by depth, weighted scalars, and a weight for each token and each cross.

    At depth 0 only the anchor and the token before it count; from depth 1 on only drawn tokens and their parents.

    Tensors: `mean` and `scale` [F'] of the scalars' basis; `weight` [3, F'] of accept, next, and next at depth 0; `bias`
    [2, K + 1] by depth, the last one for all deeper ones; `table` [2, I, V] of the I token features (tokens beyond it count
    as 0); optionally `hashed` [2, C, B] with the `strides` and `edges` of `HashedFeatures`.
    """

    kind = "tokens"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        t: dict[str, Array] = {
            "strides": np.zeros((0, len(names) + 1), dtype=np.int64),
            "edges": np.zeros((0, 0), dtype=np.float32),
            "hashed": np.zeros((2, 0, 1), dtype=np.float32),
            **tensors,
        }
        ids = [at for at, name in enumerate(names) if name in TOKEN_FEATURES]
        scalars = [at for at, name in enumerate(names) if name not in TOKEN_FEATURES]
        if not ids:
            raise PolicyError(f"tokens head: expected one of the features {', '.join(TOKEN_FEATURES)}")
        shapes, count = basis_shapes([names[at] for at in scalars]), size_of(t, "strides", 0)
        super().__init__(names, t, {
            **shapes, "weight": (3, *shapes["mean"]), "bias": (2, max(size_of(t, "bias"), 1)),
            "table": (2, len(ids), max(size_of(t, "table"), 1)), "strides": (count, len(names) + 1),
            "edges": t["edges"].shape, "hashed": (2, count, max(size_of(t, "hashed"), 1)),
        })  # fmt: skip
        basis = Basis([names[at] for at in scalars], t["mean"], t["scale"])
        hashed = HashedFeatures(names, t["strides"], t["edges"], size_of(t, "hashed"))
        cross_table = np.ascontiguousarray(t["hashed"].transpose(1, 2, 0))

        def arguments(first: bool) -> tuple[Array, ...]:
            weight, shift = basis.fold(t["weight"][[0, 2 if first else 1]], np.zeros(2), first)
            odds = np.array(scalars, dtype=np.int64)[basis.odds]
            weights = np.zeros((len(names) + len(odds), 2))  # 0 for token ids
            weights[[*scalars, *range(len(names), len(weights))]] = weight.T
            known = [at for at, place in enumerate(ids) if (feature(names[place]).kind is Kind.ANCHOR) == first]
            bias = np.ascontiguousarray((t["bias"] + shift[:, None]).T)
            table = np.ascontiguousarray(t["table"][:, known].transpose(1, 2, 0))
            strides = hashed.strides[:0] if first else hashed.strides
            places = np.array(ids, dtype=np.int64)[known]
            hash_arguments = hashed.columns, hashed.edges, strides, cross_table
            return self.bounds[first], odds, weights, bias, places, table, *hash_arguments

        self.arguments = arguments(False), arguments(True)

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2]; see `Head`."""
        out = np.empty((len(features), 2))
        kernels().score_tokens(features, depth, *self.arguments[depth == 0], out)
        return out
