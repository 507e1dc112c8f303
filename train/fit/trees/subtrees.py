"""A trace as a smaller tree would have recorded it: which tree a policy should draft is found without collecting again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ....collect.schema import NO_TOKEN, parents
from ....decode.topology import Topology
from ....policies.errors import InputError, TraceError
from ...replay.bounds.static_tree import best_subtrees, node_acceptance
from ...replay.traces.arrays import TraceArrays

_TIE = 1e-9
"""By which a node is ahead of the next one where both are accepted as often."""

_MARGIN, _SCORE = "noisy_margin", "noisy_score"


def subtree(tree: Topology, nodes: Sequence[int]) -> Topology:
    """Return the tree of some nodes, closed under parents and numbered from 0 without the root."""
    row = {0: 0, **{node + 1: at for at, node in enumerate(sorted(nodes), 1)}}
    return Topology([-1, *(row[tree.parent[node + 1]] for node in sorted(nodes))])


def on_subtree(arrays: TraceArrays, nodes: Sequence[int]) -> TraceArrays:
    """Return the trace of a smaller tree.

    Under `match` candidates are the best by score, so a smaller tree has the first ones of each branch. What a node is
    ahead of is then another one: `noisy_margin` is taken to the best sibling left out, where the larger tree drafted it.

    Args:
        arrays: of a trace under `match`.
        nodes: to keep, closed under parents, first siblings first; numbered from 0 without the root.

    Raises:
        TraceError: the nodes are no such tree.
    """
    tree, kept = arrays.tree, sorted(nodes)
    chosen = {node + 1 for node in kept}
    for below in tree.children:
        there = [row in chosen for row in below]
        if there != sorted(there, reverse=True):
            raise TraceError("a smaller tree keeps the first candidates of a branch, not later ones alone")
    if any(tree.parent[row] and tree.parent[row] not in chosen for row in chosen):
        raise TraceError("a smaller tree is closed under parents")
    at = torch.tensor(kept, dtype=torch.int64)
    columns = {name: values if values.dim() == 1 else values[:, at] for name, values in arrays.columns.items()}
    if _MARGIN in columns:
        columns[_MARGIN] = _margins(arrays, kept, chosen)
    shape = subtree(tree, kept)
    path = arrays.path if arrays.path is not None else torch.arange(arrays.depth) < arrays.accepted[:, None]
    deep = torch.tensor(tree.depth[1:])[at]
    return dataclasses.replace(
        arrays,
        header=dataclasses.replace(arrays.header, topology=parents(shape)),
        accepted=(path[:, at] * deep).amax(1) if kept else torch.zeros_like(arrays.accepted),
        tokens=arrays.tokens[:, at],
        ends=arrays.ends[:, at],
        columns=columns,
        path=path[:, at],
        drawn=None if arrays.drawn is None else arrays.drawn[:, at],
    )


def _margins(arrays: TraceArrays, kept: Sequence[int], chosen: set[int]) -> Tensor:
    """Return [N, K'] `noisy_margin` in the smaller tree."""
    margin = arrays.columns[_MARGIN].clone()
    for below in arrays.tree.children:
        inside, outside = ([row - 1 for row in below if (row in chosen) is side] for side in (True, False))
        if inside and outside:
            score, there = arrays.column(_SCORE), arrays.tokens[:, outside[:1]] != NO_TOKEN
            nearer = torch.minimum(margin[:, inside], score[:, inside] - score[:, outside[:1]])
            margin[:, inside] = torch.where(there, nearer, margin[:, inside])
    return margin[:, list(kept)]


def likeliest_nodes(arrays: TraceArrays, count: int, depth: int) -> list[int]:
    """Return the sub-tree of `count` nodes, none deeper than `depth`, first siblings first, that is accepted most often.

    Raises:
        InputError: there is no sub-tree of so many nodes, or only smaller ones are looked for.
    """
    chances = node_acceptance(arrays).tolist()
    for below in arrays.tree.children:
        for row, later in zip(below[-2::-1], below[:0:-1], strict=True):
            chances[row - 1] = max(chances[row - 1], chances[later - 1])  # few texts can say otherwise
    chances = [chance - _TIE * node for node, chance in enumerate(chances)]
    found = best_subtrees(arrays.tree, chances, depth)
    if count >= len(found):
        raise InputError(
            f"--nodes: expected at most {len(found) - 1} of this tree's {arrays.tree.nodes} nodes, or all, not {count}"
        )
    return found[count][1]
