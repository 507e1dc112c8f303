"""Crosses: which tokens, depths and ranges of scalars come together, as places in tables that are looked up by a hash.

What the draft gets right depends on the context, and a few tokens with the margin of the last one say much of it. Language
models hash their n-grams for the same reason: a table for all combinations would be too large, and most never come up.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import PolicyError
from .features import LEVEL_FEATURES, TOKEN_FEATURES
from .heads_base import OnDevice

DEPTH = "depth"
"""In a cross: the depth of the decision, be it a feature that is read or not."""

MOST_STRIDE = 1 << 20
"""With ids below 2^24 all sums stay whole in float64."""


class Crosses:
    """Places of C crosses in tables of `size`, laid end to end: what is crossed, each times its stride, modulo the size.

    Args:
        names: F features, in the order of the columns.
        strides: [C, F + 1] int64 of each feature, and of the depth; 0 = not in this cross.
        edges: [J, E] float32, ascending, for the J scalars that are crossed, in their order: they count by the range they
            fall in.
        size: of each table; best a prime.
    """

    def __init__(self, names: Sequence[str], strides: Tensor, edges: Tensor, size: int) -> None:
        used = [at for at in range(len(names)) if bool((strides[:, at] != 0).any())]
        self._ids = [at for at in used if names[at] in TOKEN_FEATURES]
        scalars = [at for at in used if names[at] not in TOKEN_FEATURES]
        if edges.dim() != 2 or len(edges) != len(scalars):
            raise PolicyError(f"weights: expected edges for {len(scalars)} crossed scalars, got {list(edges.shape)}")
        if bool((edges.diff(dim=1) < 0).any()) or bool(((strides < 0) | (strides > MOST_STRIDE)).any()):
            raise PolicyError(f"weights: expected ascending edges, and strides between 0 and {MOST_STRIDE}")
        self._scalars, self._placed = scalars, OnDevice(torch.tensor(self._ids + scalars, dtype=torch.int64), edges)
        # As the features came, in float32: the ranges must be the same for one row as for many.
        self._edges = [array("f", row.tolist()) for row in edges]
        # Tokens first, then ranges, then the depth.
        placed = strides[:, [*self._ids, *scalars, len(names)]]
        self._strides = OnDevice(placed.double().T)
        self._parts = [[(at, stride) for at, stride in enumerate(cross) if stride] for cross in placed.tolist()]
        self._size = size
        # What all branches of a depth share, and what each has of its own: its ids, its scalars with their edges.
        own = [name not in LEVEL_FEATURES for name in names]
        self._own_ids = [(place, at) for place, at in enumerate(self._ids) if own[at]]
        ranges = enumerate(zip(scalars, self._edges, strict=True), len(self._ids))
        self._own_ranges = [(place, at, edges) for place, (at, edges) in ranges if own[at]]
        theirs = {place for place, *_ in (*self._own_ids, *self._own_ranges)}
        self._own, self._shared = (
            [[part for part in parts if (part[0] in theirs) == side] for parts in self._parts] for side in (True, False)
        )

    def places(self, features: Tensor, depth: int | Tensor) -> Tensor:
        """Return [..., C] int64 below C times the size, the places of features [..., F] at one depth, or at depths [...]."""
        columns, edges = self._placed(features.device)
        values = features.index_select(-1, columns)
        depths = torch.zeros_like(values[..., :1]) + (depth[..., None] if isinstance(depth, Tensor) else depth)
        ids, scalars = values.split([len(self._ids), len(self._scalars)], -1)
        ranges = [torch.searchsorted(edges[at], x.contiguous()) for at, x in enumerate(scalars.unbind(-1))]
        parts = [ids, *(within[..., None] for within in ranges), depths]
        # In float64 sums of whole numbers up to 2^53 are exact, and any device multiplies it.
        sums = torch.cat([part.double() for part in parts], -1) @ self._strides(features.device)[0]
        return (sums % self._size).long() + self._size * torch.arange(sums.shape[-1], device=sums.device)

    def _values(self, features: Sequence[float], depth: int) -> list[int]:
        values = [int(features[at]) for at in self._ids]
        for at, edges in zip(self._scalars, self._edges, strict=True):
            values.append(bisect_left(edges, features[at]))
        values.append(depth)
        return values

    def places_few(self, columns: Sequence[Sequence[float]], branches: Sequence[int], depth: int) -> list[list[int]]:
        """Return the C places of each of some branches of a depth; `columns` [F][B] are by feature."""
        values, size = self._values([column[branches[0]] for column in columns], depth), self._size
        shared = [
            (at * size, sum([stride * values[place] for place, stride in parts]), self._own[at])
            for at, parts in enumerate(self._shared)
        ]
        out = []
        for b in branches:
            for place, at in self._own_ids:
                values[place] = int(columns[at][b])
            for place, at, edges in self._own_ranges:
                values[place] = bisect_left(edges, columns[at][b])
            places = []
            for table, total, parts in shared:
                for place, stride in parts:
                    total += stride * values[place]
                places.append(table + total % size)
            out.append(places)
        return out

    def places_one(self, features: Sequence[float], depth: int) -> list[int]:
        """Return the C places of one row; see `places`."""
        values = self._values(features, depth)
        places, size, table = [], self._size, 0
        for parts in self._parts:
            place = 0
            for at, stride in parts:  # a loop takes half the time of a sum
                place += stride * values[at]
            places.append(table + place % size)
            table += size
        return places
