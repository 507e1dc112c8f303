"""How well a tree policy knows the survival of nodes, by depth and rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....policies.heads.base import Array
from ....policies.learned.trees import TreeGain
from ...heads.calibration.scores import calibration_error
from ...heads.rows import Visits
from ...replay.traces.arrays import TraceArrays, seen_features
from .rows import accepted_nodes, askable_nodes, level_scores, node_ranks

BINS = 10
LEAST = 20
"""Nodes of a depth and rank below which nothing is said about them."""


def path_chances(policy: TreeGain, arrays: TraceArrays, visited: Visits) -> Array:
    """Return [R, N + 1] float64, the survival of every node of the rounds visited, if the policy were asked everywhere."""
    tree = arrays.tree
    seen = seen_features(arrays, policy.features, visited.row, visited.history).numpy()
    out = np.ones((len(seen), len(tree)))
    ranks = np.array(node_ranks(tree))
    for depth, level in enumerate(tree.levels[1:], 1):
        above = out[:, [tree.parent[row] for row in level]]  # of the root 1
        out[:, level] = policy.accept.of(
            above, level_scores(policy.head, seen, level, depth)[..., 0], depth, ranks[level]
        )
    return out


def tree_scores(policy: TreeGain, arrays: TraceArrays, visited: Visits) -> list[dict[str, Any]]:
    """Return by depth and rank: nodes, mean survival as said and as it was, and the calibration error in deciles."""
    if not len(visited.row):
        return []
    said = path_chances(policy, arrays, visited)
    accepted, there = (of(arrays, visited.row).numpy() for of in (accepted_nodes, askable_nodes))
    ranks, depth = np.array(node_ranks(arrays.tree)), np.array(arrays.tree.depth)
    rows = []
    for d in range(1, arrays.depth + 1):
        for rank in range(int(ranks.max()) + 1):
            use = there & ((depth == d) & (ranks == rank))
            if use.sum() < LEAST:
                continue
            s, truth = said[use], accepted[use]
            rows.append(
                {
                    "depth": d,
                    "rank": rank,
                    "nodes": len(s),
                    "said": float(s.mean()),
                    "was": float(truth.mean()),
                    "ece": calibration_error(s, truth, BINS),
                }
            )
    return rows
