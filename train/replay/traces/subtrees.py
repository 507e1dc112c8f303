"""A trace as a smaller tree would have recorded it: which tree to draft is found without collecting again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ....collect.schema import NO_TOKEN, parents
from ....decode.topology import Topology
from ....policies.errors import TraceError
from .arrays import TraceArrays

_MARGIN, _SCORE = "noisy_margin", "noisy_score"


def subtree(tree: Topology, nodes: Sequence[int]) -> Topology:
    """Return the tree of some nodes, closed under parents and numbered from 0 without the root."""
    row = {0: 0, **{node + 1: at for at, node in enumerate(sorted(nodes), 1)}}
    return Topology([-1, *(row[tree.parent[node + 1]] for node in sorted(nodes))])


def on_subtree(arrays: TraceArrays, nodes: Sequence[int]) -> TraceArrays:
    """Return the trace of a smaller tree.

    Under `match` candidates are the best by score, and elsewhere they are drawn and tried one after the other, so a smaller
    tree has the first ones of each branch. What a node is ahead of is then another one: `noisy_margin` is taken to the best
    sibling left out, where the larger tree drafted it.

    Args:
        arrays: of a dense trace.
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
