"""Rules for trees: values of nodes by the draft's probabilities, and which nodes are worth their price."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .contract import Array, DraftStep, DraftTree
from .costs import extrapolate
from .errors import PolicyError
from .kernels import on_first_use
from .rules import Rule, check_depth

UNSEEN = 0.5
"""Probability of a node without a decision, as at the last depth, given its parent; half as much per better sibling."""

PRICED_NODES = 64
"""Number of best nodes that the price of a further node is computed from."""

MAX_ENTRIES = 1024
"""Largest length of a list of a rule, and largest number of nodes of a tree."""

_MINUS_INFINITY = np.float32(-np.inf)

kernels = on_first_use("trees")


def append_level(levels: Sequence[Array] | None, step: DraftStep, values: Array) -> tuple[Array, ...]:
    """Return the values [S, B] float32 of the depths 1..j, given those before (None at depth 1); -infinity if not alive.

    For the state of a policy that ranks the nodes of a tree in `select`; see `node_values`.
    """
    return (*(levels or ())[: step.depth - 1], np.where(step.alive, values, _MINUS_INFINITY))


def node_values(levels: Sequence[Array] | None, tree: DraftTree) -> Array:
    """Return [S, N] float32, the log-probability of the path of each node; -infinity if it was not drawn.

    No value is above the parent's, and parents come first, so that the best n nodes are closed under parents.

    Args:
        levels: of `append_level`, with log-probabilities of paths; a node at a depth without a decision counts as `UNSEEN`.
        tree: the nodes.
    """
    known = np.concatenate(levels, 1) if levels else np.empty((len(tree.drawn), 0), dtype=np.float32)  # [S, M]
    out = np.empty(tree.drawn.shape, dtype=np.float32)
    kernels().value_nodes(known, tree.parent[0], tree.drawn, math.log(UNSEEN), out)  # one topology for all streams
    return out


class LevelTable(NamedTuple):
    """The part of a rule's decision about the branches of a depth that does not depend on features."""

    ranks: Array  # [B] int64, among the siblings
    counts: Array  # [B] int64, children drawn below
    mean: Array  # [B] mean survival
    mean_parent: Array  # [P] mean survival of the depth before; the last one for branches beyond
    floor: float  # minimum expected survival of a branch that is read
    costs: Array  # [B, T] in tokens, of extending 1..B branches by 1..T levels
    decay: Array  # [T] expected survival of the best node 0, 1, ... levels below a best child, as a share of its


