"""Published rules for trees: which nodes to expand, how deep to go, and which nodes to verify, by path probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .baselines_scores import check_number, check_whole, float32
from .contract import DraftStep, DraftTree, RoundOutcome, State, StopPolicy

UNSEEN = 0.5
"""What a node at which no policy was asked, as those at the last depth, counts in shares of the one above; half as much for
each better sibling."""


def with_level(levels: Sequence[Tensor], step: DraftStep, values: Tensor) -> tuple[Tensor, ...]:
    """Return the values [S, B] of the depths 1..j, given those of the depths above; -infinity = not asked."""
    return (*levels[: step.depth - 1], torch.where(step.alive, values, -torch.inf))


def ranks(values: Tensor) -> Tensor:
    """Return [S, N], the rank of each value in its row, 0 for the largest; of equal ones the first comes first."""
    order = torch.argsort(values, dim=1, descending=True, stable=True)
    places = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def node_values(levels: Sequence[Tensor], tree: DraftTree) -> Tensor:
    """Return [S, N], each node's log of the path probability; those of nodes never asked about are guessed (`UNSEEN`).

    No node's value is above its parent's, and parents come first, so that the best n nodes are closed under parents.
    """
    depth, parent = tree.depth[0], tree.parent[0]
    values = torch.zeros(tree.tokens.shape, dtype=torch.float32, device=tree.tokens.device)
    for d in range(1, int(depth.max()) + 1):
        nodes = (depth == d).nonzero()[:, 0]
        above = parent[nodes]
        better = (above[:, None] == above[None]).tril(-1).sum(1)
        inherited = torch.where(above >= 0, values[:, above.clamp_min(0)], 0.0)
        guess = inherited + math.log(UNSEEN) * (1 + better)
        known = levels[d - 1] if d <= len(levels) else torch.full_like(guess, -torch.inf)
        values[:, nodes] = torch.where(known.isfinite(), torch.minimum(known, inherited), guess)
    return values


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

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the beam, or nothing."""
        path = torch.where(step.alive, step.features[..., 0], -torch.inf)
        beam = step.alive & (ranks(path) < self.width)
        if step.depth < self.begin or (step.depth - self.begin) % self.every:
            return beam, state
        mass = torch.where(beam, path, -torch.inf).logsumexp(1, keepdim=True)
        return beam & (mass >= self._least), state

    def keep_one(self, depth: int, features: Sequence[float], state: State) -> tuple[bool, State]:
        """Decide for one row, a beam of one; see `StopPolicy.keep_one`."""
        asked = depth >= self.begin and not (depth - self.begin) % self.every
        return not asked or features[0] >= self._least, state


class Eagle(StopPolicy):
    """Expand the best branches of each depth; of all that was drawn verify the nodes with the likeliest paths.

    EAGLE-2 (arXiv 2406.16858, sec. 4; `ea_model`: top_k 10, depth 7 below the first level, total_tokens 60 with the root).
    Reads the drawn tokens and leaves some out, so it is for `match` verification, and for temperature 0.

    Args:
        nodes: sent to the target at most.
        top: branches of a depth that are expanded.
        max_depth: levels.
    """

    features = ("path_logprob",)
    _called: ClassVar[str] = "eagle"

    def __init__(self, nodes: int = 59, top: int = 10, max_depth: int = 8) -> None:
        self.nodes, self.top, self.max_depth = (
            check_whole(self._called, name, value)
            for name, value in (("nodes", nodes), ("top", top), ("max_depth", max_depth))
        )
        self.name = f"eagle:{nodes}"

    def start(self, streams: int, key: Tensor) -> State:
        """Return no levels."""
        return ()

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the best branches, and remember the paths' probabilities."""
        levels = with_level(state, step, step.features[..., 0])
        return step.alive & (ranks(levels[-1]) < self.top), levels

    def select(self, tree: DraftTree, state: State) -> Tensor:
        """Return the likeliest nodes."""
        return tree.drawn & (ranks(torch.where(tree.drawn, node_values(state, tree), -torch.inf)) < self.nodes)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Forget the round's levels."""
        return ()


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

    def _expected(self, levels: Sequence[Tensor]) -> Tensor:
        """Return [S, 1], E(A) of the best nodes of these levels."""
        chances = torch.cat([level.exp() for level in levels], 1)
        return chances.topk(min(self.nodes, chances.shape[1]), 1).values.sum(1, keepdim=True)

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the best branches, or nothing, and remember the paths' probabilities."""
        kept, levels = super().keep(step, state)
        rise = self._expected(levels)
        if len(levels) > 1:
            rise = rise - self._expected(levels[:-1])
        return kept & (rise > self.delta), levels


class C2T(StopPolicy):
    """Prune each node by a confidence in its joint probability P, entropy H and depth d: expand it or drop it.

    C2T (arXiv 2502.13652, sec. 3: a two-layer network on these three, trained on whether nodes are accepted). Until one is
    trained, a single unit set by hand: sigmoid(log P - `entropy` H - `slope` d + `bias`) >= 1/2. Dropped nodes are
    not verified, so it is for `match` verification, and for temperature 0.
    """

    features = ("path_logprob", "entropy", "depth")
    trims: ClassVar[bool] = True

    def __init__(self, bias: float = 2.0, entropy: float = 0.3, slope: float = 0.0, max_depth: int = 20) -> None:
        self.bias, self.entropy, self.slope = (
            check_number("c2t", name, value, -100.0)
            for name, value in (("bias", bias), ("entropy", entropy), ("slope", slope))
        )
        self.max_depth = check_whole("c2t", "max_depth", max_depth)
        self.name = f"c2t:{bias:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the nodes that the unit is sure of."""
        path, entropy, depth = step.features.double().unbind(-1)
        return step.alive & (path - self.entropy * entropy - self.slope * depth + self.bias >= 0.0), state

    def keep_one(self, depth: int, features: Sequence[float], state: State) -> tuple[bool, State]:
        """Decide for one row; see `StopPolicy.keep_one`."""
        return features[0] - self.entropy * features[1] - self.slope * features[2] + self.bias >= 0.0, state
