"""The token head: a logistic regression on scalars and on which tokens are there, each token with a weight of its own.

What a draft gets right depends on the token more than on much that its distribution shows: behind an opening bracket it
does, behind a line break it does not. A table says so for the price of looking a number up, without reading a row of
logits. (Measured on a small pair, greedy: AUC of `next` .79 with tokens, .70 with ten scalars and no token.) What a token
says depends on the one before it, so pairs of tokens have weights as well, in a table that is looked up by a hash, as
language models hash their n-grams.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .errors import PolicyError
from .features import TOKEN_FEATURES
from .heads_base import NO_ARRAYS, NO_VECTORS, Arrays, Basis, OnDevice, TensorHead, expect, log_odds, take

Cell = tuple[int, float, float]
IdsT = TypeVar("IdsT", int, Tensor)
PAIR = ("above_token", "drawn_token")
"""A head that reads both may have a table of pairs."""

_STRIDE = 40503


def bucket(above: IdsT, drawn: IdsT, size: int) -> IdsT:
    """Return the places in [0, size) of pairs of tokens, as numbers or as tensors; best spread where `size` is prime."""
    return (above * _STRIDE + drawn) % size


class TokenHead(TensorHead):
    """Accept and next, each a sum: a number for the depth, weighted scalars, a number for each token and each pair of them.

    At depth 0 the anchor is all there is, so `anchor_token` counts there alone; from depth 1 on it is what was drawn, and
    behind which token.

    Args:
        names: features, one or more of `TOKEN_FEATURES` among them. The other ones are scalars.
        tensors: `mean` and `scale` [F'] of the scalars' basis; `weight` [3, F'] of accept, next, and next at depth 0;
            `bias` [2, K + 1] of accept and next at each depth, the last one beyond; `table` [2, I, V] for the I token
            features in their order, a token beyond the table counting as 0; and `pairs` [2, B] of `PAIR` by `bucket`
            from depth 1 on. It may be missing: B = 0.
    """

    kind = "tokens"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        none = {"pairs": torch.zeros(2, 0)}
        self._tensors = take({**none, **tensors}, ("mean", "scale", "weight", "bias", "table", "pairs"))
        self._ids = [at for at, name in enumerate(names) if name in TOKEN_FEATURES]
        self._scalars = [at for at, name in enumerate(names) if name not in TOKEN_FEATURES]
        if not self._ids:
            raise PolicyError(f"tokens head: expected one of the features {', '.join(TOKEN_FEATURES)}")
        self.basis = Basis([names[at] for at in self._scalars], self._tensors["mean"], self._tensors["scale"])
        weight, bias, table, pairs = (self._tensors[name] for name in ("weight", "bias", "table", "pairs"))
        self._deepest = bias.shape[-1] - 1 if bias.dim() else 0
        self.vocabulary = table.shape[-1] if table.dim() else 0
        expect(weight, (3, self.basis.width), "weight")
        expect(bias, (2, max(self._deepest, 0) + 1), "bias")
        expect(table, (2, len(self._ids), max(self.vocabulary, 1)), "table")
        self._buckets = pairs.shape[-1] if pairs.dim() else 0
        expect(pairs, (2, self._buckets), "pairs")
        if self._buckets and not set(PAIR) <= set(names):
            raise PolicyError(f"tokens head: a table of pairs goes with the features {' and '.join(PAIR)}")
        self._pair = [names.index(name) for name in PAIR] if self._buckets else []
        # By whether it is depth 0: the token features that count there.
        self._known = [
            [at for at, place in enumerate(self._ids) if (names[place] == "anchor_token") == first]
            for first in (False, True)
        ]
        zero = torch.zeros(2)
        layers = [self.basis.fold(weight[rows], zero, first) for rows, first in (([0, 1], False), ([0, 2], True))]
        self._placed = [OnDevice(*layer, bias, table, pairs) for layer in layers]
        # By whether it is depth 0: place and both weights of each scalar, those of log-odds, and by depth what is added.
        self._cells, self._odds, self._start = zip(*(self._by_scalar(*layer) for layer in layers), strict=True)
        # Accept and next of a token stand side by side; a plain list would take eight times the room.
        tables = [array("f", table[:, at].T.reshape(-1).tolist()) for at in range(len(self._ids))]
        self._looked_up = [[(self._ids[at], tables[at]) for at in known] for known in self._known]
        self._pairs = array("f", pairs.T.reshape(-1).tolist())

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], accept and next; see `Head`."""
        weight, shift, bias, table, pairs = self._placed[depth == 0](features.device)
        x = self.basis.expand(features[..., self._scalars])
        out = torch.nn.functional.linear(x, weight, shift) + bias[:, min(depth, self._deepest)]
        for at in self._known[depth == 0]:
            token = features[..., self._ids[at]].long()
            inside = (token >= 0) & (token < self.vocabulary)
            out = out + torch.where(inside[..., None], table[:, at].T[token.clamp(0, self.vocabulary - 1)], 0.0)
        if depth and self._pair:
            above, drawn = (features[..., at].long() for at in self._pair)
            out = out + pairs.T[bucket(above, drawn, self._buckets)]
        return out

    def _by_scalar(self, weight: Tensor, shift: Tensor) -> tuple[list[Cell], list[Cell], list[list[float]]]:
        places = [*self._scalars, *(self._scalars[at] for at in self.basis.probabilities)]
        cells = [(at, *pair) for at, pair in zip(places, weight.double().T.tolist(), strict=True)]
        count = len(self._scalars)
        return cells[:count], cells[count:], (shift.double()[:, None] + self._tensors["bias"].double()).T.tolist()

    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row; see `Head`."""
        first = depth == 0
        accept, following = self._start[first][min(depth, self._deepest)]
        for at, now, later in self._cells[first]:
            x = features[at]
            accept += now * x
            following += later * x
        for at, now, later in self._odds[first]:
            x = log_odds(features[at])
            accept += now * x
            following += later * x
        for at, table in self._looked_up[first]:
            place = 2 * int(features[at])
            if 0 <= place < len(table):
                accept += table[place]
                following += table[place + 1]
        if depth and self._pair:
            behind, drawn = self._pair
            place = 2 * bucket(int(features[behind]), int(features[drawn]), self._buckets)
            accept += self._pairs[place]
            following += self._pairs[place + 1]
        return [accept, following]
