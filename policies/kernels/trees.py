"""Decisions about trees and batches: what is read, how it survives, what is extended, which nodes are verified.

Batches are given as `members` [M] and `starts` [G + 1]; see `policies.batch_rules.Batches`. Sums run in the order of the
members or of descending values, so that a decision does not depend on the rows of the streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import argsort_desc, copy_row, insert_desc, kernel, kernel_part, sigmoid


@kernel_part
def _sort_offered(values: Any, offered: Any, rows: Any, best: Any, places: Any) -> Any:
    """Write the values [S, N] offered by `rows`, in descending order, and their places s N + n; return their number."""
    # Equal values are in the order of nodes, then of streams: parents come before their children.
    count, nodes = 0, values.shape[1]
    for n in range(nodes):
        for i in range(rows.shape[0]):
            if not offered[rows[i], n]:
                continue
            value, at = values[rows[i], n], count
            while at > 0 and best[at - 1] < value:  # values fall from depth to depth, so that few are moved
                best[at], places[at] = best[at - 1], places[at - 1]
                at -= 1
            best[at], places[at] = value, rows[i] * nodes + n
            count += 1
    return count


@kernel("void(f8[:,::1], b1[:,::1], i8[::1], i8[::1], i8[::1], b1[:,::1])")
def send_best(values: Any, offered: Any, members: Any, starts: Any, budgets: Any, sent: Any) -> None:
    """Mark in `sent` [S, N], all False, the `budgets` [G] largest of the offered values of each batch."""
    nodes = values.shape[1]
    best, places = np.empty(values.size), np.empty(values.size, dtype=np.int64)
    for g in range(starts.shape[0] - 1):
        count = _sort_offered(values, offered, members[starts[g] : starts[g + 1]], best, places)
        for i in range(min(count, budgets[g])):
            sent[places[i] // nodes, places[i] % nodes] = True


@kernel_part
def _best_number(values: Any, least: Any, count: Any, streams: Any, rate: Any, spent: Any, verify: Any) -> Any:
    """Return what verifying the best number, from `least` to `count`, of descending values is worth, and that number.

    The worth is in tokens less their price, or in tokens per second if the rate is 0; see `Batches.best_budgets`.
    """
    total, top, best = 0.0, -np.inf, least
    for m in range(count + 1):
        total += values[m - 1] if m else 0.0
        # Anchors are verified with the tokens, and each stream commits a token of the target after the accepted ones.
        seconds = verify[streams, streams + m]
        worth = total - rate * seconds if rate != 0.0 else (streams + total) / (spent + seconds)
        # All numbers are tried: costs that rise in steps may make more tokens pay where a few do not.
        if m >= least and worth > top:
            top, best = worth, m
    return top, best


@kernel("void(f8[:,::1], b1[:,::1], i8[::1], i8[::1], f8[::1], f8[:,::1], f8[::1], i8[::1])")
def best_budgets(
    values: Any, offered: Any, members: Any, starts: Any, spent: Any, verify: Any, rates: Any, budgets: Any
) -> None:
    """Write the best number of tokens [G] of each batch; arguments as of `Batches.best_budgets`."""
    best, places = np.empty(values.size), np.empty(values.size, dtype=np.int64)
    for g in range(starts.shape[0] - 1):
        rows = members[starts[g] : starts[g + 1]]
        streams, count = rows.shape[0], _sort_offered(values, offered, rows, best, places)
        _, budgets[g] = _best_number(best, 0, count, streams, rates[streams], spent[g], verify)


@kernel(
    "void(i8[::1], i8[::1], b1[:,::1], f8[:,::1], f8[:,::1], b1, i8, f8[:,::1], f8[:,::1], f8[::1], f8[::1], b1[:,::1])"
)
def draft_on(
    members: Any, starts: Any, alive: Any, known: Any, gains: Any, trims: bool, depth: int, drafts: Any, verify: Any,
    rates: Any, ahead: Any, kept: Any,
) -> None:  # fmt: skip
    """Mark the branches of each batch that are worth drafting on: the best pair of their number and of further steps.

    Args:
        members, starts: of the batches.
        alive: [S, B] branches that could be extended.
        known: [S, M] survival of the tokens drafted so far; below 0 = not drafted.
        gains: [S, B] expected survival of the next token after each branch.
        trims: only the best drafted tokens are sent, else all.
        depth: draft steps taken so far.
        drafts, verify: see `CostGrid`.
        rates: [R] tokens that a second is worth, by streams.
        ahead: [L] expected survival of the token 0, 1, ... after the next one, as a share of that one's.
        kept: [S, B], all False, is written.
    """
    branches, size = alive.shape[1], known.size + alive.size * ahead.shape[0]
    pool, grown = np.empty(size), np.empty(size)
    best_gains, places = np.empty(alive.size), np.empty(alive.size, dtype=np.int64)
    for g in range(starts.shape[0] - 1):
        members_g = members[starts[g] : starts[g + 1]]
        streams, rate, count = members_g.shape[0], rates[members_g.shape[0]], 0
        rows = _sort_offered(gains, alive, members_g, best_gains, places)
        if rows == 0:
            continue
        for i in range(streams):
            for n in range(known.shape[1]):
                if known[members_g[i], n] >= 0.0:
                    insert_desc(pool, count, known[members_g[i], n])
                    count += 1
        best, _ = _best_number(pool, 0 if trims else count, count, streams, rate, 0.0, verify)  # of stopping now
        take = 0
        for steps in range(1, ahead.shape[0] + 1):
            copy_row(pool[:count], grown)  # reset for each number of steps
            total = count
            for r in range(rows):
                seconds = 0.0
                for step in range(steps):
                    insert_desc(grown, total, best_gains[r] * ahead[step])
                    total += 1
                    # Gains fall, so the best r + 1 branches are the first ones; all steps read r + 1 rows.
                    seconds += drafts[min(depth + step, 1), r + 1]
                worth, _ = _best_number(grown, 0 if trims else total, total, streams, rate, 0.0, verify)
                if worth - rate * seconds > best:
                    best, take = worth - rate * seconds, r + 1
        for r in range(take):
            kept[places[r] // branches, places[r] % branches] = True


# Bounds of log-odds, where a probability is 1 in double precision, and of chances before log-odds are taken of them. The
# latter are those of the fit (`train.fit.tree_rules`).
_MAX_ODDS, _EDGE, _SHARE_EDGE = 60.0, 1e-6, 1e-4
_MIN_SURVIVAL = 1e-9  # of a division


@kernel_part
def _bounded_sigmoid(odds: Any) -> Any:
    return sigmoid(min(max(odds, -_MAX_ODDS), _MAX_ODDS))


@kernel_part
def _path_chance(parent_chance: Any, logit: Any, row: Any) -> Any:
    """Return the chance of a path given its parent's; `row` is scale, tilt and shift. See `PathCalibrator`."""
    product = min(max(parent_chance * _bounded_sigmoid(logit), _EDGE), 1.0 - _EDGE)
    # A path is accepted only if the path of its parent is, independent of the fit.
    return min(_bounded_sigmoid(row[0] * np.log(product / (1.0 - product)) + row[1] * logit + row[2]), parent_chance)


