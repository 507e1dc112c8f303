"""Calibration of tree policies: rows of nodes with an accepted path, survival along paths, and shares of siblings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit, logit
from torch import Tensor

from ...collect.schema import NO_TOKEN
from ...decode.topology import Topology
from ...policies.contract import Array
from ...policies.errors import TraceError
from ...policies.heads.base import Head
from ...policies.learned import PathCalibrator, TreeGain
from ..heads.calibration import calibration_error
from ..heads.rows import FitRows, Visits
from ..replay.arrays import TraceArrays, seen_features

HOLD = 20.0
"""Rows that pull each calibration parameter towards its value without a fit, so that depths with few rows stay near it."""

RANK_HOLD = 0.05
"""Factor of `HOLD` for shifts by rank."""

RARE_SHARE = (-2.5, 0.0)
"""Share of siblings of a rank of which none was accepted, for which a fit would diverge: 8%."""

LEAST_SURVIVAL = 1e-9
"""As in `kernels.trees`: below it, the rest of a survival is not distinguished from `next`."""

BINS, MIN_NODES = 10, 20
"""Bins of calibration errors, and nodes of a depth and rank that are needed for one."""

_EDGE = 1e-6


# Rows: nodes with an accepted path


def node_ranks(tree: Topology) -> list[int]:
    """Return by row of the topology its rank among its siblings; 0 for roots."""
    ranks = [0] * len(tree)
    for children in tree.children:
        for rank, row in enumerate(children):
            ranks[row] = rank
    return ranks


def accepted_nodes(arrays: TraceArrays, row: Tensor) -> Tensor:
    """Return [R, N + 1] bool, the anchors and the nodes that the target accepts, at these rows."""
    return torch.cat([torch.ones(len(row), 1, dtype=torch.bool), arrays.accepted_nodes(row)], 1)


def reachable_nodes(arrays: TraceArrays, row: Tensor) -> Tensor:
    """Return [R, N + 1] bool, the nodes that a policy can decide on: without a gap or an end of text on the path."""
    reachable = torch.ones(len(row), len(arrays.tree), dtype=torch.bool)
    reachable[:, 1:] = ~arrays.ends[row] & (arrays.tokens[row] != NO_TOKEN)
    for node, parent in enumerate(arrays.tree.parent[1:], 1):  # parents come before their children
        reachable[:, node] &= reachable[:, parent]
    return reachable


def accepted_children(tree: Topology, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Return [R, N + 1, W] bool, which child of a node is accepted, by rank, and [N + 1], the number of children of a node.

    Args:
        tree: of N nodes with at most W children each.
        accepted: [R, N + 1] bool, see `accepted_nodes`.
    """
    width = torch.tensor([len(children) for children in tree.children])
    # Padding points at the root, which counts as accepted; the mask removes it.
    padded = torch.zeros(len(tree), int(width.max()), dtype=torch.int64)
    for row, children in enumerate(tree.children):
        padded[row, : len(children)] = torch.tensor(children, dtype=torch.int64)
    return accepted[:, padded] & (torch.arange(padded.shape[1]) < width[:, None]), width


def tree_rows(arrays: TraceArrays, features: Sequence[str], visited: Visits) -> FitRows:
    """Return the training rows of the visited rounds: the anchor, and the children of every accepted node.

    The label `followed` is whether the best child was accepted.

    Raises:
        TraceError: no round was visited.
    """
    if not len(visited.row):
        raise TraceError("--traces: no row has a label; collect more prompts or longer texts")
    tree = arrays.tree
    seen = seen_features(arrays, features, visited.row, visited.history)
    accepted = accepted_nodes(arrays, visited.row)
    parents = torch.tensor([max(parent, 0) for parent in tree.parent])
    # `accept` is conditional on the path so far, so rows are children of accepted nodes only.
    use = accepted[:, parents] & reachable_nodes(arrays, visited.row)
    children, width = accepted_children(tree, accepted)
    depth = torch.tensor(tree.depth).expand(len(seen), -1)
    return FitRows(seen[use], depth[use], accepted[use], children[..., 0][use], (accepted & (width > 0))[use])


def rank_acceptance(rows: FitRows) -> tuple[float, ...]:
    """Return a_1..a_K, the probability by depth that the best child of an accepted node is accepted."""
    out: list[float] = []
    for depth in range(int(rows.depth.max())):
        use = rows.followed_known & (rows.depth == depth)
        out.append(float(rows.followed[use].double().mean()) if bool(use.any()) else (out[-1] if out else 0.0))
    return tuple(out)


