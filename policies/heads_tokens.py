"""The token head: a logistic regression on scalars and on which tokens are there, each token with a weight of its own.

What a draft gets right depends on the token more than on much that its distribution shows: behind an opening bracket it
does, behind a line break it does not. A table says so for the price of looking a number up, without reading a row of
logits. (Measured on a small pair, greedy: AUC of `next` .79 with tokens, .70 with ten scalars and no token.) What a token
says depends on where it stands, so what comes together has weights as well (`crosses`): a token and the one above, and
so on.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .crosses import Crosses
from .errors import PolicyError
from .features import LEVEL_FEATURES, TOKEN_FEATURES, Kind, feature
from .heads_base import NO_ARRAYS, NO_VECTORS, Arrays, Basis, OnDevice, TensorHead, expect, log_odds, take

Cell = tuple[int, float, float]


class TokenHead(TensorHead):
    """Accept and next, each a sum: a number for the depth, weighted scalars, a number for each token and each cross.

    At depth 0 the anchor and the token before it are all there is, so these count on their own there alone; from depth 1 on
    it is what was drawn, and behind which token.

    Args:
        names: features, one or more of `TOKEN_FEATURES` among them. The other ones are scalars.
        tensors: `mean` and `scale` [F'] of the scalars' basis; `weight` [3, F'] of accept, next, and next at depth 0;
            `bias` [2, K + 1] of accept and next at each depth, the last one beyond; `table` [2, I, V] for the I token
            features in their order, a token beyond the table counting as 0; and `crosses` [2, C, B] from depth 1 on, with
            the `strides` and `edges` of their places (`crosses.Crosses`). The three may be missing: C = 0.
    """

    kind = "tokens"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        none = {
            "strides": torch.zeros(0, len(names) + 1, dtype=torch.int64),
            "edges": torch.zeros(0, 0),
            "crosses": torch.zeros(2, 0, 1),
        }
        self._tensors = take(
            {**none, **tensors}, ("mean", "scale", "weight", "bias", "table", "strides", "edges", "crosses")
        )
        self._ids = [at for at, name in enumerate(names) if name in TOKEN_FEATURES]
        self._scalars = [at for at, name in enumerate(names) if name not in TOKEN_FEATURES]
        if not self._ids:
            raise PolicyError(f"tokens head: expected one of the features {', '.join(TOKEN_FEATURES)}")
        self.basis = Basis([names[at] for at in self._scalars], self._tensors["mean"], self._tensors["scale"])
        weight, bias, table, crosses = (self._tensors[name] for name in ("weight", "bias", "table", "crosses"))
        self._deepest = bias.shape[-1] - 1 if bias.dim() else 0
        self.vocabulary = table.shape[-1] if table.dim() else 0
        expect(weight, (3, self.basis.width), "weight")
        expect(bias, (2, max(self._deepest, 0) + 1), "bias")
        expect(table, (2, len(self._ids), max(self.vocabulary, 1)), "table")
        strides = self._tensors["strides"]
        expect(strides, (len(strides) if strides.dim() else 0, len(names) + 1), "strides")
        size = crosses.shape[-1] if crosses.dim() else 0
        expect(crosses, (2, len(strides), max(size, 1)), "crosses")
        self._places = Crosses(names, strides, self._tensors["edges"], size) if len(strides) else None
        # By whether it is depth 0: the token features that count there.
        known = [
            [at for at, place in enumerate(self._ids) if (feature(names[place]).kind is Kind.ANCHOR) == first]
            for first in (False, True)
        ]
        zero = torch.zeros(2)
        layers = [self.basis.fold(weight[rows], zero, first) for rows, first in (([0, 1], False), ([0, 2], True))]
        scalars, ids = torch.tensor(self._scalars, dtype=torch.int64), torch.tensor(self._ids, dtype=torch.int64)
        # Accept and next of a token stand side by side, here and below.
        rows, crossed = table.permute(1, 2, 0).contiguous(), crosses.permute(1, 2, 0).reshape(-1, 2)
        self._placed = [
            OnDevice(*layer, bias, scalars, ids[at], rows[at], crossed) for layer, at in zip(layers, known, strict=True)
        ]
        # By whether it is depth 0: place and both weights of each scalar, those of log-odds, and by depth what is added.
        self._cells, self._odds, self._start = zip(*(self._by_scalar(*layer) for layer in layers), strict=True)
        level, own = (
            [c for c in self._cells[False] if (names[c[0]] in LEVEL_FEATURES) == side] for side in (True, False)
        )
        self._level_cells, self._own_cells = level, own
        # A plain list would take eight times the room of an array.
        tables = [array("f", numbers.reshape(-1).tolist()) for numbers in rows]
        self._looked_up = [[(self._ids[at], tables[at]) for at in some] for some in known]
        self._crossed = array("f", crossed.reshape(-1).tolist())

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], accept and next; see `Head`."""
        weight, shift, bias, scalars, ids, tables, crosses = self._placed[depth == 0](features.device)
        x = self.basis.expand(features.index_select(-1, scalars))
        out = torch.nn.functional.linear(x, weight, shift) + bias[:, min(depth, self._deepest)]
        tokens = features.index_select(-1, ids).long()
        inside = (tokens >= 0) & (tokens < self.vocabulary)
        found = tables[torch.arange(len(ids), device=ids.device), tokens.clamp(0, self.vocabulary - 1)]
        out = out + torch.where(inside[..., None], found, 0.0).sum(-2)
        if depth and self._places is not None:
            out = out + crosses[self._places.places(features, depth)].sum(-2)
        return out

    def _by_scalar(self, weight: Tensor, shift: Tensor) -> tuple[list[Cell], list[Cell], list[list[float]]]:
        places = [*self._scalars, *(self._scalars[at] for at in self.basis.probabilities)]
        cells = [(at, *pair) for at, pair in zip(places, weight.double().T.tolist(), strict=True)]
        count = len(self._scalars)
        return cells[:count], cells[count:], (shift.double()[:, None] + self._tensors["bias"].double()).T.tolist()

    def logits_few(self, columns: Sequence[Sequence[float]], branches: Sequence[int], depth: int) -> list[list[float]]:
        """Return [accept, next] of some branches; see `Head`. What they share is added up once."""
        if depth == 0 or not branches or self._odds[False]:
            return super().logits_few(columns, branches, depth)
        shared, following_shared = self._start[False][min(depth, self._deepest)]
        for at, now, later in self._level_cells:
            x = columns[at][branches[0]]
            shared += now * x
            following_shared += later * x
        placed = self._places.places_few(columns, branches, depth) if self._places is not None else [()] * len(branches)
        crossed, out = self._crossed, []
        for b, places in zip(branches, placed, strict=True):
            accept, following = shared, following_shared
            for at, now, later in self._own_cells:
                x = columns[at][b]
                accept += now * x
                following += later * x
            for at, table in self._looked_up[False]:
                place = 2 * int(columns[at][b])
                if 0 <= place < len(table):
                    accept += table[place]
                    following += table[place + 1]
            for place in places:
                accept += crossed[2 * place]
                following += crossed[2 * place + 1]
            out.append([accept, following])
        return out

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
        if depth and self._places is not None:
            crossed = self._crossed
            for place in self._places.places_one(features, depth):
                accept += crossed[2 * place]
                following += crossed[2 * place + 1]
        return [accept, following]
