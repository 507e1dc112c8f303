"""Sub-trees of a recorded tree: the trace as a smaller tree would have recorded it, and the best static tree.

The best tree that is drafted in every round is found by the dynamic programme of Sequoia (arXiv 2402.12374): of all
sub-trees of n nodes and depth d, the one with the most accepted nodes; then over n and d the one with the most tokens per
second under a profile. The best candidates are replayed, and the fastest is the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...collect.schema import NO_TOKEN, parents
from ...decode.topology import Topology
from ...policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from ...policies.errors import InputError, TraceError
from ...policies.fixed import FixedLength
from ...policies.profile import Profile
from .arrays import TraceArrays, typical_context
from .rounds import Rounds
from .run import replay

SHORTLIST = 12
"""Number of candidates that are replayed."""

_LARGEST = 96
"""Number of nodes of the largest sub-tree."""

_TIE = 1e-9
"""Advantage of a node over the next one if both are accepted equally often."""


def subtree(tree: Topology, nodes: Sequence[int]) -> Topology:
    """Return the topology of nodes that are closed under parents; nodes are numbered from 0, without the root."""
    row = {0: 0, **{node + 1: at for at, node in enumerate(sorted(nodes), 1)}}
    return Topology([-1, *(row[tree.parent[node + 1]] for node in sorted(nodes))])


def on_subtree(arrays: TraceArrays, nodes: Sequence[int]) -> TraceArrays:
    """Return the trace of a smaller tree.

    Under `match` the candidates are the best by score, and otherwise they are drawn and tried in turn, so that a smaller
    tree has the first candidates of each branch. `noisy_margin` then refers to the best sibling left out, if the larger tree
    drafted it.

    Args:
        arrays: of a dense trace.
        nodes: to keep, closed under parents, first siblings first; numbered from 0, without the root.

    Raises:
        TraceError: the nodes are not such a tree.
    """
    tree, kept = arrays.tree, sorted(nodes)
    rows = {node + 1 for node in kept}
    for children in tree.children:
        is_kept = [row in rows for row in children]
        if is_kept != sorted(is_kept, reverse=True):
            raise TraceError("a smaller tree keeps the first candidates of a branch, not later ones alone")
    if any(tree.parent[row] and tree.parent[row] not in rows for row in rows):
        raise TraceError("a smaller tree is closed under parents")
    at = torch.tensor(kept, dtype=torch.int64)
    columns = {name: values if values.dim() == 1 else values[:, at] for name, values in arrays.columns.items()}
    if "noisy_margin" in columns:
        columns["noisy_margin"] = _margins(arrays, rows)[:, at]
    path = arrays.accepted_nodes()[:, at]
    depths = torch.tensor(tree.depth[1:])[at]
    return dataclasses.replace(
        arrays,
        header=dataclasses.replace(arrays.header, topology=parents(subtree(tree, kept))),
        accepted=(path * depths).amax(1) if kept else torch.zeros_like(arrays.accepted),
        tokens=arrays.tokens[:, at],
        ends=arrays.ends[:, at],
        columns=columns,
        path=path,
        drawn=None if arrays.drawn is None else arrays.drawn[:, at],
    )


def _margins(arrays: TraceArrays, rows: set[int]) -> Tensor:
    """Return [N, K] `noisy_margin` if only these rows of the tree are drafted."""
    margin = arrays.columns["noisy_margin"].clone()
    for children in arrays.tree.children:
        inside, outside = ([row - 1 for row in children if (row in rows) is kept] for kept in (True, False))
        if inside and outside:
            score, is_drawn = arrays.column("noisy_score"), arrays.tokens[:, outside[:1]] != NO_TOKEN
            nearer = torch.minimum(margin[:, inside], score[:, inside] - score[:, outside[:1]])
            margin[:, inside] = torch.where(is_drawn, nearer, margin[:, inside])
    return margin


class StaticTree(StopPolicy):
    """Drafts and verifies the same sub-tree in each round.

    Args:
        tree: that rounds may draft.
        nodes: of it, closed under parents; numbered from 0, without the root.
    """

    def __init__(self, tree: Topology, nodes: Sequence[int]) -> None:
        self.tree, self.nodes = tree, tuple(sorted(nodes))
        chosen = set(self.nodes)
        self._chosen = np.array([node in chosen for node in range(tree.nodes)], dtype=bool)
        extends = [any(child - 1 in chosen for child in children) for children in tree.children]
        self._extends = [np.array([extends[row] for row in level]) for level in tree.levels]
        self.max_depth = max((tree.depth[node + 1] for node in self.nodes), default=0)
        self.first = min(1, self.max_depth)
        self.name = f"static:{self.shape.name}"

    @property
    def shape(self) -> Topology:
        """The sub-tree as a topology."""
        return subtree(self.tree, self.nodes)

    @property
    def drawn(self) -> Topology:
        """The sub-tree that is drawn if it is part of the larger tree: with siblings, at least of the first depth."""
        extended = sorted({0, *(self.tree.parent[node + 1] for node in self.nodes)})
        return subtree(self.tree, [child - 1 for row in extended for child in self.tree.children[row]])

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches with chosen nodes below them."""
        return step.alive & self._extends[step.depth], state

    def select(self, tree: DraftTree, state: State) -> Array:
        """Verify the chosen nodes."""
        out: Array = tree.drawn & self._chosen[: tree.drawn.shape[1]]
        return out