@dataclass(eq=False)
class TreeRule(Rule):
    """Drafts and verifies the nodes that are worth their price in tokens, at the policy's rate rho.

    This is the derived rule with look-ahead, for trees: the branches of a depth share the price of a draft step. With s the
    survival of a node and n = `next`, the expected survival of its children of rank 0, 1, 2, ... is s n, s f_1(n), s f_2(n),
    ... Below the best child it falls by the mean acceptance from level to level. The survival of a node less its price is its
    gain, if positive. The rule extends the m best branches by t levels. It chooses the m and t that maximise the sum of gains
    less rho times the seconds of t steps of m rows, and extends none if this is never positive. The price of a node is the
    cost of verifying one more, or the value of the node that it would displace.
    """

    rate: float  # rho, tokens per second
    opening_s: float  # of the first draft step of a round, the decision after it included
    draft_s: Sequence[float]  # of a later step that reads 1, 2, ... rows, decision included
    verify_s: Sequence[float]  # of verifying 0, 1, ... nodes; both tables are extrapolated
    acceptance: Sequence[float]  # a_1..a_K, by depth: chance that the best child of an accepted node is accepted
    shares: Sequence[Sequence[float]] = ()  # for rank 1, 2, ...: (u, v), f(n) = sigmoid(u + v logit n)
    children: Sequence[Sequence[int]] = ()  # by depth, of each branch: children drawn below it; of another tree: one
    first: int = 1  # depth of the first decision
    ahead: float = 1.0  # factor of the acceptance in the look-ahead
    width: int = 64  # maximum number of branches extended at a depth
    floor: float = 0.0  # branches with a smaller expected survival, judged by the parent, are not read
    kind = "gain"

    def __post_init__(self) -> None:
        self.draft_s, self.verify_s, self.acceptance = map(tuple, (self.draft_s, self.verify_s, self.acceptance))
        self.shares = tuple((float(u), float(v)) for u, v in self.shares)
        self.children = tuple(tuple(level) for level in self.children)
        self._check()
        self._typical: Array = np.array(self.acceptance, dtype=np.float64)
        self.share_table: Array = np.array([(0.0, 1.0), *self.shares])  # the best child's is its chance
        self._levels: dict[tuple[int, int], LevelTable] = {}
        seconds = extrapolate(self.verify_s, MAX_ENTRIES + 1)
        # In tokens, of verifying 0, 1, ... nodes in addition to the anchor.
        self._tokens: Array = (seconds - seconds[0]) * self.rate
        tokens, nodes = self._tokens[: PRICED_NODES + 1], PRICED_NODES
        # The mean over some further nodes, not the price of the next alone: where seconds rise in steps, that may be next to
        # nothing, or a whole step. With `PRICED_NODES` nodes a further one is priced as the last was.
        rises = [((tokens[n + 1 :] - tokens[n]) / np.arange(1, nodes + 1 - n)).min() for n in range(nodes)]
        self._prices = tokens, np.maximum([*rises, rises[-1]], 0.0)  # both by number of nodes

    def _check(self) -> None:
        tables = (self.draft_s, self.verify_s, self.acceptance)
        numbers = [self.rate, self.opening_s, self.ahead, self.floor, *(x for table in tables for x in table)]
        if not all(0.0 <= x < math.inf for x in numbers) or not self.rate > 0.0 or not all(map(len, tables)):
            raise PolicyError(
                "rule gain: expected seconds, acceptance and a rate, all finite, none negative or missing"
            )
        if not all(math.isfinite(x) for pair in self.shares for x in pair):
            raise PolicyError("rule gain: expected finite shares")
        counts = [("children", count) for level in self.children for count in level]
        for name, count in (("first", self.first), ("width", self.width), *counts):
            check_depth(self.kind, name, count, MAX_ENTRIES)
        sizes = [1, *(sum(level) for level in self.children)]
        widths_match = all(len(level) == size for level, size in zip(self.children, sizes, strict=False))
        longest = max(sum(sizes), len(self.shares), *map(len, tables))
        if not widths_match or longest > MAX_ENTRIES or self.first > len(self.acceptance) or self.width < 1:
            raise PolicyError("rule gain: expected shares, children by depth, first and width that fit the tree")

    @functools.cached_property
    def _tree(self) -> list[tuple[Array, Array, Array]]:
        """By depth from the root on, [B] ranks, numbers of children, and mean survival in the tree of the rule."""
        depths = np.repeat(np.arange(len(self.children) + 1), [1, *(sum(level) for level in self.children)])
        drawn = [count for level in self.children for count in level]
        parent = np.repeat(np.arange(len(drawn)) - 1, np.array(drawn, dtype=np.int64))  # of nodes; -1 = the root
        all_drawn = np.ones((1, len(parent)), dtype=bool)
        (mean,) = self.survival(parent[None], depths[None, 1:], all_drawn, np.empty((1, 2, 0)))
        ranks = np.array([0, *(rank for count in drawn for rank in range(count))])
        counts = np.array(drawn + [1] * (len(depths) - len(drawn)))
        mean = np.append(1.0, mean)
        at_depth = [depths == depth for depth in range(len(self.children) + 1)]
        return [(ranks[at], counts[at], mean[at]) for at in at_depth]

    def level(self, depth: int, branches: int) -> LevelTable:
        """Return the table of a depth with so many branches, computed once."""
        if (table := self._levels.get((depth, branches))) is not None:
            return table
        # Branches of another tree have one child, and are best children unless the root is their parent.
        ranks = np.arange(branches) if depth == 1 else np.zeros(branches, dtype=np.int64)
        counts = np.ones(branches, dtype=np.int64)
        mean = np.full(branches, math.prod(self.acceptance[:depth], start=1.0))
        mean_parent = np.array([math.prod(self.acceptance[: max(depth - 1, 0)], start=1.0)])
        tree = self._tree
        if depth < len(tree) and len(tree[depth][0]) == branches:
            ranks, counts, _ = tree[depth]
        if depth < len(tree) and len(tree[depth][0]) >= branches:
            mean = tree[depth][2][:branches].copy()
        if 1 < depth <= len(tree):
            mean_parent = np.concatenate([tree[depth - 1][2], mean_parent])
        levels = max(len(self.acceptance) - depth, 0)
        # At depth 0 the first step reads the root alone, at a separate price (`opening_s`).
        rows, steps = extrapolate(self.draft_s, branches)[:, None], np.arange(1, levels + 1)  # [B, 1], [T]
        costs = self.rate * (rows * steps if depth else self.opening_s + rows * (steps - 1))
        decay = np.cumprod([1.0, *(self.ahead * self._typical[depth + 1 :])])[:levels]  # _typical[d] is a_{d + 1}
        floor = float(self.floor) if depth else 0.0  # the root cannot be rejected
        table = self._levels[depth, branches] = LevelTable(ranks, counts, mean, mean_parent, floor, costs, decay)
        return table

    def extend(self, depth: int, values: Array, known: Array) -> Array:
        """Return [S, B] bool, the branches to extend.

        Args:
            depth: j.
            values: [S, 2, B] survival and next of the branches; survival below 0 where there is none.
            known: [S, 2, N] survival and next of all nodes so far.
        """
        streams, _, branches = values.shape
        level, out = self.level(depth, branches), np.empty((streams, branches), dtype=bool)
        below = level.counts, level.costs, level.decay, self.share_table
        kernels().extend(values, known, *self._prices, *below, self.width, out)
        return out

    def survival(self, parent: Array, depth: Array, drawn: Array, known: Array) -> Array:
        """Return [S, N], the survival of the nodes; expected if they were never read, -1 if not drawn.

        Args:
            parent, depth, drawn: [S, N]; see `DraftTree`.
            known: [S, 2, N'] survival and next of the nodes from the first decision on, as far as they were read.
        """
        out = np.empty(drawn.shape)
        kernels().node_survival(parent, depth, drawn, known, max(self.first, 1), self._typical, self.share_table, out)
        return out

    def select(self, values: Array) -> Array:
        """Return [S, N] bool, the nodes to verify, given their survival; below 0 there is no node."""
        drawn = values >= 0.0
        kept = np.empty_like(drawn)
        kernels().keep_worth(values, drawn, self._tokens[1:], kept)
        return kept
