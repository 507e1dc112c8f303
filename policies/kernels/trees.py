"""The decisions of the learned tree policy: what is read, how it survives, what is extended, which nodes are verified."""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import argsort_desc, kernel, kernel_part

# Log-odds of 60 are a probability of 1 in double precision, and their exponential is far from infinite.
# The edges hold chances away from 0 and 1 where log-odds are taken: the ones that the fit used (`train.fit.trees.calibrate`).
_STEEPEST, _EDGE, _SHARE_EDGE = 60.0, 1e-6, 1e-4
_LEAST = 1e-9
"""Below this survival what is left of it is not told apart from `next`."""


@kernel_part
def _sigmoid(odds: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-min(max(odds, -_STEEPEST), _STEEPEST)))


@kernel_part
def _path_chance(parent_chance: Any, logit: Any, row: Any) -> Any:
    """Return the chance of a whole path, of that of its parent's; `row`: scale, tilt and shift. See `PathCalibrator`."""
    product = min(max(parent_chance * _sigmoid(logit), _EDGE), 1.0 - _EDGE)
    # A path is accepted only if what it begins with is, so it never has more than `parent_chance`, whatever the fit says.
    return min(_sigmoid(row[0] * np.log(product / (1.0 - product)) + row[1] * logit + row[2]), parent_chance)


@kernel_part
def _share(chance: Any, rank: Any, shares: Any) -> Any:
    """Return the chance that the child of a rank is accepted, given that of the best one."""
    if rank == 0:
        return chance
    at = min(rank, shares.shape[0] - 1)  # row 0 stands for the best child; ranks beyond the table count as its last
    inside = min(max(chance, _SHARE_EDGE), 1.0 - _SHARE_EDGE)
    return 1.0 / (1.0 + np.exp(-shares[at, 0] - shares[at, 1] * np.log(inside / (1.0 - inside))))


@kernel("void(int64[::1], int64[::1])")
def sibling_ranks(parent: Any, out: Any) -> None:
    """Write the rank [N] of each node among its siblings, which stand in order.

    Args:
        parent: [N], -1 = the root.
        out: [N].
    """
    below = np.zeros(parent.shape[0] + 1, dtype=np.int64)
    for node in range(parent.shape[0]):
        out[node] = below[parent[node]]  # the last one is the root's
        below[parent[node]] += 1


@kernel("void(float64[:,::1], float64[:,::1], float64[:,::1], float64[:,::1])")
def path_chances(parent_chance: Any, logits: Any, maps: Any, out: Any) -> None:
    """Write [R, B] chances of paths.

    Args:
        parent_chance, logits: [R, B]; see `PathCalibrator.of`.
        maps: [B, 3] scale, tilt and shift.
        out: [R, B].
    """
    for r in range(out.shape[0]):
        for b in range(out.shape[1]):
            out[r, b] = _path_chance(parent_chance[r, b], logits[r, b], maps[b])


@kernel(
    "int64(boolean[:,::1], int64[:,::1], float32[:,:,::1], float64[:,:,::1], int64[::1], float64[::1], float64[::1], "
    "float64, float64[:,::1], int64[::1], float64[::1], float32[:,::1])"
)
def ask(
    alive: Any, parent: Any, features: Any, before: Any, ranks: Any, mean: Any, mean_parent: Any, floor: float,
    shares: Any, rows: Any, parent_chance: Any, read: Any,
) -> int:  # fmt: skip
    """Write which branches of a depth are read and return their number: those alive that may survive with `floor`.

    Args:
        alive, parent: [S, B].
        features: [S, B, F].
        before: [S, 2, B'] survival and next of the depth before, survival below 0 where it was not read; none = it is not
            known.
        ranks, mean: [B] of the branches, and their mean survival.
        mean_parent: [P] mean survival of the branches of the depth before, the last one that of all others.
        floor: see `TreeRule`.
        shares: [., 2].
        rows: [S B] gets the places s B + b of the branches.
        parent_chance: [S B] gets the survival of their parents.
        read: [S B, F] gets their features.
    """
    count, width = 0, alive.shape[1]
    for s in range(alive.shape[0]):
        for b in range(width):
            if not alive[s, b]:
                continue
            p = parent[s, b]
            if p < before.shape[2]:
                # -1 where the parent was not read: nothing is expected below it.
                inherited = max(before[s, 0, p], 0.0)
                expected = inherited * _share(before[s, 1, p], ranks[b], shares)
            else:
                inherited, expected = mean_parent[min(p, mean_parent.shape[0] - 1)], mean[b]  # as training has it
            if expected >= floor:
                rows[count], parent_chance[count] = s * width + b, inherited
                for f in range(features.shape[2]):
                    read[count, f] = features[s, b, f]
                count += 1
    return count


