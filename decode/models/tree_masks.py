"""What the tokens of a tree see of each other, in the form that a model reads, after a prefix that they all see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..topology import Topology

_MOST = 4096
"""Parts of a tree that are kept: the same few come up again and again."""


class TreeMasks:
    """Masks of parts of one tree.

    Args:
        topology: the tree.
        capacity: tokens of the longest prefix.
        after_prefix: makes [1, 1, n, capacity + n] of a boolean mask [n, n] (`CachedModel`).
    """

    def __init__(self, topology: Topology, capacity: int, after_prefix: Callable[[Tensor], Tensor]) -> None:
        self._topology, self._capacity = topology, capacity
        self._whole = after_prefix(topology.sees)  # [1, 1, rows, capacity + rows]
        self._sees = self._whole[0, 0, :, capacity:]  # [rows, rows], in the mask's form
        self._scratch = self._whole[:, :, :0]
        self._relations: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self._parts: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tensor | None, Tensor]] = {}

    def relation(self, before: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Return what n rows see of m rows `before` them and of each other, [n, m + n] in the mask's form."""
        key = tuple(before), tuple(rows)
        if key not in self._relations:
            if len(self._relations) == _MOST:
                self._relations.clear()
            at, columns = (torch.tensor(some, device=self._sees.device) for some in (key[1], key[0] + key[1]))
            self._relations[key] = self._sees[at[:, None], columns]
        return self._relations[key]

    def part(self, base: int, before: Sequence[int], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the mask [1, 1, n, base + m + n] of n rows, and their depths [1, n].

        The mask is to be used before the next one is asked for: it lies in a buffer that is used again.

        Args:
            base: length of the prefix.
            before: m rows of the tree that are in the cache, by slot.
            rows: n rows to be read after them.
        """
        key = tuple(before), tuple(rows)
        if key not in self._parts:
            if len(self._parts) == _MOST:
                self._parts.clear()
            self._parts[key] = self._make(*key)
        mask, depth = self._parts[key]
        count, end = len(rows), self._capacity + len(before) + len(rows)
        if mask is None:  # the whole tree up to here: a slice
            return self._whole[:, :, len(before) : len(before) + count, self._capacity - base : end], depth
        if self._scratch.shape[2] < count:
            self._scratch = self._whole[:, :, :count].clone()
        # Its prefix, which all see, is never written; what an earlier part has left beyond `end` is never read.
        self._scratch[0, 0, :count, self._capacity : end] = mask
        return self._scratch[:, :, :count, self._capacity - base : end], depth

    def _make(self, before: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
        """Return what the rows see of the tree, [n, m + n]; None where it is a slice of the whole; and their depths."""
        seen = (*before, *rows)
        depth = torch.tensor([[self._topology.depth[row] for row in rows]], device=self._sees.device)
        return None if seen == tuple(range(len(seen))) else self.relation(before, rows), depth
