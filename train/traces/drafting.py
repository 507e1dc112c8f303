"""What a policy drafts and verifies at the anchors of a trace: the draft phase of the live loop, many streams at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...decode.topology import Topology
from ...policies.contract import DraftStep, DraftTree, StopPolicy, checked_keep, checked_select
from ...policies.errors import TraceError
from .walk import Array, Drafted, Walk


def draft_chains(walk: Walk, row: Tensor) -> Drafted:
    """Ask the policy depth by depth along the recorded chains.

    Args:
        walk: the streams.
        row: [R] of their anchors.
    """
    arrays, policy = walk.arrays, walk.policy
    depth = min(arrays.depth, policy.max_depth)
    allowed = walk.allowed().clamp(max=depth)
    end = walk.first_end[row]  # the depth at which EOS is drawn
    bound = torch.minimum(allowed, end)
    drafting = walk.active
    drafted, dropped, decisions = (torch.zeros_like(row) for _ in range(3))
    base = walk.base(row)
    parent = torch.zeros(len(row), 1, dtype=torch.int64)
    nodes = walk.node_columns[row.numpy()] if depth else None  # [R, K, F]
    for j in range(depth):
        drafting = drafting & (bound > j)
        if not bool(drafting.any()):
            break
        if j >= policy.first:
            seen = walk.layout.step(base, nodes[:, j - 1]) if j and nodes is not None else base
            features = torch.from_numpy(seen * drafting.numpy()[:, None])
            alive = drafting[:, None].clone()  # a plugin may write into what it is shown
            vectors = walk.vectors(row, torch.tensor([j - 1]) if j else None, alive)
            step = DraftStep(j, alive, parent, features[:, None], vectors)
            keep, walk.state = checked_keep(policy, step, walk.state)
            decisions += drafting
            if policy.trims and j > 0:
                dropped += drafting & ~keep[:, 0]
            drafting = drafting & keep[:, 0]
        drafted += drafting
    capped = (drafted == bound) & ((end <= allowed) | (allowed < depth))
    verified = _chosen(walk, row, drafted, dropped)
    accepted = torch.minimum(arrays.accepted[row], verified)
    return Drafted(drafted, verified, accepted, torch.minimum(accepted, drafted - 1), decisions, capped)


def _chosen(walk: Walk, row: Tensor, drafted: Tensor, dropped: Tensor) -> Tensor:
    """Return [R], the tokens sent to the target: all but those that the policy trims."""
    verified = drafted - dropped
    if type(walk.policy).select is StopPolicy.select or not int(verified.max()):
        return verified
    nodes = torch.arange(walk.policy.max_depth)[None].expand(len(row), -1)
    drawn = nodes < verified[:, None]
    tokens = torch.where(drawn, walk.arrays.tokens[row, : nodes.shape[1]].long(), -1)
    tree = DraftTree(tokens, nodes - 1, nodes + 1, drawn.clone())
    mask = checked_select(walk.policy, tree, walk.state)
    return verified if mask is None else (mask & drawn).long().cumprod(1).sum(1)


class TreeShape:
    """A topology as index tensors: nodes are numbered from 0, without the root."""

    def __init__(self, tree: Topology) -> None:
        self.tree = tree
        self.levels = [torch.tensor([row - 1 for row in level]) for level in tree.levels]
        self.parent = torch.tensor([above - 1 for above in tree.parent[1:]], dtype=torch.int64)
        self.depth = torch.tensor(tree.depth[1:], dtype=torch.int64)
        first = [level[0] for level in tree.levels]
        self.among = [  # by depth, each node's parent among the nodes of the depth above
            torch.tensor([tree.parent[row] - first[d - 1] if d > 1 else 0 for row in level], dtype=torch.int64)
            for d, level in enumerate(tree.levels)
        ]
        self.has_children = [torch.tensor([bool(tree.children[row]) for row in level]) for level in tree.levels]

    @cached_property
    def every(self) -> Tensor:
        """[N] indices of all nodes."""
        return torch.arange(self.tree.nodes)


def draft_trees(walk: Walk, shape: TreeShape, row: Tensor) -> Drafted:
    """Ask the policy depth by depth which branches of the recorded trees to extend.

    Args:
        walk: the streams.
        shape: the topology, no deeper than the policy.
        row: [R] of their anchors.
    """
    arrays, policy, tree = walk.arrays, walk.policy, shape.tree
    deepest, streams = tree.deepest, len(row)
    cap = walk.allowed().clamp(max=deepest)
    drawn, dropped = (torch.zeros(streams, tree.nodes, dtype=torch.bool) for _ in range(2))
    read = torch.zeros_like(drawn)
    fed = torch.zeros(streams, max(deepest, 1), dtype=torch.int64)
    decisions = torch.zeros_like(row)
    capped = torch.zeros(streams, dtype=torch.bool)
    base = walk.base(row)
    nodes = walk.node_columns[row.numpy()] if tree.nodes else None  # [R, N, F]
    ends = arrays.ends[row]
    alive = walk.active[:, None].clone()  # [R, B] of this depth
    for j in range(deepest + 1):
        at_cap = alive.any(1) & (cap <= j)
        capped |= at_cap & (cap < deepest)
        alive = alive & ~at_cap[:, None]
        if not bool(alive.any()):
            break
        level = shape.levels[j]
        if j >= policy.first:
            asked = alive
            step = _tree_step(walk, shape, row, j, base, nodes, alive.clone())
            keep, walk.state = checked_keep(policy, step, walk.state)
            alive = asked & keep
            decisions += asked.any(1)
            if policy.trims and j > 0:
                dropped[:, level] |= asked & ~alive
        feeding = alive & shape.has_children[j]
        if j:
            read[:, level] = feeding
        if j == deepest:
            break
        fed[:, j] = feeding.sum(1)
        below = shape.levels[j + 1]
        grown = feeding[:, shape.among[j + 1]]
        drawn[:, below] = grown
        alive = grown & ~ends[:, below]
        capped |= grown.any(1) & ~alive.any(1)
    _check_drawn(walk, row, drawn)
    sent = _sent(shape, drawn & ~dropped)
    if type(policy).select is not StopPolicy.select and bool(sent.any()):
        sent = _selected(walk, shape, row, sent)
    path = _accepted(walk, row)[:, : tree.nodes] & sent
    verified, accepted = sent.sum(1), path.sum(1)
    return Drafted(
        drawn.sum(1), verified, accepted, (path & read).sum(1), decisions, capped, None if tree.is_chain else fed
    )


def _tree_step(
    walk: Walk, shape: TreeShape, row: Tensor, j: int, base: Array, nodes: Array | None, alive: Tensor
) -> DraftStep:
    """Return what the policy sees at depth j: a column for each branch, zeros where none is alive."""
    if j == 0:
        features = base[:, None]
    else:
        assert nodes is not None
        at = shape.levels[j].numpy()
        features = np.repeat(base[:, None], len(at), 1)
        features[..., walk.layout.node_at] = nodes[:, at]
    parent = shape.among[j].expand(len(base), -1) if j else torch.zeros(len(base), 1, dtype=torch.int64)
    vectors = walk.vectors(row, shape.levels[j] if j else None, alive)
    return DraftStep(j, alive, parent, torch.where(alive[..., None], torch.from_numpy(features), 0.0), vectors)


def _accepted(walk: Walk, row: Tensor) -> Tensor:
    """Return [R, N] bool, the nodes that the target accepts."""
    arrays = walk.arrays
    if arrays.path is not None:
        return arrays.path[row]
    return torch.arange(arrays.depth) < arrays.accepted[row][:, None]


def _check_drawn(walk: Walk, row: Tensor, drawn: Tensor) -> None:
    """Refuse candidates that a live run did not draft."""
    if walk.arrays.drawn is not None and bool((drawn & ~walk.arrays.drawn[row][:, : drawn.shape[1]]).any()):
        raise TraceError(
            f"{walk.policy.name} drafts what {walk.arrays.header.policy} did not when the trace was recorded; "
            "collect dense traces, or live ones with --explore"
        )


def _sent(shape: TreeShape, kept: Tensor) -> Tensor:
    """Return [R, N], the nodes whose whole path is kept."""
    sent = kept.clone()
    for level in shape.levels[2:]:
        sent[:, level] &= sent[:, shape.parent[level]]
    return sent


def _selected(walk: Walk, shape: TreeShape, row: Tensor, sent: Tensor) -> Tensor:
    streams = len(row)
    tokens = torch.where(sent, walk.arrays.tokens[row][:, : shape.tree.nodes].long(), -1)
    parent, depth = (values.repeat(streams, 1) for values in (shape.parent, shape.depth))
    mask = checked_select(walk.policy, DraftTree(tokens, parent, depth, sent.clone()), walk.state)
    return sent if mask is None else _sent(shape, sent & mask)