@kernel("void(float64[:,::1], int64[::1], float64[::1], float64[:,:,::1], boolean, float64[:,:,::1])")
def survive(scores: Any, rows: Any, parent_chance: Any, maps: Any, root: bool, out: Any) -> None:
    """Write survival and next of the branches of a depth: -1 and 0 where a branch was not read.

    Args:
        scores: [R, 2] accept and next of the head.
        rows, parent_chance: of these branches; see `ask`.
        maps: [2, B, 3] of both outputs; see `path_chances`.
        root: whether this is depth 0, where nothing was drawn that could be refused.
        out: [S, 2, B].
    """
    for s in range(out.shape[0]):
        for b in range(out.shape[2]):
            out[s, 0, b], out[s, 1, b] = -1.0, 0.0
    for r in range(scores.shape[0]):
        s, b = rows[r] // out.shape[2], rows[r] % out.shape[2]
        survival = 1.0 if root else _path_chance(parent_chance[r], scores[r, 0], maps[0, b])
        out[s, 0, b] = survival
        # What is calibrated is the chance of the whole path to the best child; `next` is that given this branch.
        out[s, 1, b] = _path_chance(survival, scores[r, 1], maps[1, b]) / max(survival, _LEAST)


@kernel_part
def _price(values: Any, tokens: Any, rises: Any, best: Any) -> Any:
    """Return what a further node must be worth; `best` is scratch."""
    # The M best, inserted one by one: a sort of all would do the work of the many that are never looked at.
    kept = 0
    for i in range(values.shape[0]):
        value = values[i]
        if kept < best.shape[0]:
            kept += 1
        elif not value > best[kept - 1]:
            continue
        at = kept - 1
        while at > 0 and value > best[at - 1]:
            best[at] = best[at - 1]
            at -= 1
        best[at] = value
    # Nodes that were not read stand at -1 and come last: each lowers the total, so that the best number leaves them out.
    total, top, count, least = 0.0, 0.0, 0, np.inf
    for i in range(kept):
        total += best[i]
        if total - tokens[i + 1] > top:
            top, count, least = total - tokens[i + 1], i + 1, best[i]
    # With all places taken a new node displaces the least one kept; before, it costs what verifying one more does.
    return max(min(rises[count], least), 0.0)


@kernel("void(float64[:,:,::1], float64[::1], float64[::1], float64[::1])")
def price(known: Any, tokens: Any, rises: Any, out: Any) -> None:
    """Write [S], what a further node must be worth: what verifying one more costs, or the least node that it displaces.

    Args:
        known: [S, 2, N] survival of the nodes so far, and next.
        tokens: [M + 1] what verifying 0, 1, ... nodes costs; only the M best nodes are looked at.
        rises: [M + 1] by number of nodes, the least that each of some further nodes costs.
        out: [S].
    """
    best = np.empty(tokens.shape[0] - 1)
    for s in range(out.shape[0]):
        out[s] = _price(known[s, 0], tokens, rises, best)


