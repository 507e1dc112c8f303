"""The tree to collect with, wide enough to hold those that a policy or a profile may want."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

RATES = (0.62, 0.15, 0.07, 0.042, 0.028, 0.02)
"""How often the candidates of each rank are accepted on pairs that are neither very near nor far: a start, no more."""


def likely_tree(nodes: int, depth: int, rates: Sequence[float] = RATES) -> str:
    """Return, as `parse_tree` reads it, the tree of the likeliest nodes if every child is accepted as its rank is on average.

    It is what to collect with: wide enough to hold the trees that a policy or a profile may want (`on_subtree`).

    Args:
        nodes: of it, besides a chain of best children down to `depth`.
        depth: K.
        rates: chance of the child of each rank.
    """
    front: list[tuple[float, tuple[int, ...]]] = [(-rate, (rank,)) for rank, rate in enumerate(rates)]
    chosen = {(0,) * d for d in range(1, depth + 1)}
    while front and len(chosen) < nodes:
        chance, path = heapq.heappop(front)
        chosen.add(path)
        if len(path) < depth:
            for rank, rate in enumerate(rates):
                heapq.heappush(front, (chance * rate, (*path, rank)))
    ordered = sorted(chosen, key=lambda path: (len(path), path))
    at = {path: node for node, path in enumerate(ordered)}
    return "parents:" + ",".join(str(at.get(path[:-1], -1)) for path in ordered)
