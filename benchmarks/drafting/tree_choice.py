"""Which tree a policy should draft: policies fitted on sub-trees of the recorded one, the fastest on held-out prompts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specstop.policies.latency.profile import Profile
from specstop.policies.learned.trees import TreeGain
from specstop.policies.progress import Progress, silent
from specstop.train.fit.plan import Plan
from specstop.train.fit.trees.fit import TREE_FEATURES, fit_tree
from specstop.train.heads.crossfit import Folds
from specstop.train.replay.traces.arrays import TraceArrays

from .subtrees import likeliest_nodes, on_subtree

RATES = (0.62, 0.15, 0.07, 0.042, 0.028, 0.02)
"""How often the candidates of each rank are accepted on pairs that are neither very near nor far: a start, no more."""


TREE = Plan("logistic", "gain", features=TREE_FEATURES, name="tree")
"""The policy of trees that `train --rule gain` fits unless told otherwise."""


@dataclass(frozen=True)
class TreeChoice:
    """A policy and the tree that it was fitted for.

    Attributes:
        nodes: of the recorded tree.
        arrays: the trace as that tree would have recorded it.
        policy, files, metrics: see `fit_tree`.
    """

    nodes: list[int]
    arrays: TraceArrays
    policy: TreeGain
    files: dict[str, bytes]
    metrics: dict[str, Any]


def choose_tree(
    plan: Plan,
    arrays: TraceArrays,
    folds: Folds,
    profile: Profile,
    sizes: Sequence[int],
    depth: int | None = None,
    progress: Progress = silent,
) -> TreeChoice:
    """Return the policy of the sub-tree that is fastest on the prompts held out.

    What is drawn and not verified takes time too, so that a smaller tree may serve better than all that was recorded.

    Args:
        plan: what to fit.
        arrays: a trace of a large tree (`likely_tree`).
        folds: of the prompts.
        profile: what rounds cost.
        sizes: nodes of the sub-trees of most acceptance that are tried; one of as many as were recorded is the whole.
        depth: of these trees at most.
    """
    best: TreeChoice | None = None
    for done, size in enumerate(sizes):
        progress("choose a tree", done, len(sizes))
        whole = size >= arrays.tree.nodes
        nodes = list(range(arrays.tree.nodes)) if whole else likeliest_nodes(arrays, size, depth or arrays.depth)
        part = arrays if whole else on_subtree(arrays, nodes)
        found = TreeChoice(nodes, part, *fit_tree(plan, part, folds, profile))
        if best is None or found.metrics["held_out_tokens_per_s"] > best.metrics["held_out_tokens_per_s"]:
            best = found
    progress("choose a tree", len(sizes), len(sizes))
    if best is None:
        raise ValueError("sizes: expected at least one")
    return best


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