@kernel_part
def _extend(
    survival: Any, next_: Any, limit: Any, counts: Any, costs: Any, decay: Any, shares: Any, width: Any, best: Any,
    order: Any, gains: Any, out: Any,
) -> None:  # fmt: skip
    """Write which branches of one stream are extended; `best`, `order` and `gains` are scratch."""
    for b in range(out.shape[0]):
        best[b] = max(survival[b], 0.0) * next_[b] if counts[b] > 0 else 0.0  # survival of the best child
        out[b] = False
    argsort_desc(best, order)
    for t in range(gains.shape[0]):
        gains[t] = 0.0
    # gains[t]: survival above the price in t + 1 levels below the best branches so far. The pair of branches and levels of
    # the most gain less cost decides, but only the branches are kept: how deep to go is asked again a level later.
    top, rows = 0.0, 0
    for m in range(min(width, out.shape[0])):
        b = order[m]
        worth = 0.0
        # One level deeper the children beside the best count too; further down they are too unlikely to change m or t.
        for t in range(decay.shape[0]):
            more = max(best[b] * decay[t] - limit, 0.0)
            if t == 0 and best[b] > 0.0:
                others = 0.0
                for rank in range(1, counts[b]):
                    others += max(survival[b] * _share(next_[b], rank, shares) - limit, 0.0)
                more += others
            worth += more
            gains[t] += worth
            if gains[t] - costs[m, t] > top:
                top, rows = gains[t] - costs[m, t], m + 1
    for m in range(rows):  # a branch worth nothing may stand among them where all are
        out[order[m]] = best[order[m]] > 0.0


@kernel(
    "void(float64[:,:,::1], float64[::1], int64[::1], float64[:,::1], float64[::1], float64[:,::1], int64, "
    "boolean[:,::1])"
)
def extend(
    level: Any, limit: Any, counts: Any, costs: Any, decay: Any, shares: Any, width: int, out: Any
) -> None:  # fmt: skip
    """Write [S, B], the branches to extend.

    Args:
        level: [S, 2, B] survival and next of the branches; survival below 0 where there is none.
        limit: [S] what a further node must be worth.
        counts: [B] children of each branch.
        costs: [B, T] of extending 1..B branches by 1..T levels.
        decay: [T] the share of a best child's survival that the best node 0, 1, ... levels below it should have.
        shares: [., 2].
        width: most branches that are extended.
        out: [S, B].
    """
    best, order, gains = np.empty(out.shape[1]), np.empty(out.shape[1], dtype=np.int64), np.empty(decay.shape[0])
    for s in range(out.shape[0]):
        _extend(
            level[s, 0], level[s, 1], limit[s], counts, costs, decay, shares, width, best, order, gains, out[s]
        )  # fmt: skip


@kernel_part
def _known_nodes(depth: Any, columns: Any, first: Any) -> Any:
    """Return the nodes (begin, end) that are known; none where `columns` do not end with a level, so are of another tree."""
    count, begin = depth.shape[0], 0
    while begin < count and depth[begin] < first:
        begin += 1
    end = begin + columns
    if columns == 0 or end > count or (end < count and depth[end] == depth[end - 1]):
        end = begin
    return begin, end


