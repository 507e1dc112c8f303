"""Scores of heads: layers, boosted trees, tables of tokens; calibration; the decisions of chain rules.

Rows are independent, so bits do not depend on their number.

In all kernels `features` [R, F] are clipped to `bounds` [2, F] (NaN = unknown is kept), `odds` are the indices of the
probabilities with log-odds that are appended as columns F..F'-1, and `out` [R, 2] gets accept and next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import copy_row, kernel, kernel_part


@kernel_part
def _calibrated(score: Any, pieces: Any) -> Any:
    """Return the value of a map at a score; see `Calibrator.pieces`."""
    if pieces.shape[0] == 1:
        return 1.0 / (1.0 + np.exp(-pieces[0, 0] * score))
    low, high = 0, pieces.shape[1] - 1  # the first bound that is not below the score; the last one is infinite
    while low < high:
        middle = (low + high) // 2
        if pieces[0, middle] < score:
            low = middle + 1
        else:
            high = middle
    return pieces[2, low] + pieces[3, low] * (score - pieces[1, low])


@kernel("void(float64[::1], float64[:,::1], float64[::1])")
def calibrate(scores: Any, pieces: Any, out: Any) -> None:
    """Write the values [n] of a map at n scores."""
    for i in range(scores.shape[0]):
        out[i] = _calibrated(scores[i], pieces)


@kernel(
    "void(float64[:,::1], boolean[:,::1], int64[:,::1], float64[:,::1], int64, int64, float64[:,::1], float64[:,::1], "
    "float64[:,::1], int64, boolean, boolean, float64[::1], float64[:,:,::1], boolean[:,::1])"
)
def decide(
    scores: Any, alive: Any, parent: Any, before: Any, depth: int, lag: int, accept: Any, next_: Any, table: Any,
    compared: int, strict: bool, keep_all: bool, threshold: Any, values: Any, kept: Any,
) -> None:  # fmt: skip
    """Write survival, accept and next of the branches of a depth [3, S, B] (0 where not alive), and which are `kept` [S, B].

    Args:
        scores: [R, 2] of the branches that are alive, in their order.
        before: [S, B'] survival of the depth before; empty = the product begins at this depth.
        depth, lag: down to the head's lag `accept` counts as 1; at depth 0 no token was drawn.
        accept, next_, table: maps of the scores, and of the product; an empty table = unchanged.
        compared: 0, 1, 2 = row of `values`; 3 = survival times next.
        strict, keep_all: see `rules.Rule`.
        threshold: [S], or [1] for all streams.
    """
    r = 0
    for s in range(alive.shape[0]):
        level, any_passes = threshold[s if threshold.shape[0] > 1 else 0], False
        for b in range(alive.shape[1]):
            kept[s, b] = False
            if not alive[s, b]:
                values[0, s, b] = values[1, s, b] = values[2, s, b] = 0.0
                continue
            chance = 1.0 if depth <= lag else _calibrated(scores[r, 0], accept)  # depth 0 too
            product = chance  # in float64, so that a long path of small chances keeps its digits
            if before.shape[1]:
                product *= before[s, parent[s, b]]
            if table.shape[1]:
                product = _calibrated(product, table)
            if depth == 0:
                product = chance = 1.0
            following = _calibrated(scores[r, 1], next_)
            values[0, s, b], values[1, s, b], values[2, s, b] = product, chance, following
            r += 1
            value = product * following if compared == 3 else values[compared, s, b]  # 3 = `rules.GAIN`
            kept[s, b] = value > level or (value == level and not strict)  # never at NaN
            any_passes = any_passes or kept[s, b]
        if keep_all and any_passes:
            copy_row(alive[s], kept[s])


# Probabilities are clipped to these before their log-odds are taken, in single precision as in an ONNX export.
MIN_PROBABILITY = float(np.float32(1e-6))
MAX_PROBABILITY = float(np.float32(1.0) - np.float32(1e-6))
_MIN_EXPONENT = -700.0  # e^700 is finite in double precision, e^710 is not
_ONE = np.uint64(1)


@kernel_part
def _clipped(value: Any, low: Any, high: Any) -> Any:
    """Return the value within [low, high]; NaN stays NaN, which `min` and `max` do not guarantee."""
    if value < low:
        return low
    return high if value > high else value


@kernel_part
def _read(row: Any, bounds: Any, odds: Any, x: Any) -> None:
    """Write the F' columns of a row to `x`."""
    width = row.shape[0]
    if width != bounds.shape[1]:
        raise ValueError("the head reads another number of features")
    for i in range(width):
        x[i] = _clipped(row[i], bounds[0, i], bounds[1, i])
    for i in range(odds.shape[0]):
        # In double precision for `x` of either type: single in `expand`, on which heads are fitted, double where they score.
        p = _clipped(np.float64(x[odds[i]]), MIN_PROBABILITY, MAX_PROBABILITY)
        x[width + i] = np.log(p / (1.0 - p))


@kernel_part
def _silu(z: Any) -> Any:
    return 0.0 if z < _MIN_EXPONENT else z / (1.0 + np.exp(-z))


@kernel("void(float32[:,::1], float32[:,::1], int64[::1], float32[:,::1])")
def expand(features: Any, bounds: Any, odds: Any, out: Any) -> None:
    """Write the columns [R, F'] of features."""
    for r in range(features.shape[0]):
        _read(features[r], bounds, odds, out[r])


@kernel("void(float32[:,::1], float32[:,::1], int64[::1], int64[::1], float64[::1], boolean, float64[:,::1])")
def score_layers(features: Any, bounds: Any, odds: Any, sizes: Any, weights: Any, relu: bool, out: Any) -> None:
    """Apply linear layers with SiLU or ReLU between them.

    `sizes` are F', the widths of the inner layers, and 2. `weights` has the bias [outputs] and then the weights
    [inputs, outputs] of each layer.
    """
    widest = sizes.max()
    first, second = np.empty(widest), np.empty(widest)
    for r in range(features.shape[0]):
        x, y, at = first, second, 0
        _read(features[r], bounds, odds, x)
        for layer in range(sizes.shape[0] - 1):
            outputs = sizes[layer + 1]
            for o in range(outputs):
                y[o] = weights[at + o]
            # Each input is added to all outputs at once: this vectorises, a sum over inputs in fixed order would not.
            for i in range(sizes[layer]):
                at += outputs
                value = x[i]
                if layer > 0:
                    value = (0.0 if value < 0.0 else value) if relu else _silu(value)  # NaN stays NaN
                column = weights[at : at + outputs]
                for o in range(outputs):
                    y[o] += value * column[o]
            at += outputs
            x, y = y, x
        out[r, 0], out[r, 1] = x[0], x[1]


@kernel("void(float32[:,::1], float32[:,::1])")
def add_silu(x: Any, z: Any) -> None:
    """Add SiLU(z) to x, both [R, W]."""
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[r, i] += np.float32(_silu(np.float64(z[r, i])))


@kernel_part
def _sum_of_leaves(leaf: Any, depth: Any, node: Any, first: Any, last: Any) -> Any:
    leaves, total = 1 << depth, 0.0
    for tree in range(first, last):
        total += leaf[tree * leaves + np.int64(node[tree]) - (leaves - 1)]
    return total


@kernel(
    "void(float32[:,::1], float32[:,::1], uint32[::1], float32[::1], float32[::1], float64[::1], int64, float64[:,::1])"
)
def score_trees(
    features: Any, bounds: Any, split: Any, threshold: Any, leaf: Any, base: Any, depth: int, out: Any
) -> None:
    """Write `base` [2] plus the sums of the leaves of complete trees of one depth; half the trees are of each output.

    `split` is 2 f, or 2 f + 1 if an unknown value goes right, for each inner node of each tree, f the feature. A row goes
    right where x >= `threshold`. `leaf` has the 2^depth leaves of each tree.
    """
    trees, width, inner = leaf.shape[0] >> depth, features.shape[1], np.uint64((1 << depth) - 1)
    if width != bounds.shape[1]:
        raise ValueError("the head reads another number of features")
    x, node = np.empty(2 * width, dtype=np.float32), np.empty(trees, dtype=np.uint64)
    for r in range(features.shape[0]):
        # Unknown values are laid out as -infinity and as infinity, so that no node has to test for them.
        for i in range(width):
            value = _clipped(features[r, i], bounds[0, i], bounds[1, i])
            x[2 * i] = -np.inf if np.isnan(value) else value
            x[2 * i + 1] = np.inf if np.isnan(value) else value
        for tree in range(trees):
            node[tree] = 0
        # All trees descend together, so that loads overlap. Unsigned indices: numba tests signed ones for being negative.
        # Heap order: the children of n are 2 n + 1 and 2 n + 2.
        for _ in range(depth):
            root = np.uint64(0)
            for tree in range(trees):
                at = root + node[tree]
                node[tree] += node[tree] + _ONE + np.uint64(x[split[at]] >= threshold[at])
                root += inner
        out[r, 0] = base[0] + _sum_of_leaves(leaf, depth, node, 0, trees // 2)
        out[r, 1] = base[1] + _sum_of_leaves(leaf, depth, node, trees // 2, trees)


@kernel(
    "void(float32[:,::1], int64, float32[:,::1], int64[::1], float64[:,::1], float64[:,::1], int64[::1], float32[:,:,::1], "
    "int64[:,::1], float32[:,::1], int64[:,::1], float32[:,:,::1], float64[:,::1])"
)
def score_tokens(
    features: Any, depth: int, bounds: Any, odds: Any, weights: Any, bias: Any, ids: Any, tables: Any, columns: Any,
    edges: Any, strides: Any, hashed: Any, out: Any,
) -> None:  # fmt: skip
    """Add up the bias [K + 1, 2] of the depth, the weighted columns, and the weights of tokens and hashed features.

    Args:
        weights: [F', 2] of the columns.
        ids, tables: indices [I] of the token features, and weights [I, V, 2] of their tokens; 0 outside.
        columns, edges, strides: see `HashedFeatures`; no strides = none.
        hashed: [C, B, 2] weights of the hashed features.
    """
    size, start = hashed.shape[1], bias[min(depth, bias.shape[0] - 1)]
    x, values = np.empty(weights.shape[0]), np.empty(columns.shape[0], dtype=np.int64)
    for r in range(features.shape[0]):
        _read(features[r], bounds, odds, x)
        accept, next_ = start[0], start[1]
        for i in range(weights.shape[0]):
            accept += weights[i, 0] * x[i]
            next_ += weights[i, 1] * x[i]
        for i in range(ids.shape[0]):
            token = x[ids[i]]
            if 0.0 <= token < tables.shape[1]:
                accept += tables[i, np.int64(token), 0]
                next_ += tables[i, np.int64(token), 1]
        for i in range(columns.shape[0] if strides.shape[0] > 0 else 0):
            column, which = columns[i, 0], columns[i, 1]
            if which >= 0:
                values[i] = 0
                for e in range(edges.shape[1]):
                    values[i] += edges[which, e] < x[column]  # NaN is above no edge
            else:
                values[i] = np.int64(x[column]) if column >= 0 else depth
        for c in range(strides.shape[0]):
            total = 0
            for i in range(columns.shape[0]):
                total += strides[c, i] * values[i]
            place = total % size  # never negative, even for -1, an unknown token
            accept += hashed[c, place, 0]
            next_ += hashed[c, place, 1]
        out[r, 0], out[r, 1] = accept, next_