# Calibration along paths


def _level_scores(head: Head, seen: Array, level: Sequence[int], depth: int) -> Array:
    """Return [R, B, 2] float64, a head's scores of the B nodes `level` of a depth, from what is seen [R, N + 1, F]."""
    rows = np.ascontiguousarray(seen[:, level])
    return head.scores(rows.reshape(len(seen) * len(level), rows.shape[-1]), depth).reshape(len(seen), len(level), 2)


def fit_paths(
    parts: Sequence[tuple[Head, Visits]], arrays: TraceArrays, features: Sequence[str]
) -> tuple[PathCalibrator, PathCalibrator]:
    """Return the calibrators of both outputs with the least log loss on all nodes of the visited rounds, accepted or not.

    That of `accept` gives the probability that a node is accepted, that of `next` the probability that the node and its best
    child are.

    Args:
        parts: heads, each with rounds of prompts that it was not fitted on.
        arrays: a trace of trees.
        features: the heads'.
    """
    tree = arrays.tree
    seen = [seen_features(arrays, features, visited.row, visited.history).numpy() for _, visited in parts]
    row = torch.cat([visited.row for _, visited in parts])
    accepted, reachable = accepted_nodes(arrays, row).numpy(), reachable_nodes(arrays, row).numpy()
    ranks = np.array(node_ranks(tree))
    count = int(ranks.max()) + 1
    survival = np.ones((len(row), 1))  # calibrated, of the level before
    tables: tuple[list[Array], list[Array]] = ([], [])
    # From the root down: the fit of a level uses the calibrated survival of the level before, as the policy does.
    for depth, level in enumerate(tree.levels):
        scores = [_level_scores(head, one, level, depth) for (head, _), one in zip(parts, seen, strict=True)]
        accept, next_ = np.moveaxis(np.concatenate(scores), -1, 0)
        use, rank = reachable[:, level], np.broadcast_to(ranks[level], accept.shape)
        if depth == 0:
            tables[0].append(_uncalibrated(count))  # at depth 0 nothing is drawn: `accept` has no label
        else:
            first = tree.levels[depth - 1][0]
            survival = survival[:, [tree.parent[node] - first for node in level]]
            tables[0].append(_fit_level(survival[use], accept[use], accepted[:, level][use], rank[use], count))
            survival = PathCalibrator(np.array(tables[0], dtype=np.float32)).of(survival, accept, depth, ranks[level])
        best = np.array([(tree.children[node] or [0])[0] for node in level])  # 0, the root = no child
        use = use & (best > 0)
        tables[1].append(_fit_level(survival[use], next_[use], accepted[:, best][use], rank[use], count))
    return PathCalibrator(np.array(tables[0], dtype=np.float32)), PathCalibrator(np.array(tables[1], dtype=np.float32))


def _uncalibrated(ranks: int) -> Array:
    return np.array([1.0, 0.0, *[0.0] * ranks])


def _fit_level(parent: Array, logits: Array, labels: Array, rank: Array, ranks: int) -> Array:
    """Return [2 + R]: scale, tilt and shifts by rank, of a level whose nodes have parents of this survival."""
    start = _uncalibrated(ranks)
    if not len(labels):
        return start
    product = np.clip(parent * expit(logits), _EDGE, 1.0 - _EDGE)
    columns = np.column_stack([logit(product), logits, rank[:, None] == np.arange(ranks)])
    hold = HOLD * np.array([1.0, 1.0, *[RANK_HOLD] * ranks])
    return _fit_logistic(columns, labels, start, hold)


def _fit_logistic(columns: Array, labels: Array, start: Array, hold: Array) -> Array:
    """Return the weights [P] with the least log loss over rows [M, P], plus `hold` times their squared distance from `start`.

    scikit-learn's logistic regression can only pull weights towards 0, and all of them equally.
    """

    def loss(weights: Array) -> tuple[float, Array]:
        odds, distance = columns @ weights, weights - start
        value = np.logaddexp(0.0, odds).sum() - odds @ labels + hold @ distance**2
        return float(value), (expit(odds) - labels) @ columns + 2.0 * hold * distance

    weights: Array = minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-12, "gtol": 1e-6}).x
    return weights


