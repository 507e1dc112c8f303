"""The scores of heads, row by row: layers of numbers, boosted trees, tables of tokens.

In one file, since numba asks only whether the file of a kernel has changed before it takes what it compiled earlier: what
kernels share has to stand with them. Each row is worked out by itself, so that its bits do not depend on how many there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import exact, kernel

# Rounded to single precision, in which an exported ONNX model clips at the same numbers (`onnx`).
LEAST_PROBABILITY = float(np.float32(1e-6))
MOST_PROBABILITY = float(np.float32(1.0) - np.float32(1e-6))
"""Where probabilities are clipped before their log-odds are taken."""

_LEAST_EXPONENT = -700.0  # e^700 is finite in double precision, e^710 is not
_ONE = np.uint64(1)


@exact
def _clipped(value: Any, low: Any, high: Any) -> Any:
    """Return the value within [low, high]; NaN, which is unknown, stays so."""
    # By comparisons, which NaN passes: `min` and `max` might return the bound in its place.
    if value < low:
        return low
    if value > high:
        return high
    return value


@exact
def _read(row: Any, bounds: Any, odds: Any, x: Any) -> None:
    """Write F' numbers to `x`: the features inside their bounds, then the log-odds of the probabilities among them."""
    width = row.shape[0]
    for i in range(width):
        x[i] = _clipped(row[i], bounds[0, i], bounds[1, i])
    for i in range(odds.shape[0]):
        # In double precision for `x` of either kind: single in `expand`, which heads are fitted on, double where they score.
        p = _clipped(np.float64(x[odds[i]]), LEAST_PROBABILITY, MOST_PROBABILITY)
        x[width + i] = np.log(p / (1.0 - p))


@exact
def _silu(z: Any) -> Any:
    """Return z / (1 + e^-z), which is nothing where e^-z would be infinite."""
    if z < _LEAST_EXPONENT:
        return 0.0
    return z / (1.0 + np.exp(-z))


@exact
def _check(features: Any, bounds: Any) -> None:
    if features.shape[1] != bounds.shape[1]:
        raise ValueError("the head reads another number of features")


@kernel("void(float32[:,::1], float32[:,::1], int64[::1], float32[:,::1])")
def expand(features: Any, bounds: Any, odds: Any, out: Any) -> None:
    """Write the columns [R, F'] of features [R, F].

    Args:
        features: NaN = unknown.
        bounds: [2, F], between which features are kept.
        odds: places of the probabilities whose log-odds are appended.
        out: [R, F'], F' = F + number of probabilities.
    """
    _check(features, bounds)
    for r in range(features.shape[0]):
        _read(features[r], bounds, odds, out[r])


@exact
def _through(x: Any, y: Any, sizes: Any, weights: Any, relu: Any) -> Any:
    """Put the numbers in `x` through layers; return the one of the two buffers that holds what comes out.

    Every input is added to all outputs at once: a loop over outputs is worked out several numbers at a time, a sum over
    inputs would not be, for its order is fixed.
    """
    at = 0  # of the bias of a layer, then of the weights of each input in turn
    for layer in range(sizes.shape[0] - 1):
        outputs = sizes[layer + 1]
        for o in range(outputs):
            y[o] = weights[at + o]
        for i in range(sizes[layer]):
            at += outputs
            value = x[i]
            if layer > 0:  # the activation stands between layers; what comes in has none
                value = (0.0 if value < 0.0 else value) if relu else _silu(value)  # NaN stays NaN
            column = weights[at : at + outputs]
            for o in range(outputs):
                y[o] += value * column[o]
        at += outputs
        x, y = y, x
    return x


@kernel("void(float32[:,::1], float32[:,::1], int64[::1], int64[::1], float64[::1], boolean, float64[:,::1])")
def score_layers(features: Any, bounds: Any, odds: Any, sizes: Any, weights: Any, relu: bool, out: Any) -> None:
    """Write what linear layers make of the columns of features, with SiLU or ReLU between the layers.

    Args:
        features, bounds, odds: see `expand`.
        sizes: F', the widths of the layers between, 2.
        weights: of each layer its bias [outputs], then its weights [inputs, outputs].
        relu: ReLU, not SiLU.
        out: [R, 2].
    """
    _check(features, bounds)
    widest = 0
    for i in range(sizes.shape[0]):
        widest = max(widest, sizes[i])
    x, y = np.empty(widest), np.empty(widest)
    for r in range(features.shape[0]):
        _read(features[r], bounds, odds, x)
        last = _through(x, y, sizes, weights, relu)
        out[r, 0] = last[0]
        out[r, 1] = last[1]


@kernel("void(float32[:,::1], float32[:,::1])")
def add_silu(x: Any, z: Any) -> None:
    """Add SiLU(z) to x, both [R, W]."""
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[r, i] += np.float32(_silu(np.float64(z[r, i])))


@exact
def _walk(x: Any, split: Any, threshold: Any, depth: Any, node: Any) -> None:
    """Write the node below the last inner ones that a row reaches in each tree.

    All trees go down a level together, for none of them waits for another. Whole numbers are unsigned, since an index that
    might be negative costs a comparison, of which there are thousands.
    """
    inner = np.uint64((1 << depth) - 1)
    for tree in range(node.shape[0]):
        node[tree] = 0
    for _ in range(depth):
        root = np.uint64(0)
        for tree in range(node.shape[0]):
            at = root + node[tree]
            # Nodes are numbered as in a heap: those below n are 2 n + 1 and 2 n + 2.
            node[tree] += node[tree] + _ONE + np.uint64(x[split[at]] >= threshold[at])
            root += inner


