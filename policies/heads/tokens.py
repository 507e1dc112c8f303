"""The token head: a logistic regression on scalars and on which tokens are there, each token with a weight of its own.

What a draft gets right depends on the token more than on much that its distribution shows: after an opening bracket it
does, after a line break it does not. A table says so for the price of looking a number up, without reading a row of
logits. (Measured on a small pair, greedy: AUC of `next` .79 with tokens, .70 with ten scalars and no token.) What a token
says depends on where it stands, so what comes together has weights as well (`hashed`): a token and its parent, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PolicyError
from ..features import TOKEN_FEATURES, Kind, feature
from .base import NO_HIDDEN, Array, Basis, Hidden, TensorHead, expect, kernels, width_of
from .feature_hashing import HashedFeatures


class TokenHead(TensorHead):
    """Accept and next, each a sum: a number for the depth, weighted scalars, a number for each token and each cross.

    At depth 0 the anchor and the token before it are all there is, so these count on their own there alone; from depth 1 on
    it is what was drawn, and after which token.

    Args:
        names: features, one or more of `TOKEN_FEATURES` among them. The other ones are scalars.
        tensors: `mean` and `scale` [F'] of the scalars' basis; `weight` [3, F'] of accept, next, and next at depth 0;
            `bias` [2, K + 1] of accept and next at each depth, the last one beyond; `table` [2, I, V] for the I token
            features in their order, a token beyond the table counting as 0; and `hashed` [2, C, B] from depth 1 on, with
            the `strides` and `edges` of their places (`feature_hashing.HashedFeatures`). The three may be missing: C = 0. See
            `TensorHead` for ranges.
    """

    kind = "tokens"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        none: dict[str, Array] = {
            "strides": np.zeros((0, len(names) + 1), dtype=np.int64),
            "edges": np.zeros((0, 0), dtype=np.float32),
            "hashed": np.zeros((2, 0, 1), dtype=np.float32),
        }
        plain = ("mean", "scale", "weight", "bias", "table", "strides", "edges", "hashed")
        super().__init__(names, {**none, **tensors}, plain)
        t = self._tensors
        ids = [at for at, name in enumerate(names) if name in TOKEN_FEATURES]
        scalars = [at for at, name in enumerate(names) if name not in TOKEN_FEATURES]
        if not ids:
            raise PolicyError(f"tokens head: expected one of the features {', '.join(TOKEN_FEATURES)}")
        self.basis = Basis([names[at] for at in scalars], t["mean"], t["scale"])
        self.vocabulary, strides, size = width_of(t["table"]), t["strides"], width_of(t["hashed"])
        expect(t["weight"], (3, self.basis.width), "weight")
        expect(t["bias"], (2, max(width_of(t["bias"]), 1)), "bias")
        expect(t["table"], (2, len(ids), max(self.vocabulary, 1)), "table")
        expect(strides, (len(strides) if strides.ndim else 0, len(names) + 1), "strides")
        expect(t["hashed"], (2, len(strides), max(size, 1)), "hashed")
        hashed = HashedFeatures(names, strides, t["edges"], size)
        self._packed = [self._pack(names, scalars, ids, hashed, first) for first in (False, True)]

    def _pack(
        self, names: Sequence[str], scalars: Sequence[int], ids: Sequence[int], hashed: HashedFeatures, first: bool
    ) -> tuple[Array, ...]:
        """Return what `kernels.heads.score_tokens` reads beside features and depth."""
        t, places = self._tensors, np.array(scalars, dtype=np.int64)
        weight, shift = self.basis.fold(t["weight"][[0, 2 if first else 1]], np.zeros(2), first)
        odds = places[self.basis.odds]
        weights = np.zeros((len(names) + len(odds), 2))  # 0 for ids, which are no amounts
        weights[[*scalars, *range(len(names), len(weights))]] = weight.T
        known = [at for at, place in enumerate(ids) if (feature(names[place]).kind is Kind.ANCHOR) == first]
        # Accept and next of a token stand side by side, and those of a cross.
        tables = np.ascontiguousarray(t["table"][:, known].transpose(1, 2, 0))
        crossed = np.ascontiguousarray(t["hashed"].transpose(1, 2, 0))
        return (
            self.first_bounds if first else self.bounds,
            odds,
            weights,
            np.ascontiguousarray((t["bias"] + shift[:, None]).T),
            np.array(ids, dtype=np.int64)[known],
            tables,
            hashed.columns,
            hashed.edges,
            hashed.strides[:0] if first else hashed.strides,  # none are looked up at depth 0
            crossed,
        )

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], accept and next; see `Head`."""
        out = np.empty((len(features), 2))
        kernels().score_tokens(features, depth, *self._packed[0 if depth else 1], out)
        return out
