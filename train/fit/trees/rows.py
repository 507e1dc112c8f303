"""Training rows of the learned tree policy: the nodes whose path was accepted so far, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....collect.schema import NO_TOKEN
from ....decode.topology import Topology
from ....policies.contract import Array
from ....policies.errors import TraceError
from ....policies.heads.base import Head
from ...heads.rows import FitRows, Visits
from ...replay.traces.arrays import TraceArrays, seen_features


@dataclass(frozen=True)
class TreeRows:
    """M rows (anchor, node); the node of depth 0 is the anchor itself.

    Attributes:
        rows: what heads are fitted on; `followed` is whether the best child was accepted.
        rank: [M] of the node among its siblings.
        group: [M] the number of the prompt.
    """

    rows: FitRows
    rank: Tensor
    group: Tensor


def node_ranks(tree: Topology) -> list[int]:
    """Return by row of the topology its rank among its siblings; 0 for roots."""
    ranks = [0] * len(tree)
    for below in tree.children:
        for rank, row in enumerate(below):
            ranks[row] = rank
    return ranks


def level_scores(head: Head, seen: Array, level: Sequence[int], depth: int) -> Array:
    """Return [R, B, 2] float64, a head's scores of the B nodes `level` of a depth, from what is seen [R, N + 1, F]."""
    rows = np.ascontiguousarray(seen[:, level])
    return head.scores(rows.reshape(len(seen) * len(level), rows.shape[-1]), depth).reshape(len(seen), len(level), 2)


def accepted_nodes(arrays: TraceArrays, row: Tensor) -> Tensor:
    """Return [R, N + 1] bool, the anchors and the nodes that the target accepts, at these rows."""
    return torch.cat([torch.ones(len(row), 1, dtype=torch.bool), arrays.accepted_nodes(row)], 1)


def askable_nodes(arrays: TraceArrays, row: Tensor) -> Tensor:
    """Return [R, N + 1] bool, the nodes that a policy can be asked about: without a gap or an end of text on the path."""
    there = torch.ones(len(row), len(arrays.tree), dtype=torch.bool)
    there[:, 1:] = ~arrays.ends[row] & (arrays.tokens[row] != NO_TOKEN)
    for node, parent in enumerate(arrays.tree.parent[1:], 1):  # parents come before their children
        there[:, node] &= there[:, parent]
    return there


def tree_rows(arrays: TraceArrays, features: Sequence[str], visited: Visits) -> TreeRows:
    """Return the training rows of the rounds visited: the anchor, and the children of every accepted node.

    Raises:
        TraceError: no round was visited.
    """
    if not len(visited.row):
        raise TraceError("--traces: no row has a label; collect more prompts or longer texts")
    tree = arrays.tree
    seen = seen_features(arrays, features, visited.row, visited.history)
    accepted = accepted_nodes(arrays, visited.row)
    parents = torch.tensor([max(parent, 0) for parent in tree.parent])
    # `accept` is conditional on the path so far: only children of accepted nodes are on its distribution.
    use = accepted[:, parents] & askable_nodes(arrays, visited.row)
    children, width = accepted_children(tree, accepted)
    depth, rank = (torch.tensor(v).expand(len(seen), -1) for v in (tree.depth, node_ranks(tree)))
    group = arrays.owner[visited.row]
    fitted = FitRows(seen[use], depth[use], accepted[use], children[..., 0][use], (accepted & (width > 0))[use])
    return TreeRows(fitted, rank[use], group[:, None].expand_as(use)[use])


def accepted_children(tree: Topology, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Return [R, N + 1, W] bool, which child of a node is accepted, by rank, and [N + 1], how many children a node has.

    Args:
        tree: of N nodes, none of which has more than W children.
        accepted: [R, N + 1] bool, see `accepted_nodes`.
    """
    most = max(len(below) for below in tree.children)
    # Padding points at the root, which counts as accepted: `there` takes it out again.
    below = torch.zeros(len(tree), most, dtype=torch.int64)
    there = torch.zeros(len(tree), most, dtype=torch.bool)
    for row, rows in enumerate(tree.children):
        below[row, : len(rows)] = torch.tensor(rows, dtype=torch.int64)
        there[row, : len(rows)] = True
    return accepted[:, below] & there, there.sum(1)


def rank_acceptance(rows: TreeRows) -> tuple[float, ...]:
    """Return a_1..a_K, the chance by depth that the best child of an accepted node is accepted."""
    known, deepest = rows.rows.followed_known, int(rows.rows.depth.max())
    out: list[float] = []
    for depth in range(deepest):
        use = known & (rows.rows.depth == depth)
        total = int(use.sum())
        out.append(float(rows.rows.followed[use].double().mean()) if total else (out[-1] if out else 0.0))
    return tuple(out)