@kernel_part
def _share(chance: Any, rank: Any, shares: Any) -> Any:
    """Return the chance that the child of a rank is accepted, given that of the best one."""
    if rank == 0:
        return chance
    at = min(rank, shares.shape[0] - 1)  # row 0 stands for the best child; ranks beyond the table count as its last
    inside = min(max(chance, _SHARE_EDGE), 1.0 - _SHARE_EDGE)
    return sigmoid(shares[at, 0] + shares[at, 1] * np.log(inside / (1.0 - inside)))


@kernel_part
def _sibling_ranks(parent: Any, out: Any) -> None:
    """Write the rank [N] of each node among its siblings; the parent [N] of a child of the root is -1."""
    counts = np.zeros(parent.shape[0] + 1, dtype=np.int64)  # the last entry is the root's
    for node in range(parent.shape[0]):
        out[node] = counts[parent[node]]
        counts[parent[node]] += 1


@kernel("void(f8[:,::1], f8[:,::1], f8[:,::1], f8[:,::1])")
def path_chances(parent_chance: Any, logits: Any, maps: Any, out: Any) -> None:
    """Write [R, B] chances of paths, given those of the parents, logits [R, B] and maps [B, 3]; see `PathCalibrator.of`."""
    for r in range(out.shape[0]):
        for b in range(out.shape[1]):
            out[r, b] = _path_chance(parent_chance[r, b], logits[r, b], maps[b])


