"""Which branches and nodes have the most probable paths, and how many are worth it (`policies.baselines.trees`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import exact, kernel
from ..trees import falling, sibling_ranks as sibling_ranks  # for `baselines.trees`, which asks this module


@exact
def _keep_first(order: Any, count: Any, alive: Any, kept: Any) -> None:
    """Keep the first of `order`, but what is not alive."""
    kept[:] = False
    for i in range(min(count, order.shape[0])):
        kept[order[i]] = alive[order[i]]


@kernel("void(float32[:,::1], boolean[:,::1], int64, boolean[:,::1])")
def keep_best(values: Any, alive: Any, count: int, kept: Any) -> None:
    """Keep the largest values; of equal ones the first.

    Args:
        values: [S, N]; -infinity where not alive.
        alive: [S, N].
        count: how many.
        kept: [S, N] is written.
    """
    order = np.empty(values.shape[1], dtype=np.int64)
    for s in range(values.shape[0]):
        falling(values[s], order)
        _keep_first(order, count, alive[s], kept[s])


@kernel("void(float32[:,::1], boolean[:,::1], int64, float64, boolean[:,::1])")
def keep_beam(values: Any, alive: Any, width: int, least: float, kept: Any) -> None:
    """Keep the best branches if log sum e^value over them is at least a threshold, else none.

    Args:
        values, alive, kept: [S, B]; see `keep_best`.
        width: how many.
        least: the threshold; -infinity = they are kept.
    """
    order = np.empty(values.shape[1], dtype=np.int64)
    for s in range(values.shape[0]):
        falling(values[s], order)
        # Relative to the best, which no path underflows; float64, since a beam's mass is a sum of many small numbers.
        best, share = np.float64(values[s, order[0]]), 0.0
        for i in range(min(width, order.shape[0])):
            share += np.exp(values[s, order[i]] - best)
        enough = best > -np.inf and best + np.log(share) >= least
        _keep_first(order, width if enough else 0, alive[s], kept[s])


@exact
def _expected(values: Any, order: Any, count: Any) -> Any:
    """Return the sum of e^value over the largest values."""
    falling(values, order)
    total = 0.0
    for i in range(min(count, order.shape[0])):
        total += np.exp(np.float64(values[order[i]]))
    return total


@kernel("void(float32[:,::1], int64, boolean[:,::1], int64, int64, float64, boolean[:,::1])")
def keep_rising(levels: Any, before: int, alive: Any, nodes: int, top: int, least: float, kept: Any) -> None:
    """Keep the best branches of the last level if it raised the expected accepted length by more than `least`, else none.

    Args:
        levels: [S, M] values of all levels.
        before: how many of them are of the levels before.
        alive, kept: [S, B], of the last level; see `keep_best`.
        nodes: of the best of which the expected accepted length is the sum of e^value.
        top: how many branches are kept.
    """
    order = np.empty(levels.shape[1], dtype=np.int64)
    for s in range(levels.shape[0]):
        # Both sums anew: the best nodes of the tree so far need not be among those of the tree with another level.
        old, last = levels[s, :before], levels[s, before:]
        rise = _expected(levels[s], order, nodes) - _expected(old, order[:before], nodes)
        falling(last, order[: last.shape[0]])
        _keep_first(order[: last.shape[0]], top if rise > least else 0, alive[s], kept[s])


@kernel("void(float32[:,::1], boolean[:,::1], float64, float64, float64[::1], boolean[:,::1])")
def keep_worth(values: Any, alive: Any, follow: float, each: float, prices: Any, kept: Any) -> None:
    """Keep the n best, n >= 0 the one of the largest sum of follow e^value - each over them, less the price of n.

    Args:
        values, alive, kept: [S, N]; see `keep_best`.
        follow, each: see above.
        prices: [N] of 1, 2, ...
    """
    order = np.empty(values.shape[1], dtype=np.int64)
    for s in range(values.shape[0]):
        falling(values[s], order)
        count, most, total = 0, 0.0, 0.0
        for i in range(order.shape[0]):
            total += follow * np.exp(np.float64(values[s, order[i]])) - each
            if total - prices[i] > most:
                count, most = i + 1, total - prices[i]
        _keep_first(order, count, alive[s], kept[s])


@kernel("void(float32[:,::1], int64[::1], int64[::1], boolean[:,::1], float64, float32[:,::1])")
def value_nodes(levels: Any, parent: Any, siblings: Any, drawn: Any, guess: float, out: Any) -> None:
    """Write the log-probability of the path to each node, at most that of its parent; -infinity where none was drawn.

    Args:
        levels: [S, M] of the first M nodes; -infinity = not asked about, as nodes from M on.
        parent: [N], -1 = root; parents come first.
        siblings: [N] rank of each node among those of its parent.
        drawn: [S, N].
        guess: what a node that was not asked about has more than its parent, once for itself and once for each better
            sibling.
        out: [S, N].
    """
    for s in range(out.shape[0]):
        for n in range(parent.shape[0]):
            parent_value = np.float64(out[s, parent[n]]) if parent[n] >= 0 else 0.0  # the root: log 1
            if n < levels.shape[1] and levels[s, n] > -np.inf:
                out[s, n] = min(np.float64(levels[s, n]), parent_value)
            else:
                out[s, n] = parent_value + guess * (1 + siblings[n])
        for n in range(parent.shape[0]):
            if not drawn[s, n]:
                out[s, n] = -np.inf
