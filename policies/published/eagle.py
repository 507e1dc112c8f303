"""EAGLE-2 and OPT-Tree: expand the best branches of each depth, verify the nodes with the likeliest paths."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from .. import (
    Array,
    DraftStep,
    DraftTree,
    RoundOutcome,
    State,
    StopPolicy,
    append_level,
    argsort_desc,
    kernel,
    kernel_part,
    node_values,
    validate_int,
    validate_number,
)


@kernel("void(float32[:,::1], boolean[:,::1], int64, boolean[:,::1])")
def keep_best(values: Any, alive: Any, count: int, kept: Any) -> None:
    """Mark the `count` largest values [S, N] of each stream, of equal ones the first; `kept` is all False."""
    order = np.empty(values.shape[1], dtype=np.int64)
    for s in range(values.shape[0]):
        argsort_desc(values[s], order)
        for i in range(min(count, order.shape[0])):
            kept[s, order[i]] = alive[s, order[i]]


@kernel_part
def _expected_length(values: Any, order: Any, count: Any) -> Any:
    """Return the sum of e^value over the `count` largest values."""
    argsort_desc(values, order)
    total = 0.0
    for i in range(min(count, order.shape[0])):
        total += np.exp(np.float64(values[order[i]]))
    return total


@kernel("void(float32[:,::1], int64, boolean[:,::1], int64, int64, float64, boolean[:,::1])")
def keep_rising(levels: Any, before: int, alive: Any, nodes: int, top: int, least: float, kept: Any) -> None:
    """Mark the `top` best branches of the last level if it raised the expected accepted length by more than `least`.

    Args:
        levels: [S, M] values of all levels; `before` columns are of those before the last.
        alive, kept: [S, B] of the last level; `kept` is all False.
        nodes: number of best nodes whose sum of e^value is the expected accepted length.
        top, least: see above.
    """
    order = np.empty(levels.shape[1], dtype=np.int64)
    for s in range(levels.shape[0]):
        # Both sums anew: the best nodes of the tree so far need not be among those of the tree with another level.
        last, ranks = levels[s, before:], order[: levels.shape[1] - before]
        rise = _expected_length(levels[s], order, nodes) - _expected_length(levels[s, :before], order[:before], nodes)
        if rise > least:
            argsort_desc(last, ranks)
            for i in range(min(top, ranks.shape[0])):
                kept[s, ranks[i]] = alive[s, ranks[i]]


class Eagle(StopPolicy):
    """Expand the best branches of each depth; of all drawn nodes verify those with the likeliest paths.

    EAGLE-2 (arXiv 2406.16858, sec. 4; `ea_model`: top_k 10, depth 7 below the first level, total_tokens 60 with the root).
    It reads the drawn tokens and leaves some out, so it is for `match` verification, and for temperature 0.

    Args:
        nodes: sent to the target at most.
        top: branches of a depth that are expanded.
        max_depth: levels.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("path_logprob",)
    _name: ClassVar[str] = "eagle"

    def __init__(self, nodes: int = 59, top: int = 10, max_depth: int = 8) -> None:
        self.nodes, self.top = validate_int(self._name, "nodes", nodes), validate_int(self._name, "top", top)
        self.max_depth = validate_int(self._name, "max_depth", max_depth)
        self.name = f"eagle:{nodes}"

    def start(self, streams: int, keys: Array) -> State:
        """Return no levels."""
        return ()

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the best branches, and store the paths' probabilities."""
        levels, kept = append_level(state, step, step.features[:, :, 0]), np.zeros_like(step.alive)
        keep_best(levels[-1], step.alive, self.top, kept)
        return kept, levels

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the likeliest nodes."""
        kept = np.zeros_like(tree.drawn)
        keep_best(node_values(state, tree), tree.drawn, self.nodes, kept)
        return kept

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Drop the round's levels."""
        return ()


class OptTree(Eagle):
    """Draft another level while the last one raised the expected accepted length by more than `delta`.

    OPT-Tree (arXiv 2406.17276, eq. 5 and algorithm 1; README: 60 nodes, delta 0.5, depth 10): E(A) of a tree is the sum of
    its nodes' path probabilities, that of the best `nodes` so far. In a chain that is q_1(x_1) ... q_j(x_j) > delta.
    """

    _name = "opt"

    def __init__(self, delta: float = 0.5, nodes: int = 60, top: int = 60, max_depth: int = 10) -> None:
        super().__init__(nodes, top, max_depth)
        self.delta = validate_number("opt", "delta", delta, 0.0)
        self.name = f"opt:{delta:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the best branches, or nothing, and store the paths' probabilities."""
        levels, kept = append_level(state, step, step.features[:, :, 0]), np.zeros_like(step.alive)
        known = np.concatenate(levels, 1)
        before = known.shape[1] - kept.shape[1]
        keep_rising(known, before, step.alive, self.nodes, self.top, self.delta, kept)
        return kept, levels
