"""Which tree a policy should draft: policies are fitted on sub-trees of the recorded one, and the fastest is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....policies.display import Progress, silent
from ....policies.learned import TreeGain
from ....policies.profile import Profile
from ...heads.crossfit import Folds
from ...replay.bounds.static_tree import best_static_tree, likeliest_nodes
from ...replay.traces.arrays import TraceArrays
from ...replay.traces.subtrees import on_subtree
from ..plan import Plan
from .fit import fit_tree


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
    report: TraceArrays | None = None,
    progress: Progress = silent,
) -> TreeChoice:
    """Return the policy of the sub-tree with the highest rate, on prompts that its heads were not fitted on.

    What is drawn and not verified takes time too, so that a smaller tree may serve better than all that was recorded. Where
    several are tried, one as large as the best static tree is tried as well: where little is worth deciding that is the one.

    Args:
        plan: what to fit.
        arrays: a trace of a large tree, which holds all that are tried.
        folds: of the prompts.
        profile: what rounds cost.
        sizes: nodes of the sub-trees of most acceptance that are tried; one of as many as were recorded is the whole.
        depth: of these trees at most.
        report: prompts that held-out figures come from, or None.
        progress: see `Progress`.

    Raises:
        InputError: a size cannot be; see `likeliest_nodes`.
    """
    best: TreeChoice | None = None
    whole = list(range(arrays.tree.nodes))
    # All at first: a size that cannot be is told before anything is fitted.
    trees = [whole if n >= len(whole) else likeliest_nodes(arrays, n, depth or arrays.depth) for n in sizes]
    if len(trees) > 1:
        static, _ = best_static_tree(arrays, profile)
        as_large = likeliest_nodes(arrays, len(static.nodes), static.max_depth)
        trees += [as_large] if as_large and as_large not in trees else []
    for done, nodes in enumerate(trees):
        if len(trees) > 1:
            progress("choose a tree", done, len(trees))
        part, held = (of if of is None or nodes is whole else on_subtree(of, nodes) for of in (arrays, report))
        assert part is not None
        found = TreeChoice(nodes, part, *fit_tree(plan, part, folds, profile, held, progress))
        if best is None or found.policy.metadata.rho > best.policy.metadata.rho:
            best = found
    if len(trees) > 1:
        progress("choose a tree", len(trees), len(trees))
    if best is None:
        raise ValueError("sizes: expected at least one")
    if len(trees) > 1:
        best.metrics["trees tried"] = len(trees)
    return best