@kernel(
    "int64(b1[:,::1], i8[:,::1], f4[:,:,::1], f8[:,:,::1], i8[::1], f8[::1], f8[::1], f8, f8[:,::1], i8[::1], f8[::1], "
    "f4[:,::1])"
)
def read_branches(
    alive: Any, parent: Any, features: Any, before: Any, ranks: Any, mean: Any, mean_parent: Any, floor: float,
    shares: Any, rows: Any, parent_chance: Any, read: Any,
) -> int:  # fmt: skip
    """Write the branches of a depth that are alive and may survive with `floor`, and return their number R.

    Args:
        alive, parent, features: see `DraftStep`.
        before: [S, 2, B'] survival and next of the depth before, survival below 0 where it was not read; B' = 0: not known.
        ranks, mean, mean_parent, floor: see `LevelTable`.
        shares: [R, 2] log-odds of children by rank; see `TreeRule.shares`.
        rows: [S B], written: the indices s B + b of the branches.
        parent_chance: [S B], written: the survival of their parents.
        read: [S B, F], written: their features.
    """
    count, width = 0, alive.shape[1]
    for s in range(alive.shape[0]):
        for b in range(width):
            if not alive[s, b]:
                continue
            p = parent[s, b]
            inherited, expected = mean_parent[min(p, mean_parent.shape[0] - 1)], mean[b]  # as in training
            if p < before.shape[2]:
                inherited = max(before[s, 0, p], 0.0)  # -1 if the parent was not read
                expected = inherited * _share(before[s, 1, p], ranks[b], shares)
            if expected >= floor:
                rows[count], parent_chance[count] = s * width + b, inherited
                copy_row(features[s, b], read[count])
                count += 1
    return count


@kernel("void(f8[:,::1], i8[::1], f8[::1], f8[:,:,::1], b1, f8[:,:,::1])")
def survive(scores: Any, rows: Any, parent_chance: Any, maps: Any, root: bool, out: Any) -> None:
    """Write survival and next [S, 2, B] of the branches of a depth: -1 and 0 where a branch was not read.

    Args:
        scores: [R, 2] accept and next of the head.
        rows, parent_chance: of these branches; see `read_branches`.
        maps: [2, B, 3] of both outputs; see `path_chances`.
        root: whether this is depth 0, where nothing was drawn that could be rejected.
        out: written.
    """
    for s in range(out.shape[0]):
        for b in range(out.shape[2]):
            out[s, 0, b], out[s, 1, b] = -1.0, 0.0
    for r in range(scores.shape[0]):
        s, b = rows[r] // out.shape[2], rows[r] % out.shape[2]
        survival = 1.0 if root else _path_chance(parent_chance[r], scores[r, 0], maps[0, b])
        out[s, 0, b] = survival
        # The chance of the whole path to the best child is calibrated; `next` is that chance given this branch.
        out[s, 1, b] = _path_chance(survival, scores[r, 1], maps[1, b]) / max(survival, _MIN_SURVIVAL)


@kernel_part
def _price(values: Any, tokens: Any, rises: Any, best: Any) -> Any:
    """Return the price of a further node: verifying one more, or the node that it displaces; `best` [M] is scratch."""
    # The M best, inserted one by one: sorting all would be slower.
    kept = 0
    for value in values:
        if kept < best.shape[0]:
            kept += 1
        elif not value > best[kept - 1]:
            continue
        insert_desc(best, kept - 1, value)
    # Nodes that were not read have -1 and come last: each lowers the total, so that the best number excludes them.
    total, top, count, smallest = 0.0, 0.0, 0, np.inf
    for i in range(kept):
        total += best[i]
        if total - tokens[i + 1] > top:
            top, count, smallest = total - tokens[i + 1], i + 1, best[i]
    # If all places are taken, a new node displaces the smallest one that is kept.
    return max(min(rises[count], smallest), 0.0)


@kernel("void(f8[:,:,::1], f8[:,:,::1], f8[::1], f8[::1], i8[::1], f8[:,::1], f8[::1], f8[:,::1], i8, b1[:,::1])")
def extend(
    level: Any, known: Any, tokens: Any, rises: Any, counts: Any, costs: Any, decay: Any, shares: Any, width: int, out: Any
) -> None:  # fmt: skip
    """Write [S, B], the branches to extend.

    Args:
        level, known: see `TreeRule.extend`.
        tokens: [M + 1] price of verifying 0, 1, ... nodes; only the M best nodes are considered.
        rises: [M + 1] see `TreeRule`.
        counts, costs, decay: see `LevelTable`.
        shares: [., 2].
        width: maximum number of extended branches.
        out: written.
    """
    branches, scratch = out.shape[1], np.empty(tokens.shape[0] - 1)
    best, order, gains = np.empty(branches), np.empty(branches, dtype=np.int64), np.empty(decay.shape[0])
    for s in range(out.shape[0]):
        limit = _price(known[s, 0], tokens, rises, scratch)
        for b in range(branches):
            best[b] = max(level[s, 0, b], 0.0) * level[s, 1, b] if counts[b] > 0 else 0.0  # survival of the best child
            out[s, b] = False
        argsort_desc(best, order)
        gains.fill(0.0)
        # gains[t]: survival above the price in t + 1 levels below the best branches so far. The pair of branches and levels
        # of the largest gain less cost decides, but only the branches are kept: the depth is decided anew a level later.
        top, rows = 0.0, 0
        for m in range(min(width, branches)):
            b, worth = order[m], 0.0
            for t in range(decay.shape[0]):
                more = max(best[b] * decay[t] - limit, 0.0)
                # The other children count one level deeper only: further down they are too unlikely to change m or t.
                if t == 0 and best[b] > 0.0:
                    others = 0.0
                    for rank in range(1, counts[b]):
                        others += max(level[s, 0, b] * _share(level[s, 1, b], rank, shares) - limit, 0.0)
                    more += others
                worth += more
                gains[t] += worth
                if gains[t] - costs[m, t] > top:
                    top, rows = gains[t] - costs[m, t], m + 1
        for m in range(rows):  # if costs are 0, branches without value may be among them
            out[s, order[m]] = best[order[m]] > 0.0


