"""Attention masks of trees and of texts with hidden slots or shifted positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..topology import Topology

_MOST = 4096
"""Maximum number of cached parts of a tree. A few parts recur in most rounds."""


def causal(start: int, count: int, device: torch.device) -> Tensor:
    """Return the causal mask [1, 1, n, start + n] bool of n tokens after `start` earlier ones."""
    slots = torch.arange(start + count, device=device)
    return (slots <= slots[start:, None])[None, None]


class SlotLayouts:
    """Hidden slots and shifted positions of each stream.

    By default, later tokens see every slot and the position of a token equals its slot.

    Args:
        streams: Number of streams S.
        capacity: Slots per stream.
        device: Device of the model.
    """

    def __init__(self, streams: int, capacity: int, device: torch.device) -> None:
        self._changed = [False] * streams
        self._hidden = torch.zeros(streams, capacity, dtype=torch.bool, device=device)
        self._offsets = torch.zeros(1, streams, dtype=torch.int64, device=device)

    def set(self, stream: int, hidden: Tensor, offset: Tensor) -> None:
        """Set the layout of a stream.

        Args:
            stream: Index of the stream.
            hidden: [n] bool, True for the first n slots that later tokens do not see.
            offset: [D] int64, position minus slot of later tokens. D > 1 if a position has several coordinates.
        """
        self._changed[stream] = True
        self._hidden[stream] = False
        self._hidden[stream, : len(hidden)] = hidden
        if len(offset) > len(self._offsets):
            self._offsets = self._offsets.expand(len(offset), -1).clone()
        self._offsets[:, stream] = offset

    def of(self, stream: int, start: int) -> SlotLayouts | None:
        """Return the layouts if the stream has a layout, else None. A text that starts at slot 0 resets the layout."""
        if start == 0 and self._changed[stream]:
            self._changed[stream] = self._hidden[stream] = False
            self._offsets[:, stream] = 0
        return self if self._changed[stream] else None

    def hide(self, mask: Tensor, first: int = 0) -> Tensor:
        """Return the mask [B, 1, n, slots], boolean or additive, of the streams from `first` on, with hidden slots masked."""
        hidden = self._hidden[first : first + len(mask), None, None, : mask.shape[-1]]
        return mask.masked_fill(hidden, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min / 2)

    def positions(self, at: Tensor, stream: int | Tensor) -> Tensor:
        """Return the positions of tokens, [1, n] or [D, 1, n].

        Args:
            at: [1, n] positions without a layout.
            stream: Index of the stream of all tokens, or [n] index of the stream of each token.
        """
        offsets = self._offsets[:, stream].reshape(len(self._offsets), 1, -1)  # [D, 1, 1 or n]
        return at + offsets[0] if len(offsets) == 1 else at[None] + offsets


class TreeMasks:
    """Masks of parts of one tree.

    Args:
        topology: Topology of the tree.
        capacity: Maximum prefix length in tokens.
        after_prefix: Converts a boolean mask [n, n] to [1, 1, n, capacity + n] (see `CachedModel`).
    """

    def __init__(self, topology: Topology, capacity: int, after_prefix: Callable[[Tensor], Tensor]) -> None:
        self._topology, self._capacity = topology, capacity
        self._whole = after_prefix(topology.sees)  # [1, 1, rows, capacity + rows]
        self._sees = self._whole[0, 0, :, capacity:]  # [rows, rows], in the form of the mask
        self._scratch = self._whole[:, :, :0]
        self._relations: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self._parts: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tensor | None, Tensor]] = {}

    def relation(self, before: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Return the mask [n, m + n] of n rows over m rows `before` them and themselves."""
        key = tuple(before), tuple(rows)
        if key not in self._relations:
            if len(self._relations) == _MOST:
                self._relations.clear()
            at, columns = (torch.tensor(indices, device=self._sees.device) for indices in (key[1], key[0] + key[1]))
            self._relations[key] = self._sees[at[:, None], columns]
        return self._relations[key]

    def part(self, base: int, before: Sequence[int], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the mask [1, 1, n, base + m + n] of n rows, and their depths [1, n].

        The mask may be a view of a reused buffer. It is valid until the next call.

        Args:
            base: Length of the prefix.
            before: m rows of the tree that are in the cache, ordered by slot.
            rows: n rows to read after them.
        """
        key = tuple(before), tuple(rows)
        if key not in self._parts:
            if len(self._parts) == _MOST:
                self._parts.clear()
            self._parts[key] = self._make(*key)
        mask, depth = self._parts[key]
        count, end = len(rows), self._capacity + len(before) + len(rows)
        if mask is None:  # consecutive rows from the root: a slice of the whole mask
            return self._whole[:, :, len(before) : len(before) + count, self._capacity - base : end], depth
        if self._scratch.shape[2] < count:
            self._scratch = self._whole[:, :, :count].clone()
        # The prefix columns, which all rows see, are never written. Values of earlier parts beyond `end` are never read.
        self._scratch[0, 0, :count, self._capacity : end] = mask
        return self._scratch[:, :, :count, self._capacity - base : end], depth

    def _make(self, before: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
        """Return the mask [n, m + n] over the tree, or None if it is a slice of the whole mask, and the depths [1, n]."""
        order = (*before, *rows)
        depth = torch.tensor([[self._topology.depth[row] for row in rows]], device=self._sees.device)
        return None if order == tuple(range(len(order))) else self.relation(before, rows), depth
