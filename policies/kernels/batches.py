"""Which tokens of the streams of a batch are worth drafting and sending, weighed against each other (`policies.joint`).

Batches are given by `members` [M], streams, batch after batch, and `starts` [G + 1], where each begins; within a batch
streams stand in the order of their keys, and sums run in that order or in that of falling values: what is decided for a
stream does not depend on its row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import copy_row, kernel, kernel_part


@kernel_part
def _gathered(values: Any, offered: Any, mine: Any, found: Any, places: Any) -> Any:
    """Write the values offered by some streams, falling, and their places s N + n; return how many.

    Of equal ones the first node comes first, then the first stream: parents stand before their children.
    """
    count, nodes = 0, values.shape[1]
    for n in range(nodes):
        for i in range(mine.shape[0]):
            if not offered[mine[i], n]:
                continue
            value, at = values[mine[i], n], count
            while at > 0 and found[at - 1] < value:  # depth by depth values fall, so that few are moved
                found[at], places[at] = found[at - 1], places[at - 1]
                at -= 1
            found[at], places[at] = value, mine[i] * nodes + n
            count += 1
    return count


@kernel("void(float64[:,::1], boolean[:,::1], int64[::1], int64[::1], int64[::1], boolean[:,::1])")
def send_best(values: Any, offered: Any, members: Any, starts: Any, budgets: Any, sent: Any) -> None:
    """Mark the largest values of each batch.

    Args:
        values: [S, N], none above its parent's.
        offered: [S, N].
        members, starts: of the batches.
        budgets: [G] how many of each.
        sent: [S, N], all False, is written.
    """
    nodes = values.shape[1]
    found, places = np.empty(values.size), np.empty(values.size, dtype=np.int64)
    for g in range(starts.shape[0] - 1):
        count = _gathered(values, offered, members[starts[g] : starts[g + 1]], found, places)
        for i in range(min(count, budgets[g])):
            sent[places[i] // nodes, places[i] % nodes] = True


@kernel(
    "void(float64[:,::1], boolean[:,::1], int64[::1], int64[::1], int64[::1], float64[::1], float64[:,::1], float64[::1], "
    "int64[::1])"
)
def best_budgets(
    values: Any, offered: Any, members: Any, starts: Any, settled: Any, spent: Any, verify: Any, rates: Any, budgets: Any
) -> None:  # fmt: skip
    """Write of each batch how many of the largest values are worth sending; of equally good numbers the least.

    Args:
        values, offered, members, starts: see `send_best`.
        settled: [G] tokens that are sent anyway, beside the anchors.
        spent: [G] seconds of the round beside the verification.
        verify: [R, T] seconds of verifying so many tokens in all, by streams.
        rates: [R] tokens that a second is worth, by streams; 0 = the most tokens a second of this very round.
        budgets: [G] is written.
    """
    found, places = np.empty(values.size), np.empty(values.size, dtype=np.int64)
    for g in range(starts.shape[0] - 1):
        mine = members[starts[g] : starts[g + 1]]
        streams, count = mine.shape[0], _gathered(values, offered, mine, found, places)
        # Anchors are verified with the tokens, and each stream commits a token of the target's own beside the accepted ones.
        base, total, best, budgets[g] = streams + settled[g], 0.0, 0.0, 0
        for m in range(count + 1):
            total += found[m - 1] if m else 0.0
            seconds = verify[streams, base + m]
            worth = total - rates[streams] * seconds
            if rates[streams] == 0.0:
                worth = (base + total) / (spent[g] + seconds)
            # Not only up to the first fall: costs that rise in steps make more tokens pay where a few do not.
            if m == 0 or worth > best:
                best, budgets[g] = worth, m


@kernel_part
def _placed(pool: Any, count: Any, value: Any) -> None:
    """Put a value into a falling row of `count`."""
    at = count
    while at > 0 and pool[at - 1] < value:
        pool[at] = pool[at - 1]
        at -= 1
    pool[at] = value


@kernel_part
def _worth(pool: Any, count: Any, streams: Any, trims: Any, rate: Any, verify: Any) -> Any:
    """Return tokens less what their verification is worth in tokens: of the best, or of all where none is left out."""
    total, best = 0.0, -np.inf
    for m in range(count + 1):
        total += pool[m - 1] if m else 0.0
        if not trims and m < count:
            continue
        best = max(best, total - rate * verify[streams, streams + m])  # the anchors are verified too
    return best


@kernel(
    "void(int64[::1], int64[::1], boolean[:,::1], float64[:,::1], float64[:,::1], boolean, int64, float64[:,::1], "
    "float64[:,::1], float64[::1], float64[::1], boolean[:,::1])"
)
def draft_on(
    members: Any, starts: Any, alive: Any, known: Any, gains: Any, trims: bool, depth: int, drafts: Any, verify: Any,
    rates: Any, ahead: Any, kept: Any,
) -> None:  # fmt: skip
    """Mark the branches of each batch that are worth drafting on: those of the best number of them and of further steps.

    Args:
        members, starts: of the batches.
        alive: [S, B] branches that could be drafted on.
        known: [S, M] survival of the tokens drafted so far; below 0 = none was.
        gains: [S, B] survival that the next token after each branch is expected to have.
        trims: of what was drafted the best is sent, else all.
        depth: draft steps taken so far.
        drafts: [2, R] seconds of the first draft step of a round and of each later one, by rows.
        verify: [R, T] seconds of a verification by streams and tokens in all.
        rates: [R] tokens that a second is worth, by streams.
        ahead: [L] share of the next token's survival that the token 0, 1, ... after it is expected to have.
        kept: [S, B], all False, is written.
    """
    branches, most = alive.shape[1], known.size + alive.size * ahead.shape[0]
    pool, grown = np.empty(most), np.empty(most)
    found, places = np.empty(alive.size), np.empty(alive.size, dtype=np.int64)
    for g in range(starts.shape[0] - 1):
        mine = members[starts[g] : starts[g + 1]]
        streams, rate, count = mine.shape[0], rates[mine.shape[0]], 0
        rows = _gathered(gains, alive, mine, found, places)
        if rows == 0:
            continue
        for i in range(streams):
            for n in range(known.shape[1]):
                if known[mine[i], n] >= 0.0:
                    _placed(pool, count, known[mine[i], n])
                    count += 1
        best, take = _worth(pool, count, streams, trims, rate, verify), 0  # of stopping here
        for steps in range(1, ahead.shape[0] + 1):
            copy_row(pool[:count], grown)  # anew for each number of steps: a branch then brings a token of each
            have = count
            for r in range(rows):
                seconds = 0.0
                for step in range(steps):
                    _placed(grown, have, found[r] * ahead[step])
                    have += 1
                    # Gains fall, so the best r + 1 branches are the first ones; all steps read r + 1 rows.
                    seconds += drafts[min(depth + step, 1), r + 1]
                worth = _worth(grown, have, streams, trims, rate, verify) - rate * seconds
                if worth > best:
                    best, take = worth, r + 1
        for r in range(take):
            kept[places[r] // branches, places[r] % branches] = True