@kernel("void(i8[:,::1], i8[:,::1], b1[:,::1], f8[:,:,::1], i8, f8[::1], f8[:,::1], f8[:,::1])")
def node_survival(
    parent: Any, depth: Any, drawn: Any, known: Any, first: int, typical: Any, shares: Any, out: Any
) -> None:  # fmt: skip
    """Write [S, N], the survival of all nodes: expected from the parent's if it is not known, -1 if not drawn.

    Args:
        parent, depth, drawn: [S, N] of the nodes, by depth.
        known: [S, 2, N'] survival and next of the nodes from depth `first` on, as far as they were read.
        first: 1 or more.
        typical: [K] mean chance that the best child is accepted, by its depth from 1 on.
        shares: [., 2].
        out: written.
    """
    count = parent.shape[1]
    # `next_` is not initialised: only drawn nodes look up their parents, which were drawn too.
    next_, ranks = np.empty(count), np.empty(count, dtype=np.int64)
    for s in range(out.shape[0]):
        _sibling_ranks(parent[s], ranks)
        begin = 0
        while begin < count and depth[s, begin] < first:
            begin += 1
        end = begin + known.shape[2]
        if end == begin or end > count or (end < count and depth[s, end] == depth[s, end - 1]):
            end = begin  # `known` does not end with a level, so it is of another tree
        for node in range(count):
            out[s, node] = -1.0
            if not drawn[s, node]:
                continue
            above = parent[s, node]
            inherited = out[s, above] if above >= 0 else 1.0
            if begin <= node < end and known[s, 0, node - begin] >= 0.0:
                # At most the parent's, for any pair of calibrations: the selected nodes must be closed under parents.
                out[s, node], next_[node] = min(known[s, 0, node - begin], inherited), known[s, 1, node - begin]
            else:
                out[s, node] = inherited * _share(next_[above] if above >= 0 else typical[0], ranks[node], shares)
                next_[node] = typical[min(depth[s, node], typical.shape[0] - 1)]  # typical[d] is of depth d + 1


@kernel("void(f8[:,::1], b1[:,::1], f8[::1], b1[:,::1])")
def keep_worth(values: Any, alive: Any, prices: Any, kept: Any) -> None:
    """Mark in `kept` [S, N] the best of `values` that are worth most above `prices` [N or more] of 1, 2, ... of them."""
    order = np.empty(values.shape[1], dtype=np.int64)
    for s in range(values.shape[0]):
        # Equal values keep their order and no node exceeds its parent, so the best n are closed under parents.
        argsort_desc(values[s], order)
        count, top, total = 0, 0.0, 0.0
        for i in range(order.shape[0]):
            total += values[s, order[i]]
            if total - prices[i] > top:
                count, top = i + 1, total - prices[i]
        for i in range(order.shape[0]):
            kept[s, order[i]] = i < count and alive[s, order[i]]


@kernel("void(f4[:,::1], i8[::1], b1[:,::1], f8, f4[:,::1])")
def value_nodes(levels: Any, parent: Any, drawn: Any, guess: float, out: Any) -> None:
    """Write the log-probability of the path to each node [S, N], at most its parent's; -infinity if not drawn.

    Args:
        levels: [S, M] of the first M nodes; -infinity = without a decision, like all nodes from M on.
        parent: [N], -1 = root; parents come first.
        drawn: [S, N].
        guess: added to the parent's value at a node without a decision, once for itself and once for each better sibling.
        out: written.
    """
    siblings = np.empty(parent.shape[0], dtype=np.int64)
    _sibling_ranks(parent, siblings)
    for s in range(out.shape[0]):
        for n in range(parent.shape[0]):
            parent_value = np.float64(out[s, parent[n]]) if parent[n] >= 0 else 0.0  # the root: log 1
            out[s, n] = parent_value + guess * (1 + siblings[n])
            if n < levels.shape[1] and levels[s, n] > -np.inf:
                out[s, n] = min(np.float64(levels[s, n]), parent_value)
        for n in range(parent.shape[0]):
            if not drawn[s, n]:
                out[s, n] = -np.inf
