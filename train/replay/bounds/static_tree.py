"""The best static tree inside a recorded one, drafted as a tree of its own: what no policy that reads nothing can beat.

Sequoia's dynamic programme (arXiv 2402.12374): of all sub-trees of n nodes and depth d, the one whose nodes are accepted most
often; then over n and d the one that gives most tokens in the time of a profile. The nearest ones are replayed, and the
fastest is the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ....decode.topology import Topology
from ....policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from ....policies.errors import InputError
from ....policies.fixed import FixedLength
from ....policies.profile import Profile
from ..run import Replayed, replay
from ..traces.arrays import TraceArrays, typical_context
from ..traces.subtrees import on_subtree, subtree

SHORTLIST = 12
_LARGEST = 96

_TIE = 1e-9
"""By which a node is ahead of the next one where both are accepted as often."""


class StaticTree(StopPolicy):
    """Drafts and verifies the same sub-tree each round.

    Args:
        tree: that rounds may draft.
        nodes: of it, closed under parents; numbered from 0 without the root.
    """

    def __init__(self, tree: Topology, nodes: Sequence[int]) -> None:
        self.tree, self.nodes = tree, tuple(sorted(nodes))
        chosen = set(self.nodes)
        self._chosen = np.array([node in chosen for node in range(tree.nodes)], dtype=bool)
        extends = [any(child - 1 in chosen for child in below) for below in tree.children]
        self._extends = [np.array([extends[row] for row in level]) for level in tree.levels]
        self.max_depth = max((tree.depth[node + 1] for node in self.nodes), default=0)
        self.first = min(1, self.max_depth)
        self.name = f"static:{self.shape.name}"

    @property
    def shape(self) -> Topology:
        """The sub-tree as a topology of its own."""
        return subtree(self.tree, self.nodes)

    @property
    def drawn(self) -> Topology:
        """The sub-tree that is drawn where it is part of the recorded one: siblings too, of the first depth at least."""
        extended = sorted({0, *(self.tree.parent[node + 1] for node in self.nodes)})
        return subtree(self.tree, [child - 1 for row in extended for child in self.tree.children[row]])

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that have chosen nodes below them."""
        return step.alive & self._extends[step.depth], state

    def select(self, tree: DraftTree, state: State) -> Array:
        """Verify the chosen nodes."""
        out: Array = tree.drawn & self._chosen[: tree.drawn.shape[1]]
        return out


def node_acceptance(arrays: TraceArrays) -> Tensor:
    """Return [N] float64, the share of uncut anchors at which each node is accepted."""
    return arrays.accepted_nodes()[~arrays.cut].double().mean(0)


def best_subtrees(tree: Topology, acceptance: Sequence[float], depth: int) -> list[tuple[float, list[int]]]:
    """Return for n = 0, 1, ... the sub-tree of n nodes, none deeper than `depth`, that is accepted most: (sum, nodes).

    Args:
        tree: to choose from.
        acceptance: [N] chance of each node to be accepted.
        depth: limit.
    """
    best: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
    rows = [row for row in range(len(tree)) if tree.depth[row] <= depth]
    below = {row: [child for child in tree.children[row] if tree.depth[child] <= depth] for row in rows}
    # Children before their parents. For each row: by number of descendants, the largest sum; each child is one more item of
    # a knapsack, merged in turn.
    for row in reversed(rows):
        total, splits = np.zeros(1), []
        for child in below[row]:
            options = np.concatenate([[0.0], best[child][0]])  # 0 nodes, or 1, 2, ... with the child itself
            both = total[:, None] + options[None]  # [nodes so far, nodes of this child]
            size = min(both.shape[0] + both.shape[1] - 1, _LARGEST + 1)
            merged, taken = np.full(size, -np.inf), np.zeros(size, dtype=np.int64)
            for count in range(min(both.shape[1], size)):
                end = min(size, count + both.shape[0])
                better = both[: end - count, count] > merged[count:end]
                merged[count:end] = np.where(better, both[: end - count, count], merged[count:end])
                taken[count:end] = np.where(better, count, taken[count:end])
            total = merged
            splits.append(taken)
        own = acceptance[row - 1] if row else 0.0
        best[row] = (total + own, splits)

    def nodes(row: int, count: int) -> list[int]:
        """The chosen descendants of `row`, `count` of them."""
        out: list[int] = []
        # The last child merged says first how many of all are its own.
        for child, taken in zip(reversed(below[row]), reversed(best[row][1]), strict=True):
            part = int(taken[count])
            if part:
                out += [child - 1, *nodes(child, part - 1)]
            count -= part
        return out

    return [(float(value), sorted(nodes(0, count))) for count, value in enumerate(best[0][0])]


