"""What a round has drafted so far: the drawn part of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..policies.contract import DraftTree
from ..policies.typing import Array
from .topology import Topology


@dataclass
class Candidates:
    """Drawn rows, the roots first. Lists go by place: the order of drawing, which is one of depth.

    Attributes:
        topology: that they are part of.
        rows: the topology's row at each place.
        tokens, depth: at each place.
        parent: the place that it was drawn after; -1 for roots.
        children: the places below, in drawing order.
        drawn_from: by place, the distribution (or scores) that its children were drawn from, [V].
        accepted: the path that the target has accepted, from a root on; none before.
    """

    topology: Topology
    rows: list[int]
    tokens: list[int]
    depth: list[int]
    parent: list[int]
    children: list[list[int]]
    drawn_from: dict[int, Tensor] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)

    @staticmethod
    def at(roots: list[int], topology: Topology) -> Candidates:
        """Return the state before any draft: the roots alone."""
        n = len(roots)
        return Candidates(topology, list(range(n)), list(roots), [0] * n, [-1] * n, [[] for _ in roots])

    def add(self, parent: int, row: int, token: int) -> int:
        """Append a drawn token below place `parent` and return its place."""
        place = len(self.tokens)
        self.rows.append(row)
        self.tokens.append(token)
        self.depth.append(self.depth[parent] + 1)
        self.parent.append(parent)
        self.children.append([])
        self.children[parent].append(place)
        return place

    @property
    def roots(self) -> int:
        """Number of roots; an unused one counts as well."""
        return self.depth.count(0)

    @property
    def drafted(self) -> int:
        """Tokens drawn from the draft."""
        return len(self.tokens) - self.roots

    def fed(self) -> list[int]:
        """Return by depth of the topology how many places the draft read to draw below them."""
        # One number at least: profiles price the first draft step by itself, also of a tree that is its roots alone.
        count = [0] * max(self.topology.deepest, 1)
        for depth, below in zip(self.depth, self.children, strict=True):
            if below:
                count[depth] += 1
        return count

    def path(self, place: int) -> list[int]:
        """Return the places from a root down to `place`."""
        out = [place]
        while self.parent[out[-1]] >= 0:
            out.append(self.parent[out[-1]])
        return out[::-1]

    def tokens_to(self, place: int) -> list[int]:
        """Return the tokens from a root down to `place`."""
        return [self.tokens[node] for node in self.path(place)]


def draft_tree(found: Sequence[Candidates | None], sent: Array, hide_tokens: bool = False) -> DraftTree:
    """Return the nodes of S streams as a policy sees them, [S, N], in the order of the topology; those `sent` are `drawn`.

    Args:
        found: S, of one topology; None for a stream without a round.
        sent: [S, rows] bool of the topology.
        hide_tokens: show -1 in the place of every token.
    """
    topology = next(own.topology for own in found if own is not None)
    first, streams = topology.roots, len(found)
    drawn = sent[:, first:]
    tokens = np.full((streams, len(topology)), -1, dtype=np.int64)  # [S, rows], roots included
    for stream, own in enumerate(found):
        if own is not None and not hide_tokens:
            tokens[stream, own.rows] = own.tokens
    return shown_tree(topology, tokens[:, first:], drawn)


def shown_tree(topology: Topology, tokens: Array, drawn: Array) -> DraftTree:
    """Return nodes [S, N] as a policy sees them: -1 in the place of tokens that are not `drawn`."""
    # Copies, not views or slices: compiled policies take contiguous [S, N] arrays.
    parent, depth = (values[None].repeat(len(drawn), 0) for values in (topology.node_parents, topology.node_depths))
    return DraftTree(np.where(drawn, tokens, -1), parent, depth, drawn.copy())
