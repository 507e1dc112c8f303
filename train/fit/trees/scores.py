"""How well a tree policy knows the survival of nodes, by depth and rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....policies.learned import TreeGain
from ...heads.calibration import calibration_error
from ...heads.rows import Visits
from ...replay.traces.arrays import TraceArrays, seen_features
from .calibrate import path_chances
from .rows import accepted_nodes, askable_nodes, node_ranks

BINS = 10
LEAST = 20
"""Nodes of a depth and rank below which nothing is said about them."""


def tree_scores(policy: TreeGain, arrays: TraceArrays, visited: Visits) -> list[dict[str, Any]]:
    """Return by depth and rank: nodes, mean survival as said and as it was, and the calibration error in deciles."""
    if not len(visited.row):
        return []
    seen = seen_features(arrays, policy.features, visited.row, visited.history).numpy()
    said, _ = path_chances(policy.head, policy.accept, policy.next, arrays.tree, seen)
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
