"""Which tokens of the streams of a batch are worth drafting and sending, weighed against each other.

Batches are given as `members` [M] and `starts` [G + 1]; see `policies.batches.Batches`. Sums run in the order of the members
or of descending values, so that a decision does not depend on the rows of the streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import copy_row, insert_desc, kernel, kernel_part


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
        # Anchors are verified with the tokens, and each stream commits a token of the target beside the accepted ones.
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
