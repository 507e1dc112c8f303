"""Fitting the calibration of a tree's paths, and how the best child's chance tells those of its siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ....decode.topology import Topology
from ....policies.contract import Array
from ....policies.heads.base import Head
from ....policies.learned import PathCalibrator
from ...heads.rows import Visits
from ...replay.traces.arrays import TraceArrays, seen_features
from .rows import accepted_children, accepted_nodes, askable_nodes, level_scores, node_ranks

STEPS = 60
HOLD = 20.0
"""Rows that pull each number towards what it would be without a fit: a depth with few rows keeps near it."""

LEAST_SURVIVAL = 1e-9
"""As in `kernels.trees`: below it what is left of a survival is not told apart from `next`."""

_EDGE = 1e-6


def fit_paths(
    parts: Sequence[tuple[Head, Visits]], arrays: TraceArrays, features: Sequence[str]
) -> tuple[PathCalibrator, PathCalibrator]:
    """Return the calibrators of both outputs, of least log loss on all nodes of the rounds visited, accepted or not.

    That of `accept` gives the chance that a node is accepted, that of `next` the chance that the node and its best child are.

    Args:
        parts: heads, each with rounds of prompts that it was not fitted on.
        arrays: a trace of trees.
        features: the heads'.
    """
    tree = arrays.tree
    seen = [seen_features(arrays, features, visited.row, visited.history).numpy() for _, visited in parts]
    row = torch.cat([visited.row for _, visited in parts])
    accepted, there = accepted_nodes(arrays, row), askable_nodes(arrays, row)
    ranks = torch.tensor(node_ranks(tree))
    most = int(ranks.max()) + 1
    parent_chance = torch.ones(len(row), 1, dtype=torch.float64)  # calibrated chances of the level before
    tables: list[list[Tensor]] = [[], []]
    # From the root down: a level's fit rests on the calibrated chances of the level before, as the policy's do.
    for depth, level in enumerate(tree.levels):
        scores = [level_scores(head, some, level, depth) for (head, _), some in zip(parts, seen, strict=True)]
        one, two = torch.from_numpy(np.concatenate(scores)).unbind(-1)
        use, rank = there[:, level], ranks[level].expand(len(row), -1)
        if depth == 0:
            tables[0].append(_plain(most))  # at depth 0 nothing is drawn: `accept` has no label
            chance = parent_chance
        else:
            first = tree.levels[depth - 1][0]
            chance = parent_chance[:, [tree.parent[node] - first for node in level]]
            tables[0].append(_row(chance[use], one[use], accepted[:, level][use], rank[use], most))
            calibrator = _calibrator(tables[0])
            chance = torch.from_numpy(calibrator.of(chance.numpy(), one.numpy(), depth, ranks[level].numpy()))
        best = torch.tensor([(tree.children[node] or [0])[0] for node in level])  # 0, the root = no child
        use = use & (best > 0)
        tables[1].append(_row(chance[use], two[use], accepted[:, best][use], rank[use], most))
        parent_chance = chance
    return _calibrator(tables[0]), _calibrator(tables[1])


def path_chances(
    head: Head, accept: PathCalibrator, next_: PathCalibrator, tree: Topology, seen: Array
) -> tuple[Array, Array]:
    """Return [R, N + 1] float64 each: the survival of every node, and `next` given it, if a policy were asked everywhere.

    Args:
        head, accept, next_: of the policy.
        tree: of N nodes.
        seen: [R, N + 1, F] float32, what the head reads of R rounds.
    """
    survival, next_chance = np.ones(seen.shape[:2]), np.empty(seen.shape[:2])
    ranks = np.array(node_ranks(tree))
    for depth, level in enumerate(tree.levels):
        scores = level_scores(head, seen, level, depth)
        if depth:  # the root was not drawn
            parent_chance = survival[:, [tree.parent[row] for row in level]]
            survival[:, level] = accept.of(parent_chance, scores[..., 0], depth, ranks[level])
        here = survival[:, level]
        next_chance[:, level] = next_.of(here, scores[..., 1], depth, ranks[level]) / np.maximum(here, LEAST_SURVIVAL)
    return survival, next_chance


def sibling_shares(
    parts: Sequence[tuple[Head, Visits]],
    arrays: TraceArrays,
    features: Sequence[str],
    accept: PathCalibrator,
    next_: PathCalibrator,
) -> tuple[tuple[float, float], ...]:
    """Return the shares of siblings (`fit_shares`), given `next` as policies have it, calibrated along the path.

    Args:
        parts, arrays, features: see `fit_paths`, whose calibrators `accept` and `next_` are.
    """
    found = []
    for head, visited in parts:
        seen = seen_features(arrays, features, visited.row, visited.history).numpy()
        _, next_chance = path_chances(head, accept, next_, arrays.tree, seen)
        accepted = accepted_nodes(arrays, visited.row)
        children, width = accepted_children(arrays.tree, accepted)
        use = accepted & askable_nodes(arrays, visited.row) & (width > 0)
        found.append((torch.from_numpy(next_chance)[use], children[use], width.expand_as(use)[use]))
    return fit_shares(*(torch.cat(column) for column in zip(*found, strict=True)))


def _calibrator(rows: Sequence[Tensor]) -> PathCalibrator:
    return PathCalibrator(torch.stack(list(rows)).float().numpy())


def _plain(ranks: int) -> Tensor:
    return torch.tensor([1.0, 0.0, *[0.0] * ranks], dtype=torch.float64)


def _row(parent_chance: Tensor, logits: Tensor, labels: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """Return [2 + R]: scale, tilt and shifts by rank."""
    if not len(labels):
        return _plain(ranks)
    product = (parent_chance * torch.sigmoid(logits)).clamp(_EDGE, 1.0 - _EDGE)
    x, y = torch.logit(product), labels.double()
    fitted = _plain(ranks)
    start = fitted.clone()
    # The shifts by rank are held twenty times more loosely than scale and tilt.
    weight = torch.tensor([1.0, 1.0, *[0.05] * ranks], dtype=torch.float64)

    def loss() -> Tensor:
        odds = fitted[0] * x + fitted[1] * logits + fitted[2:][rank]
        data = torch.nn.functional.binary_cross_entropy_with_logits(odds, y, reduction="sum")
        return data + HOLD * (weight * (fitted - start).square()).sum()

    minimise([fitted], loss)
    return fitted.detach()


def fit_shares(chance: Tensor, children: Tensor, width: Tensor) -> tuple[tuple[float, float], ...]:
    """Return for rank 1, 2, ... (u, v): a child of that rank is accepted with chance sigmoid(u + v logit chance).

    Args:
        chance: [M] of the best child, at accepted nodes.
        children: [M, R] bool, which child was accepted.
        width: [M] number of children.
    """
    x = torch.logit(chance.double(), eps=1e-4)
    out = []
    for rank in range(1, children.shape[1]):
        use = width > rank
        # Also the answer where none of this rank was accepted, for which a fit would run on without end: 8%.
        pair = torch.tensor([-2.5, 0.0], dtype=torch.float64)
        if bool(children[use, rank].any()):
            at, y = x[use], children[use, rank].double()

            def loss(at: Tensor = at, y: Tensor = y, pair: Tensor = pair) -> Tensor:
                odds = pair[0] + pair[1] * at
                # Without a penalty the slope would run off where few rows tell the two kinds apart.
                return torch.nn.functional.binary_cross_entropy_with_logits(odds, y, reduction="sum") + pair[1] ** 2

            minimise([pair], loss)
        out.append((float(pair[0].detach()), float(pair[1].detach())))
    return tuple(out)


def minimise(parameters: list[Tensor], loss: Callable[[], Tensor]) -> None:
    """Move the parameters to where the loss is least."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    search = torch.optim.LBFGS(parameters, max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = loss()
        value.backward()
        return value

    search.step(closure)
