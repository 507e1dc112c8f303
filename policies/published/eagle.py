"""EAGLE-2 and OPT-Tree: expand the best branches of each depth, verify the nodes with the likeliest paths."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ..arguments import validate_int, validate_number
from ..contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..kernels.compiled import argsort_desc, kernel, kernel_part
from ..tree_rules import append_level, node_values


@kernel_part
def _expected_length(values: Any, order: Any, count: Any) -> Any:
    """Return the sum of e^value over the `count` largest values [N]; `order` [N] is scratch."""
    argsort_desc(values, order)
    total = 0.0
    for i in range(min(count, values.shape[0])):
        total += np.exp(np.float64(values[order[i]]))
    return total


@kernel("void(f4[:,::1], b1[:,::1], i8, i8, f8, b1[:,::1])")
def keep_best(values: Any, alive: Any, count: int, nodes: int, delta: float, kept: Any) -> None:
    """Write which of the last N of the values [S, M] are the `count` largest of their stream, of equal ones the first.

    None are where these N raise the expected length of the best `nodes` by `delta` or less; it is not computed if that is
    -infinity.
    """
    order, before = np.empty(values.shape[1], dtype=np.int64), values.shape[1] - kept.shape[1]
    for s in range(values.shape[0]):
        rise = np.inf
        if delta > -np.inf:
            # Two sums: the best nodes of the tree without the last level need not be among those of the whole tree.
            rise = _expected_length(values[s], order, nodes) - _expected_length(values[s, :before], order, nodes)
        argsort_desc(values[s, before:], order)
        for i in range(kept.shape[1]):
            kept[s, order[i]] = i < count and rise > delta and alive[s, order[i]]


class Eagle(StopPolicy):
    """Expand the `top` best branches of each depth; of all drawn nodes verify the `nodes` with the likeliest paths.

    EAGLE-2 (arXiv 2406.16858, sec. 4; `ea_model`: top_k 10, depth 7 below the first level, total_tokens 60 with the root).
    It reads the drawn tokens and removes nodes, so it is for `match` verification, and for temperature 0.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("path_logprob",)
    _kind: ClassVar[str] = "eagle"
    delta: float = -math.inf  # by which a level must raise the expected length; see `OptTree`

    def __init__(self, nodes: int = 59, top: int = 10, max_depth: int = 8) -> None:
        counts = {"nodes": nodes, "top": top, "max_depth": max_depth}
        self.nodes, self.top, self.max_depth = (validate_int(self._kind, k, v) for k, v in counts.items())
        self.name = f"{self._kind}:{nodes}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the best branches, or nothing, and store the paths' probabilities."""
        levels, kept = append_level(state, step, step.features[:, :, 0]), np.empty_like(step.alive)
        values = levels[-1] if self.delta == -math.inf else np.concatenate(levels, 1)
        keep_best(values, step.alive, self.top, self.nodes, self.delta, kept)
        return kept, levels

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the likeliest nodes."""
        kept = np.empty_like(tree.drawn)
        keep_best(node_values(state, tree), tree.drawn, self.nodes, 0, -math.inf, kept)
        return kept

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Drop the round's levels."""
        return None


class OptTree(Eagle):
    """Draft another level while the last one raised the expected accepted length by more than `delta`.

    OPT-Tree (arXiv 2406.17276, eq. 5 and algorithm 1; README: 60 nodes, delta 0.5, depth 10): E(A) of a tree is the sum of
    the path probabilities of its best `nodes`. In a chain that is q_1(x_1) ... q_j(x_j) > delta.
    """

    _kind = "opt"

    def __init__(self, delta: float = 0.5, nodes: int = 60, top: int = 60, max_depth: int = 10) -> None:
        super().__init__(nodes, top, max_depth)
        self.delta = validate_number("opt", "delta", delta, 0.0)
        self.name = f"opt:{delta:g}"