@exact
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
    """Write the sums of the leaves of complete trees of one depth D, half of them of the first output.

    Args:
        features, bounds: see `expand`.
        split: 2 f or 2 f + 1 for each inner node of each tree, f the feature: it is the odd one where an unknown value goes
            right. So a row is laid out twice, unknown values as less than anything and as more, and no node has to ask.
        threshold: of the same nodes; a row goes right where x >= threshold.
        leaf: 2^D of each tree.
        base: [2], added.
        depth: D.
        out: [R, 2].
    """
    _check(features, bounds)
    trees, width = leaf.shape[0] >> depth, features.shape[1]
    x, node = np.empty(2 * width, dtype=np.float32), np.empty(trees, dtype=np.uint64)
    for r in range(features.shape[0]):
        for i in range(width):
            value = _clipped(features[r, i], bounds[0, i], bounds[1, i])
            unknown = np.isnan(value)
            x[2 * i] = -np.inf if unknown else value
            x[2 * i + 1] = np.inf if unknown else value
        _walk(x, split, threshold, depth, node)
        out[r, 0] = base[0] + _sum_of_leaves(leaf, depth, node, 0, trees // 2)
        out[r, 1] = base[1] + _sum_of_leaves(leaf, depth, node, trees // 2, trees)


@exact
def _ranges(row: Any, depth: Any, columns: Any, edges: Any, values: Any) -> None:
    """Write what is crossed as whole numbers: token ids, the ranges that scalars fall in, the depth."""
    for i in range(columns.shape[0]):
        place, which = columns[i, 0], columns[i, 1]
        if place < 0:
            values[i] = depth
        elif which < 0:
            values[i] = np.int64(row[place])
        else:
            below = 0
            for e in range(edges.shape[1]):
                below += edges[which, e] < row[place]  # an unknown value, NaN, is above no edge
            values[i] = below


@exact
def _place(values: Any, strides: Any, cross: Any, size: Any) -> Any:
    """Return the place of a cross in its table."""
    total = 0
    for i in range(values.shape[0]):
        total += strides[cross, i] * values[i]
    return total % size  # as in Python never negative, also for -1, an unknown token


@kernel("void(float32[:,::1], int64[::1], int64[:,::1], float32[:,::1], int64[:,::1], int64, int64[:,::1])")
def cross_places(features: Any, depth: Any, columns: Any, edges: Any, strides: Any, size: int, out: Any) -> None:
    """Write the places [R, C] of hashed features, whose tables lie end to end; see `feature_hashing.HashedFeatures`.

    Args:
        features: [R, F].
        depth: [R].
        columns: [U, 2] of what is crossed: its feature, or -1 for the depth; its row of `edges`, or -1 for a token.
        edges: [J, E], ascending.
        strides: [C, U].
        size: of each table.
        out: [R, C].
    """
    values = np.empty(columns.shape[0], dtype=np.int64)
    for r in range(features.shape[0]):
        _ranges(features[r], depth[r], columns, edges, values)
        for c in range(strides.shape[0]):
            out[r, c] = c * size + _place(values, strides, c, size)


@kernel(
    "void(float32[:,::1], int64, float32[:,::1], int64[::1], float64[:,::1], float64[:,::1], int64[::1], float32[:,:,::1], "
    "int64[:,::1], float32[:,::1], int64[:,::1], float32[:,:,::1], float64[:,::1])"
)
def score_tokens(
    features: Any, depth: int, bounds: Any, odds: Any, weights: Any, start: Any, ids: Any, tables: Any, columns: Any,
    edges: Any, strides: Any, hashed: Any, out: Any,
) -> None:  # fmt: skip
    """Write sums of a number for the depth, weighted columns, a number for each token and each cross.

    Args:
        features, bounds, odds: see `expand`.
        depth: of all rows.
        weights: [F', 2] of the columns.
        start: [K + 1, 2] by depth, the last one beyond.
        ids: [I] the features that are tokens.
        tables: [I, V, 2] of the tokens; one that lies outside counts as 0.
        columns, edges, strides: see `cross_places`.
        hashed: [C, B, 2] of the places.
        out: [R, 2].
    """
    _check(features, bounds)
    size, begin = hashed.shape[1], start[min(depth, start.shape[0] - 1)]
    x, values = np.empty(weights.shape[0]), np.empty(columns.shape[0], dtype=np.int64)
    for r in range(features.shape[0]):
        _read(features[r], bounds, odds, x)
        accept, next_ = begin[0], begin[1]
        for i in range(weights.shape[0]):
            accept += weights[i, 0] * x[i]
            next_ += weights[i, 1] * x[i]
        for i in range(ids.shape[0]):
            token = x[ids[i]]
            if 0.0 <= token < tables.shape[1]:  # -1 is an unknown token
                found = tables[i, np.int64(token)]
                accept += found[0]
                next_ += found[1]
        if strides.shape[0] > 0:  # none at depth 0
            _ranges(x, depth, columns, edges, values)
            for c in range(strides.shape[0]):
                found = hashed[c, _place(values, strides, c, size)]
                accept += found[0]
                next_ += found[1]
        out[r, 0] = accept
        out[r, 1] = next_
