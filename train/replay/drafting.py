"""What a policy drafts and verifies at the anchors of a trace: the draft phase of the live loop, many streams at once."""

from __future__ import annotations

import numpy as np

from ...collect.schema import NO_TOKEN
from ...decode.topology import Topology
from ...policies.contract import DraftTree, StopPolicy, checked_keep, checked_select
from ...policies.errors import TraceError
from .state import Array, Drafted, Walk


def draft_chains(walk: Walk, row: Array) -> Drafted:
    """Ask the policy depth by depth along the recorded chains.

    Args:
        walk: the streams.
        row: [R] of their anchors.
    """
    policy = walk.policy
    depth = min(walk.arrays.depth, policy.max_depth)
    allowed = np.minimum(walk.allowed(), depth)
    end = walk.first_end[row]  # the depth at which EOS is drawn
    bound = np.minimum(allowed, end)
    drafting = walk.active
    drafted, dropped, decisions = np.zeros((3, len(row)), dtype=np.int64)
    base = walk.base(row)
    for j in range(depth):
        drafting = drafting & (bound > j)
        if not drafting.any():
            break
        if j >= policy.first:
            node = np.array([j - 1]) if j else None
            step = walk.step(row, base, j, drafting[:, None], node)
            keep, walk.state = checked_keep(policy, step, walk.state)
            decisions += drafting
            kept = drafting & keep[:, 0]
            if policy.trims and j > 0:
                dropped += drafting & ~kept
            drafting = kept
        drafted += drafting
    capped = (drafted == bound) & ((end <= allowed) | (allowed < depth))
    verified = _chosen(walk, row, drafted - dropped)
    accepted = np.minimum(walk.accepted[row], verified)
    return Drafted(drafted, verified, accepted, np.minimum(accepted, drafted - 1), decisions, capped)


def _chosen(walk: Walk, row: Array, kept: Array) -> Array:
    """Return [R], how many of the tokens that were not trimmed [R] the policy sends to the target."""
    if type(walk.policy).select is StopPolicy.select or not kept.max():
        return kept
    nodes = np.tile(np.arange(walk.policy.max_depth), (len(row), 1))
    drawn = nodes < kept[:, None]
    tokens = np.where(drawn, walk.tokens[row, : nodes.shape[1]].astype(np.int64), -1)
    mask = checked_select(walk.policy, DraftTree(tokens, nodes - 1, nodes + 1, drawn), walk.state)
    return kept if mask is None else np.logical_and.accumulate(mask & drawn, 1).sum(1)


class TreeShape:
    """A topology as index arrays: nodes are numbered from 0, without the root."""

    def __init__(self, tree: Topology) -> None:
        self.tree = tree
        self.levels = [np.array(level) - 1 for level in tree.levels]
        self.parent = np.array(tree.parent[1:], dtype=np.int64) - 1
        self.depth = np.array(tree.depth[1:], dtype=np.int64)
        first = [level[0] for level in tree.levels]
        self.among = [  # by depth, each node's parent among the nodes of the depth before
            np.array([tree.parent[row] - first[d - 1] if d > 1 else 0 for row in level], dtype=np.int64)
            for d, level in enumerate(tree.levels)
        ]
        self.has_children = [np.array([bool(tree.children[row]) for row in level]) for level in tree.levels]


def draft_trees(walk: Walk, shape: TreeShape, row: Array) -> Drafted:
    """Ask the policy depth by depth which branches of the recorded trees to extend.

    Args:
        walk: the streams.
        shape: the topology, no deeper than the policy.
        row: [R] of their anchors.
    """
    policy, tree = walk.policy, shape.tree
    deepest, streams = tree.deepest, len(row)
    cap = np.minimum(walk.allowed(), deepest)
    drawn, dropped, read = np.zeros((3, streams, tree.nodes), dtype=bool)
    fed = np.zeros((streams, max(deepest, 1)), dtype=np.int64)
    decisions = np.zeros(streams, dtype=np.int64)
    capped = np.zeros(streams, dtype=bool)
    base = walk.base(row)
    ends = walk.ends[row]
    alive = walk.active[:, None]  # [R, B] of this depth
    for j in range(deepest + 1):
        at_cap = alive.any(1) & (cap <= j)
        capped |= at_cap & (cap < deepest)
        alive = alive & ~at_cap[:, None]
        if not alive.any():
            break
        level = shape.levels[j]
        if j >= policy.first:
            step = walk.step(row, base, j, alive, level if j else None, shape.among[j])
            keep, walk.state = checked_keep(policy, step, walk.state)
            decisions += alive.any(1)
            kept = alive & keep
            if policy.trims and j > 0:
                dropped[:, level] |= alive & ~kept
            alive = kept
        feeding = alive & shape.has_children[j]
        if j:
            read[:, level] = feeding
        if j == deepest:
            break
        fed[:, j] = feeding.sum(1)
        below = shape.levels[j + 1]
        grown = feeding[:, shape.among[j + 1]] & (walk.tokens[row][:, below] != NO_TOKEN)
        drawn[:, below] = grown
        alive = grown & ~ends[:, below]
        capped |= grown.any(1) & ~alive.any(1)
    _check_drawn(walk, row, drawn)
    sent = _sent(shape, drawn & ~dropped)
    if type(policy).select is not StopPolicy.select and sent.any():
        sent = _selected(walk, shape, row, sent)
    path = _accepted(walk, row)[:, : tree.nodes] & sent
    return Drafted(
        drawn.sum(1),
        sent.sum(1),
        path.sum(1),
        (path & read).sum(1),
        decisions,
        capped,
        None if tree.is_chain else fed,
    )


def _accepted(walk: Walk, row: Array) -> Array:
    """Return [R, N] bool, the nodes that the target accepts."""
    arrays = walk.arrays
    if arrays.path is not None:
        return arrays.path.numpy()[row]
    return np.arange(arrays.depth) < walk.accepted[row][:, None]


def _check_drawn(walk: Walk, row: Array, drawn: Array) -> None:
    """Refuse candidates that a live run did not draft."""
    recorded = walk.arrays.drawn
    if recorded is not None and (drawn & ~recorded.numpy()[row, : drawn.shape[1]]).any():
        raise TraceError(
            f"{walk.policy.name} drafts what {walk.arrays.header.policy} did not when the trace was recorded; "
            "collect dense traces, or live ones with --explore"
        )


def _sent(shape: TreeShape, kept: Array) -> Array:
    """Return [R, N], the nodes whose whole path is kept."""
    sent = kept.copy()
    for level in shape.levels[2:]:
        sent[:, level] &= sent[:, shape.parent[level]]
    return sent


def _selected(walk: Walk, shape: TreeShape, row: Array, sent: Array) -> Array:
    """Return [R, N], the nodes that the policy sends to the target."""
    tokens = np.where(sent, walk.tokens[row, : shape.tree.nodes].astype(np.int64), -1)
    parent, depth = np.tile(shape.parent, (len(row), 1)), np.tile(shape.depth, (len(row), 1))
    mask = checked_select(walk.policy, DraftTree(tokens, parent, depth, sent), walk.state)
    return sent if mask is None else _sent(shape, sent & mask)
