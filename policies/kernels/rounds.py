"""Sums over the trees of a round, and what policies are shown of a trace."""

from __future__ import annotations

from typing import Any

from .compiled import copy_row, kernel


@kernel("void(int64[::1], int64[::1], boolean[:,:,::1], boolean[:,::1], int64[:,::1], int64[:,::1])")
def count_round(parent: Any, depth: Any, marks: Any, sent: Any, counts: Any, steps: Any) -> None:
    """Write what S streams send to the target, and what they did so far.

    Args:
        parent, depth: [N] by row of the tree; the parent of a root is -1. Rows are in order of depth.
        marks: [5, S, N] rows that were drawn, dropped, fed, asked about (the fifth is not read).
        sent: [S, N] roots, and what was drawn and not dropped on paths of such rows.
        counts: [3, S] tokens drawn, tokens sent, depths at which the policy was asked.
        steps: [S, K] rows fed at each depth.
    """
    drawn, dropped, fed, asked = marks[0], marks[1], marks[2], marks[3]
    for s in range(sent.shape[0]):
        drafted, verified, decisions, last = 0, 0, 0, -1
        steps[s] = 0
        for row in range(sent.shape[1]):
            parent_row = parent[row]
            goes = parent_row < 0
            if parent_row >= 0:
                goes = drawn[s, row] and not dropped[s, row] and sent[s, parent_row]  # parents come first
                drafted += drawn[s, row]  # what was dropped has cost its draft step all the same
                verified += goes
            sent[s, row] = goes
            if fed[s, row]:
                steps[s, depth[row]] += 1
            if asked[s, row] and depth[row] != last:  # rows of a depth follow one another
                decisions += 1
                last = depth[row]
        counts[0, s], counts[1, s], counts[2, s] = drafted, verified, decisions


@kernel(
    "void(float32[:,::1], int64[::1], float32[:,::1], int64[::1], float32[:,:,:], int64[::1], int64[::1], int64, "
    "boolean[:,::1], float32[:,:,::1])"
)
def look_up(
    anchors: Any, anchor_at: Any, history: Any, history_at: Any, nodes: Any, node_at: Any, row: Any, first: int,
    alive: Any, out: Any,
) -> None:  # fmt: skip
    """Write the features of the branches that are alive.

    Args:
        anchors: [R, .] ANCHOR columns of the rows of a trace; `anchor_at` the columns of `out` that they fill.
        history, history_at: [S, .] the same of the streams' earlier rounds.
        nodes, node_at: [R, N, .] of the nodes of a row.
        row: [S] of the streams' anchors.
        first: the node of the first branch; below 0 before any node.
        alive: [S, B].
        out: [S, B, F], zeros.
    """
    # `nodes` need not be contiguous: replay passes a view of some of the trace's columns, where a copy would cost their size.
    for s in range(alive.shape[0]):
        for b in range(alive.shape[1]):
            if not alive[s, b]:
                continue
            for f in range(anchor_at.shape[0]):
                out[s, b, anchor_at[f]] = anchors[row[s], f]
            for f in range(history_at.shape[0]):
                out[s, b, history_at[f]] = history[s, f]
            if first >= 0:
                for f in range(node_at.shape[0]):
                    out[s, b, node_at[f]] = nodes[row[s], first + b, f]


@kernel("void(float64[:,::1], int64[::1], int64[::1], boolean[::1], boolean[::1], float64, float64[:,::1])")
def add_round(record: Any, accepted: Any, verified: Any, active: Any, cut: Any, past: float, after: Any) -> None:
    """Write the record of S streams after a round; see `features.History`."""
    for s in range(record.shape[0]):
        copy_row(record[s], after[s])
        if cut[s] or not active[s]:
            continue
        after[s, 4] = past * record[s, 4] + (1.0 - past)
        share = (1.0 - past) / after[s, 4]  # so that the first round counts whole
        full = 1.0 if accepted[s] == verified[s] else 0.0  # also if nothing was verified
        after[s, 0] += share * (accepted[s] - record[s, 0])
        after[s, 1] += share * (full - record[s, 1])
        after[s, 2] = accepted[s]
        after[s, 3] = verified[s]