def best_subtrees(tree: Topology, acceptance: Sequence[float], depth: int) -> list[tuple[float, list[int]]]:
    """Return for n = 0, 1, ... the sub-tree of n nodes with the largest sum of acceptance: (sum, nodes).

    Args:
        tree: to choose from.
        acceptance: [K] probability of each node to be accepted.
        depth: of the deepest nodes.
    """
    best: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
    rows = [row for row in range(len(tree)) if tree.depth[row] <= depth]
    children_of = {row: [child for child in tree.children[row] if tree.depth[child] <= depth] for row in rows}
    # Children before parents. For each row, the largest sum by number of descendants: a knapsack, into which the children are
    # merged in turn.
    for row in reversed(rows):
        total, splits = np.zeros(1), []
        for child in children_of[row]:
            options = np.concatenate([[0.0], best[child][0]])  # 0 nodes, or 1, 2, ... with the child itself
            both = total[:, None] + options[None]  # [nodes so far, nodes of this child]
            size = min(both.shape[0] + both.shape[1] - 1, _LARGEST + 1)
            merged, counts = np.full(size, -np.inf), np.zeros(size, dtype=np.int64)
            for count in range(min(both.shape[1], size)):
                end = min(size, count + both.shape[0])
                better = both[: end - count, count] > merged[count:end]
                merged[count:end] = np.where(better, both[: end - count, count], merged[count:end])
                counts[count:end] = np.where(better, count, counts[count:end])
            total = merged
            splits.append(counts)
        best[row] = (total + (acceptance[row - 1] if row else 0.0), splits)

    def descendants(row: int, count: int) -> list[int]:
        """Return the best `count` descendants of a row."""
        nodes: list[int] = []
        # The child that was merged last determines first how many of the nodes it has.
        for child, counts in zip(reversed(children_of[row]), reversed(best[row][1]), strict=True):
            part = int(counts[count])
            if part:
                nodes += [child - 1, *descendants(child, part - 1)]
            count -= part
        return nodes

    return [(float(value), sorted(descendants(0, count))) for count, value in enumerate(best[0][0])]


def likeliest_nodes(arrays: TraceArrays, count: int, depth: int) -> list[int]:
    """Return the sub-tree of `count` nodes, none deeper than `depth`, first siblings first, that is accepted most often.

    Raises:
        InputError: there is no such sub-tree, or only smaller ones are searched.
    """
    subtrees = best_subtrees(arrays.tree, _acceptance(arrays), depth)
    if count >= len(subtrees):
        raise InputError(
            f"--nodes: expected at most {len(subtrees) - 1} of this tree's {arrays.tree.nodes} nodes, or all, not {count}"
        )
    return subtrees[count][1]


def _acceptance(arrays: TraceArrays) -> list[float]:
    """Return [K], the share of uncut anchors at which each node is accepted, such that first siblings are preferred."""
    chances: list[float] = arrays.accepted_nodes()[~arrays.cut].double().mean(0).tolist()
    for children in arrays.tree.children:
        for row, later in zip(children[-2::-1], children[:0:-1], strict=True):
            chances[row - 1] = max(chances[row - 1], chances[later - 1])  # in few texts a later sibling may be ahead
    return [chance - _TIE * node for node, chance in enumerate(chances)]


def best_static_tree(arrays: TraceArrays, profile: Profile) -> tuple[StaticTree, Rounds]:
    """Return the fastest static tree inside the recorded one, and its replay if only this tree is drafted.

    Args:
        arrays: a dense trace.
        profile: costs of rounds.
    """
    tree, chances = arrays.tree, _acceptance(arrays)
    context, rates = typical_context(arrays), {}
    for depth in range(arrays.depth + 1):
        for value, nodes in best_subtrees(tree, chances, depth):
            shape = subtree(tree, nodes)
            if not shape.is_chain or shape.nodes <= profile.max_depth:  # no chain is longer than what was timed
                rates[tuple(nodes)] = (1.0 + value) / _round_seconds(shape, profile, context)
    ranked = sorted(rates, key=lambda nodes: -rates[nodes])[:SHORTLIST]
    replays = {nodes: replay(*drafted_alone(arrays, nodes), profile) for nodes in ranked}
    best = max(replays, key=lambda nodes: replays[nodes].rate)
    return StaticTree(tree, best), replays[best]


def drafted_alone(arrays: TraceArrays, nodes: Sequence[int]) -> tuple[TraceArrays, StopPolicy]:
    """Return the trace and the policy to `replay` a static tree with if only this tree is drafted.

    As part of a larger tree it would pay for candidates that are drawn and never verified.

    Args:
        arrays: a trace of a larger tree.
        nodes: as of `on_subtree`.
    """
    # The policy reads no features, of which there may be gigabytes.
    part = on_subtree(dataclasses.replace(arrays, columns={}, extra={}, hidden={}), nodes)
    return part, FixedLength(part.depth)


def _round_seconds(shape: Topology, profile: Profile, context: float) -> float:
    """Return the seconds of a round that drafts and verifies a whole tree."""
    fed = np.array([[sum(bool(shape.children[row]) for row in level) for level in shape.levels[:-1]] or [0]])
    one = np.ones(1, dtype=np.int64)
    count = one * shape.nodes
    fed_by_step = None if shape.is_chain else fed
    return float(profile.round_seconds(one * context, count, count, one, 0 * one, 0.0, fed_by_step)[0])