def likeliest_nodes(arrays: TraceArrays, count: int, depth: int) -> list[int]:
    """Return the sub-tree of `count` nodes, none deeper than `depth`, first siblings first, that is accepted most often.

    Raises:
        InputError: there is no sub-tree of so many nodes, or only smaller ones are looked for.
    """
    found = best_subtrees(arrays.tree, _chances(arrays), depth)
    if count >= len(found):
        raise InputError(
            f"--nodes: expected at most {len(found) - 1} of this tree's {arrays.tree.nodes} nodes, or all, not {count}"
        )
    return found[count][1]


def _chances(arrays: TraceArrays) -> list[float]:
    """Return [N] chances of acceptance by which no best sub-tree has a later sibling without the first ones."""
    chances: list[float] = node_acceptance(arrays).tolist()
    for below in arrays.tree.children:
        for row, later in zip(below[-2::-1], below[:0:-1], strict=True):
            chances[row - 1] = max(chances[row - 1], chances[later - 1])  # few texts can say otherwise
    return [chance - _TIE * node for node, chance in enumerate(chances)]


def best_static_tree(arrays: TraceArrays, profile: Profile) -> tuple[StaticTree, Replayed]:
    """Return the fastest static tree inside the recorded one, and its replay, drafted alone.

    Args:
        arrays: a dense trace.
        profile: what rounds cost.
    """
    tree, chances = arrays.tree, _chances(arrays)
    context, found = typical_context(arrays), {}
    for depth in range(arrays.depth + 1):
        for value, nodes in best_subtrees(tree, chances, depth):
            shape = subtree(tree, nodes)
            if not shape.is_chain or shape.nodes <= profile.max_depth:  # nobody drafts longer chains than were timed
                found[tuple(nodes)] = (1.0 + value) / _seconds(shape, profile, context)
    ranked = sorted(found, key=lambda nodes: -found[nodes])[:SHORTLIST]
    played = {nodes: replay(*drafted_alone(arrays, nodes), profile) for nodes in ranked}
    best = max(played, key=lambda nodes: played[nodes].rate)
    return StaticTree(tree, best), played[best]


def drafted_alone(arrays: TraceArrays, nodes: Sequence[int]) -> tuple[TraceArrays, StopPolicy]:
    """Return for `replay` the trace and policy of a static tree that is all that is drafted.

    As part of a larger tree it would pay for candidates that are drawn and never verified.

    Args:
        arrays: a trace of a larger tree.
        nodes: as of `on_subtree`.
    """
    # It reads no feature, of which there may be gigabytes.
    part = on_subtree(dataclasses.replace(arrays, columns={}, extra={}, hidden={}), nodes)
    return part, FixedLength(part.depth)


def _seconds(shape: Topology, profile: Profile, context: float) -> float:
    """Return the seconds of a round that drafts and verifies the whole of a tree."""
    fed = np.array([[sum(bool(shape.children[row]) for row in level) for level in shape.levels[:-1]] or [0]])
    one = np.ones(1, dtype=np.int64)
    count = one * shape.nodes
    if shape.is_chain:
        return float(profile.round_seconds(one * context, count, count, one, 0 * one, 0.0)[0])
    return float(profile.round_seconds(one * context, count, count, one, 0 * one, 0.0, fed)[0])
