"""How well a tree policy knows the survival of nodes, by depth and rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.tree_gain import TreeGain
from ..heads.rows import Visits
from ..traces.data import TraceArrays, seen_features
from .tree_rows import accepted_nodes, askable_nodes, node_ranks

BINS = 10
LEAST = 20
"""Nodes of a depth and rank below which nothing is said about them."""


def path_chances(policy: TreeGain, arrays: TraceArrays, visited: Visits) -> Tensor:
    """Return [R, N + 1] float64, the survival of every node of the rounds visited, if the policy were asked everywhere."""
    tree = arrays.tree
    seen = seen_features(arrays, policy.features, visited.row, visited.history)
    out = torch.ones(len(seen), len(tree), dtype=torch.float64)
    ranks = np.array(node_ranks(tree))
    for depth, level in enumerate(tree.levels[1:], 1):
        logits = policy.head.logits(seen[:, level], depth)[..., 0].double().numpy()
        above = out[:, [tree.parent[row] for row in level]].numpy()
        out[:, level] = torch.from_numpy(policy.accept.of(above, logits, depth, ranks[level]))
    return out


def tree_scores(policy: TreeGain, arrays: TraceArrays, visited: Visits) -> list[dict[str, Any]]:
    """Return by depth and rank: nodes, mean survival as said and as it was, and the calibration error in deciles."""
    if not len(visited.row):
        return []
    said, accepted, there = (
        path_chances(policy, arrays, visited),
        accepted_nodes(arrays, visited.row),
        askable_nodes(arrays, visited.row),
    )
    ranks, depth = torch.tensor(node_ranks(arrays.tree)), torch.tensor(arrays.tree.depth)
    rows = []
    for d in range(1, arrays.depth + 1):
        for rank in range(int(ranks.max()) + 1):
            nodes = (depth == d) & (ranks == rank)
            use = there & nodes
            if int(use.sum()) < LEAST:
                continue
            s, truth = said[use], accepted[use].double()
            rows.append(
                {
                    "depth": d,
                    "rank": rank,
                    "nodes": len(s),
                    "said": float(s.mean()),
                    "was": float(truth.mean()),
                    "ece": _ece(s, truth),
                }
            )
    return rows


def _ece(said: Tensor, truth: Tensor) -> float:
    """Return the expected calibration error over bins of equal mass."""
    order = said.argsort()
    bins = [part for part in order.tensor_split(BINS) if len(part)]
    return float(sum(len(b) * (said[b].mean() - truth[b].mean()).abs() for b in bins) / len(said))