@kernel(
    "void(int64[:,::1], int64[:,::1], boolean[:,::1], float64[:,:,::1], int64, float64[::1], float64[:,::1], "
    "float64[:,::1])"
)
def node_survival(
    parent: Any, depth: Any, drawn: Any, known: Any, first: int, typical: Any, shares: Any, out: Any
) -> None:  # fmt: skip
    """Write [S, N], the survival of all nodes; where it is not known what is expected, given its parent; -1 if not drawn.

    Args:
        parent, depth, drawn: [S, N] of the nodes, by depth.
        known: [S, 2, N'] survival and next of the nodes from depth `first` on, as far as they were read.
        first: 1 or more.
        typical: [K] mean chance that the best child is accepted, by its depth from 1 on.
        shares: [., 2].
        out: [S, N].
    """
    count = parent.shape[1]
    # `next_` stays unwritten where no node was drawn; only drawn nodes look up their parents, which were drawn too.
    next_, ranks = np.empty(count), np.empty(count, dtype=np.int64)
    for s in range(out.shape[0]):
        sibling_ranks(parent[s], ranks)
        begin, end = _known_nodes(depth[s], known.shape[2], first)
        for node in range(count):
            out[s, node] = -1.0
            if not drawn[s, node]:
                continue
            parent_node = parent[s, node]
            inherited = out[s, parent_node] if parent_node >= 0 else 1.0
            if begin <= node < end and known[s, 0, node - begin] >= 0.0:
                # No node survives its parent, whatever two calibrations say: what is selected stays closed under parents.
                out[s, node] = min(known[s, 0, node - begin], inherited)
                next_[node] = known[s, 1, node - begin]
            else:
                chance = next_[parent_node] if parent_node >= 0 else typical[0]
                out[s, node] = inherited * _share(chance, ranks[node], shares)
                next_[node] = typical[min(depth[s, node], typical.shape[0] - 1)]  # typical[d] is of depth d + 1


@kernel("void(float64[:,::1], float64[::1], boolean[:,::1])")
def select(values: Any, tokens: Any, out: Any) -> None:
    """Write [S, N], the nodes to verify: the best, as many as are worth most.

    Args:
        values: [S, N] survival; below 0 where there is no node.
        tokens: [N + 1] what verifying 0..N nodes costs.
        out: [S, N].
    """
    order = np.empty(values.shape[1], dtype=np.int64)
    for s in range(out.shape[0]):
        # Equals keep their order and no node exceeds its parent, so the best n are closed under parents.
        argsort_desc(values[s], order)
        total, top, count = 0.0, 0.0, 0
        for i in range(order.shape[0]):
            total += values[s, order[i]]
            if total - tokens[i + 1] > top:
                top, count = total - tokens[i + 1], i + 1
        for i in range(order.shape[0]):
            out[s, order[i]] = i < count and values[s, order[i]] >= 0.0


@kernel("void(float32[:,::1], boolean[:,::1], float64, float64, float64[::1], boolean[:,::1])")
def keep_worth(values: Any, alive: Any, follow: float, each: float, prices: Any, kept: Any) -> None:
    """Keep the n best, n >= 0 the one of the largest sum of follow e^value - each over them, less the price of n.

    Args:
        values, alive: [S, N]; -infinity if not alive.
        follow, each: see above.
        prices: [N] of 1, 2, ...
        kept: [S, N], all False, is written.
    """
    order = np.empty(values.shape[1], dtype=np.int64)
    for s in range(values.shape[0]):
        argsort_desc(values[s], order)
        count, most, total = 0, 0.0, 0.0
        for i in range(order.shape[0]):
            total += follow * np.exp(np.float64(values[s, order[i]])) - each
            if total - prices[i] > most:
                count, most = i + 1, total - prices[i]
        for i in range(count):
            kept[s, order[i]] = alive[s, order[i]]


@kernel("void(float32[:,::1], int64[::1], boolean[:,::1], float64, float32[:,::1])")
def value_nodes(levels: Any, parent: Any, drawn: Any, guess: float, out: Any) -> None:
    """Write the log-probability of the path to each node, at most that of its parent; -infinity where none was drawn.

    Args:
        levels: [S, M] of the first M nodes; -infinity = not asked about, as nodes from M on.
        parent: [N], -1 = root; parents come first.
        drawn: [S, N].
        guess: what a node that was not asked about has more than its parent, once for itself and once for each better
            sibling.
        out: [S, N].
    """
    siblings = np.empty(parent.shape[0], dtype=np.int64)
    sibling_ranks(parent, siblings)
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
