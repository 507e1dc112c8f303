"""Packed calls: several streams read by one call of a model.

The tokens of all streams follow one another as if they were one text, so that everything but attention computes only as many
rows as there are tokens. Attention computes a rectangle of queries, one row per stream, on the buffers of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array
from ..topology import Topology
from .device import upload


@dataclass(slots=True)
class TreeRows:
    """Rows of a tree to read. Its rows `before` are in the slots from `base` on."""

    topology: Topology
    base: int
    before: Sequence[int]
    rows: Sequence[int]

    def relation(self) -> Array:
        """Return [n, m + n] bool: which of the rows `before` and `rows` each of `rows` sees."""
        out: Array = self.topology.sees.numpy()[np.ix_(self.rows, [*self.before, *self.rows])]
        return out

    def positions(self) -> Array:
        """Return [n] int64. Candidates of one depth share a position."""
        return self.base + self.topology.depths[list(self.rows)]


@dataclass(slots=True)
class Part:
    """What one stream reads next.

    Attributes:
        stream: Index of the stream.
        tokens: n token ids, a sequence or int64 on the model's device.
        wanted: Number of last tokens whose logits are returned; 0 = all.
        tree: Rows of the tokens; None = a chain.
    """

    stream: int
    tokens: Sequence[int] | Tensor
    wanted: int = 0
    tree: TreeRows | None = None


def split(parts: Sequence[Part]) -> Array:
    """Return [parts + 1]: the bounds of each part's rows of logits."""
    return np.cumsum([0, *(part.wanted or len(part.tokens) for part in parts)])


@dataclass(slots=True)
class PackedCall:
    """T tokens of several streams; attention reads S rows of `seen` slots.

    Attributes:
        line: [5, T] int64: token, position, stream, slot and index in the rectangle [S, n] of queries.
        base: [S] int64, slots of each stream that all its tokens see.
        relation: [S, n, W] bool, which slots from `base` on each query sees.
        wanted: [R] int64, tokens whose logits are returned; None = all.
        seen: Slots that attention reads.
        filled: Whether the tokens fill the rectangle in their order.
    """

    line: Tensor
    base: Tensor
    relation: Tensor
    wanted: Tensor | None
    seen: int
    filled: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The inputs."""
        return self.line, self.base, self.relation, *(() if self.wanted is None else (self.wanted,))

    @property
    def shape(self) -> tuple[object, ...]:
        """What calls have in common that share a recording."""
        return (*(tensor.shape for tensor in self.tensors), self.wanted is None, self.seen, self.filled)

    def copy(self) -> PackedCall:
        """Return a call with copies of the tensors."""
        wanted = None if self.wanted is None else self.wanted.clone()
        return replace(
            self, line=self.line.clone(), base=self.base.clone(), relation=self.relation.clone(), wanted=wanted
        )

    def mask(self) -> Tensor:
        """Return [S, 1, n, seen] bool."""
        own = torch.arange(self.seen, device=self.base.device) - self.base[:, None]  # [S, seen]
        width = self.relation.shape[-1]
        columns = own.clamp(0, width - 1)[:, None].expand(-1, self.relation.shape[1], -1)
        below = (own >= 0) & (own < width)
        return ((own < 0)[:, None] | (below[:, None] & self.relation.gather(-1, columns)))[:, None]

    def query_positions(self) -> Tensor:
        """Return [S, n]; 0 for places without a token."""
        size = self.relation.shape[:2]
        return self.line.new_zeros(size.numel()).index_copy_(0, self.line[4], self.line[1]).view(size)

    def write(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Write states [1, heads, T, width] into buffers and return the slots that attention reads."""
        line, rows = self.line.to(keys.device), len(self.base)
        # Indices with a slice between them put their own dimension first: [T, heads, width].
        keys[line[2], :, line[3]] = new_keys[0].transpose(0, 1)
        values[line[2], :, line[3]] = new_values[0].transpose(0, 1)
        return keys[:rows, :, : self.seen], values[:rows, :, : self.seen]

    def spread(self, queries: Tensor) -> Tensor:
        """Return queries [1, heads, T, width] as the rectangle [S, heads, n, width], 0 where there is no token."""
        rows, (streams, count, _) = queries[0].transpose(0, 1), self.relation.shape  # [T, heads, width]
        if not self.filled:
            place = self.line[4].to(rows.device)
            rows = rows.new_zeros(streams * count, *rows.shape[1:]).index_copy_(0, place, rows)
        return rows.reshape(streams, count, *rows.shape[1:]).transpose(1, 2)

    def gather(self, out: Tensor) -> Tensor:
        """Return [1, T, heads, width] from a rectangle [S, n, heads, width]."""
        rows = out.reshape(1, -1, *out.shape[2:])
        return rows if self.filled else rows.index_select(1, self.line[4].to(rows.device))


def pack(
    parts: Sequence[Part],
    lengths: Sequence[int],
    rows: int,
    device: torch.device,
    sized: Callable[[int], int] = int,
) -> PackedCall:
    """Return the call that reads `parts`, one per stream.

    Args:
        parts: Parts of streams below `rows`.
        lengths: Slots in use, by stream.
        rows: S.
        device: Device of the model.
        sized: Rounds T, n, W and R up. The last token is then repeated in the same slot, which changes nothing.
    """
    total, count = sum(len(part.tokens) for part in parts), sized(max(len(part.tokens) for part in parts))
    width = sized(max(len(part.tokens) + (len(part.tree.before) if part.tree else 0) for part in parts))
    line = np.zeros((5, sized(total)), dtype=np.int64)
    base, relation = np.zeros(rows, dtype=np.int64), np.zeros((rows, count, width), dtype=bool)
    wanted: list[int] = []
    end = 0
    for part in parts:
        first, size, start, tree = end, len(part.tokens), lengths[part.stream], part.tree
        end += size
        slots = np.arange(start, start + size)
        sees = np.tri(size, dtype=bool) if tree is None else tree.relation()
        if not isinstance(part.tokens, Tensor):
            line[0, first:end] = part.tokens
        line[1, first:end] = slots if tree is None else tree.positions()
        line[2, first:end], line[3, first:end] = part.stream, slots
        line[4, first:end] = np.arange(size) + part.stream * count
        base[part.stream] = start if tree is None else tree.base
        relation[part.stream, :size, : sees.shape[1]] = sees
        wanted += range(end - (part.wanted or size), end)
    line[:, total:] = line[:, total - 1 : total]
    every = len(wanted) == total
    if not every and sized(len(wanted)) < line.shape[1]:  # as many as there are tokens would pass for all of them
        wanted += wanted[-1:] * (sized(len(wanted)) - len(wanted))
    filled = line.shape[1] == total == rows * count and [part.stream for part in parts] == list(range(rows))
    seen = max(lengths[part.stream] + len(part.tokens) for part in parts)
    lines = upload(line, device)
    if own := [part.tokens for part in parts if isinstance(part.tokens, Tensor)]:  # then all are tensors
        lines[0] = torch.cat([*own, own[-1][-1:].expand(line.shape[1] - total)])
    chosen = None if every else upload(wanted, device)
    return PackedCall(lines, upload(base, device), upload(relation, device), chosen, seen, filled)
