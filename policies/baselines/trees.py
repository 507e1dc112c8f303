"""Published rules for trees: which nodes to expand, how deep to go, and which nodes to verify, by path probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ..builtins import builtin
from ..contract import DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..kernels import on_first_use
from ..typing import Array
from .scores import check_number, check_whole, float32

UNSEEN = 0.5
"""What a node at which no policy was asked, as those at the last depth, counts in shares of its parent; half as much for
each better sibling."""

NEVER = np.float32(-np.inf)


kernels = on_first_use("baselines.paths")


def with_level(levels: Sequence[Array], step: DraftStep, values: Array) -> tuple[Array, ...]:
    """Return the values [S, B] float32 of the depths 1..j, given those of the depths before; -infinity = not asked."""
    return (*levels[: step.depth - 1], np.where(step.alive, values, NEVER))


def best(values: Array, alive: Array, count: int) -> Array:
    """Return [S, N] bool, the `count` largest of [S, N] float32 values of each stream, the first ones of equals."""
    kept = np.empty_like(alive)
    kernels().keep_best(values, alive, count, kept)
    return kept


def node_values(levels: Sequence[Array], tree: DraftTree) -> Array:
    """Return [S, N] float32, each node's log of the path probability; of nodes never asked about it is guessed (`UNSEEN`).

    -infinity where no node was drawn. No value is above the parent's, and parents come first, so that the best n nodes are
    closed under parents.
    """
    # [S, M]: a level has a column for each node of its depth, drawn or not, so they line up with the first M nodes.
    known = np.concatenate(levels, 1) if levels else np.empty((len(tree.drawn), 0), dtype=np.float32)
    out = np.empty(tree.drawn.shape, dtype=np.float32)
    parent, siblings = tree.parent[0], np.empty(tree.drawn.shape[1], dtype=np.int64)  # one topology for all streams
    kernels().sibling_ranks(parent, siblings)
    kernels().value_nodes(known, parent, siblings, tree.drawn, math.log(UNSEEN), out)
    return out


@builtin("ddd", "threshold", "ddd:-0.5 stops below that log-probability of the beam")
class DDD(StopPolicy):
    """Draft on while the beam as a whole is likely enough: log sum_i exp(log q of path i) >= a threshold.

    Dynamic Depth Decoding (arXiv 2409.00142, eq. 2) on EAGLE-2's beam: the `width` best branches of a depth, 10; asked at
    a few depths only, as each question costs a synchronisation; at most 11 steps. The paper's depths and threshold were not
    found: these, every second depth from the third on, and exp(-0.5) of the mass, are ours.
    """

    features = ("path_logprob",)

    def __init__(
        self, threshold: float = -0.5, begin: int = 3, every: int = 2, width: int = 10, max_depth: int = 11
    ) -> None:
        self.threshold = check_number("ddd", "threshold", threshold, -100.0, 0.0)
        self._least = float32(self.threshold)
        self.begin, self.every, self.width, self.max_depth = (
            check_whole("ddd", name, value)
            for name, value in (("begin", begin), ("every", every), ("width", width), ("max_depth", max_depth))
        )
        self.name = f"ddd:{threshold:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the beam, or nothing."""
        asked = step.depth >= self.begin and not (step.depth - self.begin) % self.every
        # At the other depths the beam is kept, whatever its mass.
        path, kept = np.where(step.alive, step.features[:, :, 0], NEVER), np.empty_like(step.alive)
        kernels().keep_beam(path, step.alive, self.width, self._least if asked else -math.inf, kept)
        return kept, state


@builtin("eagle", "nodes", "eagle:59 verifies the likeliest nodes of a tree (EAGLE-2)")
class Eagle(StopPolicy):
    """Expand the best branches of each depth; of all that was drawn verify the nodes with the likeliest paths.

    EAGLE-2 (arXiv 2406.16858, sec. 4; `ea_model`: top_k 10, depth 7 below the first level, total_tokens 60 with the root).
    Reads the drawn tokens and leaves some out, so it is for `match` verification, and for temperature 0.

    Args:
        nodes: sent to the target at most.
        top: branches of a depth that are expanded.
        max_depth: levels.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("path_logprob",)
    _called: ClassVar[str] = "eagle"

    def __init__(self, nodes: int = 59, top: int = 10, max_depth: int = 8) -> None:
        self.nodes, self.top, self.max_depth = (
            check_whole(self._called, name, value)
            for name, value in (("nodes", nodes), ("top", top), ("max_depth", max_depth))
        )
        self.name = f"eagle:{nodes}"

    def start(self, streams: int, keys: Array) -> State:
        """Return no levels."""
        return ()

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the best branches, and remember the paths' probabilities."""
        levels = with_level(state, step, step.features[:, :, 0])
        return best(levels[-1], step.alive, self.top), levels

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the likeliest nodes."""
        return best(node_values(state, tree), tree.drawn, self.nodes)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Forget the round's levels."""
        return ()


@builtin("opt", "delta", "opt:0.5 goes deeper while that much is expected of it (OPT-Tree)")
class OptTree(Eagle):
    """Draft another level while the last one raised the expected accepted length by more than `delta`.

    OPT-Tree (arXiv 2406.17276, eq. 5 and algorithm 1; README: 60 nodes, delta 0.5, depth 10): E(A) of a tree is the sum of
    its nodes' path probabilities, that of the best `nodes` so far. In a chain that is q_1(x_1) ... q_j(x_j) > delta.
    """

    _called = "opt"

    def __init__(self, delta: float = 0.5, nodes: int = 60, top: int = 60, max_depth: int = 10) -> None:
        super().__init__(nodes, top, max_depth)
        self.delta = check_number("opt", "delta", delta, 0.0)
        self.name = f"opt:{delta:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the best branches, or nothing, and remember the paths' probabilities."""
        levels, kept = with_level(state, step, step.features[:, :, 0]), np.empty_like(step.alive)
        known = np.concatenate(levels, 1)
        before = known.shape[1] - kept.shape[1]  # columns of the levels before
        kernels().keep_rising(known, before, step.alive, self.nodes, self.top, self.delta, kept)
        return kept, levels


@builtin("c2t", "bias", "c2t:2 prunes nodes by path probability, entropy and depth")
class C2T(StopPolicy):
    """Prune each node by a confidence in its joint probability P, entropy H and depth d: expand it or drop it.

    C2T (arXiv 2502.13652, sec. 3: a two-layer network on these three, trained on whether nodes are accepted). Until one is
    trained, a single unit set by hand: sigmoid(log P - `entropy` H - `slope` d + `bias`) >= 1/2. Dropped nodes are
    not verified, so it is for `match` verification, and for temperature 0.
    """

    features = ("path_logprob", "entropy")
    trims: ClassVar[bool] = True

    def __init__(self, bias: float = 2.0, entropy: float = 0.3, slope: float = 0.0, max_depth: int = 20) -> None:
        self.bias, self.entropy, self.slope = (
            check_number("c2t", name, value, -100.0)
            for name, value in (("bias", bias), ("entropy", entropy), ("slope", slope))
        )
        self.max_depth = check_whole("c2t", "max_depth", max_depth)
        self.name = f"c2t:{bias:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the nodes that the unit is sure of."""
        # sigmoid(x) >= 1/2 iff x >= 0, so the sigmoid itself is never taken.
        features = step.features.astype(np.float64)
        sure = features[:, :, 0] - self.entropy * features[:, :, 1] >= self.slope * step.depth - self.bias
        return step.alive & sure, state