def path_chances(
    head: Head, accept: PathCalibrator, next_: PathCalibrator, tree: Topology, seen: Array
) -> tuple[Array, Array]:
    """Return [R, N + 1] float64 each: the survival of every node, and `next` given it, if a policy decided on all nodes.

    Args:
        head, accept, next_: of the policy.
        tree: of N nodes.
        seen: [R, N + 1, F] float32, what the head reads of R rounds.
    """
    survival, next_chance = np.ones(seen.shape[:2]), np.empty(seen.shape[:2])
    ranks = np.array(node_ranks(tree))
    for depth, level in enumerate(tree.levels):
        scores = _level_scores(head, seen, level, depth)
        if depth:  # the root was not drawn
            parents = survival[:, [tree.parent[row] for row in level]]
            survival[:, level] = accept.of(parents, scores[..., 0], depth, ranks[level])
        own = survival[:, level]
        next_chance[:, level] = next_.of(own, scores[..., 1], depth, ranks[level]) / np.maximum(own, LEAST_SURVIVAL)
    return survival, next_chance


def sibling_shares(
    parts: Sequence[tuple[Head, Visits]],
    arrays: TraceArrays,
    features: Sequence[str],
    accept: PathCalibrator,
    next_: PathCalibrator,
) -> tuple[tuple[float, float], ...]:
    """Return the shares of siblings (`fit_shares`), given `next` as policies have it, calibrated along the path.

    `accept` and `next_` are the calibrators of `fit_paths`, which has the other arguments too.
    """
    columns = []
    for head, visited in parts:
        seen = seen_features(arrays, features, visited.row, visited.history).numpy()
        _, next_chance = path_chances(head, accept, next_, arrays.tree, seen)
        accepted = accepted_nodes(arrays, visited.row)
        children, width = accepted_children(arrays.tree, accepted)
        use = accepted & reachable_nodes(arrays, visited.row) & (width > 0)
        columns.append((torch.from_numpy(next_chance)[use], children[use], width.expand_as(use)[use]))
    return fit_shares(*(torch.cat(column) for column in zip(*columns, strict=True)))


def fit_shares(chance: Tensor, children: Tensor, width: Tensor) -> tuple[tuple[float, float], ...]:
    """Return for rank 1, 2, ... (u, v): a child of that rank is accepted with probability sigmoid(u + v logit chance).

    Args:
        chance: [M] probability of the best child, at accepted nodes.
        children: [M, R] bool, which child was accepted.
        width: [M] number of children.
    """
    x = logit(chance.double().numpy().clip(1e-4, 1.0 - 1e-4))
    out = []
    for rank in range(1, children.shape[1]):
        use = (width > rank).numpy()
        labels, pair = children.numpy()[use, rank], RARE_SHARE
        if labels.any():
            columns = np.column_stack([np.ones(use.sum()), x[use]])
            # Without a penalty the slope would diverge where few rows separate the two classes.
            start, hold = np.array([RARE_SHARE[0], 0.0]), np.array([0.0, 1.0])
            u, v = _fit_logistic(columns, labels, start, hold)
            pair = float(u), float(v)
        out.append(pair)
    return tuple(out)


def tree_scores(policy: TreeGain, arrays: TraceArrays, visited: Visits) -> list[dict[str, Any]]:
    """Return by depth and rank: nodes, mean predicted and observed survival, and the calibration error in deciles."""
    if not len(visited.row):
        return []
    seen = seen_features(arrays, policy.features, visited.row, visited.history).numpy()
    survival, _ = path_chances(policy.head, policy.accept, policy.next, arrays.tree, seen)
    accepted, reachable = (of(arrays, visited.row).numpy() for of in (accepted_nodes, reachable_nodes))
    ranks, depths = np.array(node_ranks(arrays.tree)), np.array(arrays.tree.depth)
    rows = []
    for depth in range(1, arrays.depth + 1):
        for rank in range(int(ranks.max()) + 1):
            use = reachable & ((depths == depth) & (ranks == rank))
            if use.sum() < MIN_NODES:
                continue
            said, was = survival[use], accepted[use]
            error = calibration_error(said, was, BINS)
            rows.append(
                {"depth": depth, "rank": rank, "nodes": len(said), "said": float(said.mean()), "was": float(was.mean()),
                 "ece": error}
            )  # fmt: skip
    return rows
