"""Packed calls: what several streams read next, as one call of a model (`kv_cache` has how its attention sees them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...policies.typing import Array
from ..topology import Topology
from .cuda.transfer import upload
from .kv_cache import KVCache, Packing


@dataclass(slots=True)
class TreeRows:
    """The `rows` of a tree that are read, after its rows `before`, which lie in the slots from `base` on."""

    topology: Topology
    base: int
    before: Sequence[int]
    rows: Sequence[int]


@dataclass(slots=True)
class Part:
    """What one stream reads next.

    Attributes:
        stream: its number.
        tokens: n, in order; numbers, or int64 on the model's device.
        wanted: logits after the last so many are wanted; 0 = after all.
        tree: the rows that the tokens are of; None = the tokens follow one another.
    """

    stream: int
    tokens: Sequence[int] | Tensor
    wanted: int = 0
    tree: TreeRows | None = None


@dataclass(slots=True)
class PackedCall:
    """One call for T tokens of several streams.

    Attributes:
        tokens, positions: [1, T].
        wanted: [R] which tokens' logits are wanted; 0 = all.
        sees: [S, n] the last slot that each query sees; of a tree's rows the last one before the tree.
        query_positions: [S, n].
        packing: where everything lies; S is its rows.
        ends: slots in use by stream, once it is done.
        kept: how many of the R rows of logits answer the parts; what follows fills the call up.
    """

    tokens: Tensor
    positions: Tensor
    wanted: Tensor | int
    sees: Tensor
    query_positions: Tensor
    packing: Packing
    ends: dict[int, int]
    kept: int

    def mask(self) -> Tensor:
        """Return [S, 1, n, seen] bool; what the rows of a tree see of each other is left to be filled in."""
        slots = torch.arange(self.packing.seen, device=self.sees.device)
        return (slots <= self.sees[..., None])[:, None]


def pack(
    parts: Sequence[Part], kv: KVCache, rows: int, device: torch.device, sized: Callable[[int], int] = int
) -> PackedCall:
    """Return the call that reads `parts`, of a stream each, after what `kv` holds.

    Args:
        parts: of streams below `rows`.
        kv: of all streams.
        rows: of the buffers that attention reads.
        device: of the model.
        sized: returns to how many a number of tokens, of queries of a stream, or of wanted rows is filled up. The last token
            comes again then, into the same slot.
    """
    count, total = sized(max(len(part.tokens) for part in parts)), sum(len(part.tokens) for part in parts)
    line = np.zeros((5, sized(total)), dtype=np.int64)  # token, position, stream, slot, place in the rectangle
    rectangle = np.zeros((2, rows, count), dtype=np.int64)  # a query of no token sees the first slot
    wanted: list[int] = []
    ends, first = {}, 0
    for part in parts:
        start, tree, size = kv.lengths[part.stream], part.tree, len(part.tokens)
        end = first + size
        slot = np.arange(start, start + size)
        # Candidates of one depth share a position, each in a slot of its own.
        position = slot if tree is None else tree.base + tree.topology.depths[list(tree.rows)]
        if not isinstance(part.tokens, Tensor):
            line[0, first:end] = part.tokens
        line[1, first:end], line[2, first:end] = position, part.stream
        line[3, first:end], line[4, first:end] = slot, np.arange(size) + part.stream * count
        rectangle[0, part.stream, :size] = slot if tree is None else tree.base - 1
        rectangle[1, part.stream, :size] = position
        wanted.extend(range(end - (part.wanted or size), end))
        ends[part.stream], first = start + size, end
    line[:, total:], kept = line[:, total - 1 : total], len(wanted)
    if sized(kept) < line.shape[1]:  # as many as there are tokens would pass for all of them
        wanted += wanted[-1:] * (sized(kept) - kept)
    tokens, positions, stream, slot, place = upload(line, device)
    if own := [part.tokens for part in parts if isinstance(part.tokens, Tensor)]:  # all of them
        tokens = torch.cat([*own, own[-1][-1:].expand(line.shape[1] - total)])
    sees, query_positions = upload(rectangle, device)
    # Every stream has its row full and in its place: the line of tokens is the rectangle.
    filled = line.shape[1] == total == rows * count and [part.stream for part in parts] == list(range(rows))
    packing = Packing(stream, slot, None if filled else place, rows, count, max(ends.values()))
    logits = upload(wanted, device) if kept < total else 0
    return PackedCall(tokens[None], positions[None], logits, sees, query_positions, packing, ends, kept)


def split(parts: Sequence[Part]) -> Array:
    """Return where each part's wanted logits begin among all of them, and where they end: [parts + 1]."""
    return np.cumsum([0, *(part.wanted or len(part.tokens) for part in parts)])
