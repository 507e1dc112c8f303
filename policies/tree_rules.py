"""Rules for trees: values of nodes by the draft's own probabilities, and which nodes are worth their price."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .arguments import validate_int, validate_number
from .contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from .costs import extend
from .errors import PolicyError
from .kernels import on_first_use
from .rules import Rule

UNSEEN = 0.5
"""Probability of a node without a decision, as at the last depth, given its parent; half as much per better sibling."""

MOST_NODES = 64
"""Number of best nodes by which the price of a further node is computed."""

MOST_ENTRIES = 1024
"""Largest length of a list of a rule, and of nodes of its tree."""

kernels = on_first_use("trees")


def append_level(levels: Sequence[Array], step: DraftStep, values: Array) -> tuple[Array, ...]:
    """Return the values [S, B] float32 of the depths 1..j, given those before; -infinity if not alive.

    For the state of a policy that ranks the nodes of a tree in `select`; see `node_values`.
    """
    return (*levels[: step.depth - 1], np.where(step.alive, values, np.float32(-np.inf)))


def node_values(levels: Sequence[Array], tree: DraftTree) -> Array:
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


class Gain(StopPolicy):
    """Buy draft steps and verified nodes with expected tokens, the survival of a node read off the draft's own probabilities.

    A node is accepted with probability s = (product of q along its path)^power. Prices are in tokens: rho, the tokens per
    second that are had otherwise, times seconds.

    * After each depth the m best branches are expanded, m the one that maximises
      follow (s_1 + ... + s_m) - draft(m) - verify m, or none, which ends drafting. So doubt widens the tree as long as rows
      are cheap, and ends it where a step is not worth it.
    * Of all that was drawn the n best nodes are verified, n the one that maximises s_1 + ... + s_n - target(n).

    It reads the drawn tokens and leaves some out, so it is for `match` verification, and for temperature 0. Expected accepted
    length as a sum of path probabilities is OPT-Tree's (arXiv 2406.17276, eq. 5); prices at the own rate are ours.

    Args:
        step: of a draft step of one row.
        row: of each further row.
        verify: of verifying one more node.
        power: below 1 the target accepts more than the draft believes.
        follow: the probability that something below a node is accepted, if it is.
        max_depth: levels.
        draft_prices, target_prices: tables in the place of the three prices: of a step of 1, 2, ... rows, and of
            verifying 0, 1, ... nodes; beyond them prices go on as at their end.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("path_logprob",)

    def __init__(
        self,
        step: float = 0.1,
        row: float = 0.01,
        verify: float = 0.02,
        power: float = 1.0,
        follow: float = 0.8,
        max_depth: int = 20,
        draft_prices: Sequence[float] = (),
        target_prices: Sequence[float] = (),
    ) -> None:
        step, row, verify = (
            validate_number("gain", name, value, 0.0)
            for name, value in (("step", step), ("row", row), ("verify", verify))
        )
        self.power = validate_number("gain", "power", power, 0.0)
        self.follow = validate_number("gain", "follow", follow, 0.0)
        self.max_depth = validate_int("gain", "max_depth", max_depth)
        self.draft_prices = tuple(draft_prices) or (step, step + row)  # `extend` goes on along the line
        self.target_prices = tuple(target_prices) or (0.0, verify)
        ends = self.target_prices
        # A node's share on average: while drafting nobody knows how many will be verified, thus at which step of the table.
        self.verify = (ends[-1] - ends[0]) / max(len(ends) - 1, 1)
        self.name = "gain" if draft_prices else f"gain:{step:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return no levels."""
        return ()

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that are worth another draft step, and remember the paths' probabilities."""
        levels, kept = append_level(state, step, self.power * step.features[:, :, 0]), np.zeros_like(step.alive)
        table = extend(self.draft_prices, kept.shape[1])
        kernels().keep_worth(levels[-1], step.alive, self.follow, self.verify, table, kept)
        return kept, levels

    def select(self, tree: DraftTree, state: State) -> Array:
        """Return the nodes that are worth their verification."""
        values, kept = node_values(state, tree), np.zeros_like(tree.drawn)
        table = extend(self.target_prices, kept.shape[1] + 1)
        kernels().keep_worth(values, tree.drawn, 1.0, 0.0, table[1:] - table[0], kept)  # verifying none is paid anyway
        return kept

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Forget the round's levels."""
        return ()


@dataclass(frozen=True, slots=True)
class LevelTable:
    """What a rule knows of the branches of a depth before anything is read.

    Attributes:
        ranks, counts: [B] int64, the rank of each among its siblings, and how many children are drawn below it.
        mean: [B] mean survival.
        mean_parent: [P] likewise of the depth before; the last one for branches beyond.
        floor: survival that must be expected of a branch that is read.
        costs: [B, T] in tokens, of extending 1..B branches by 1..T levels.
        decay: [T] the share of a best child's survival that the best node 0, 1, ... levels below it should have.
    """

    ranks: Array
    counts: Array
    mean: Array
    mean_parent: Array
    floor: float
    costs: Array
    decay: Array


class TreeRule(Rule):
    """Buys draft steps and verified nodes with expected tokens, at the policy's own rate rho.

    With s the survival of a node and n = `next`, its children of rank 0, 1, ... are expected to have survival s n, s f_1(n),
    s f_2(n), ..., and those below the best child a share of that which falls by the mean acceptance from level to level.
    What is above the price of a node counts as gain. The m best branches are extended by t levels where that gain, summed,
    less rho times the seconds of t steps of m rows, is largest; none where it is never positive. (The derived rule with
    look-ahead, for trees; a draft step's price is shared by the branches.) The price of a node is what verifying one more
    costs, or the value of the least node that it would displace.

    Args:
        rate: rho, tokens per second.
        opening_s: seconds of the first draft step of a round, the decision after it included.
        draft_s: of a later step that reads 1, 2, ... rows, likewise.
        verify_s: of verifying 0, 1, ... nodes; beyond the tables seconds go on as at their end.
        acceptance: a_1..a_K, mean chance that the best child of an accepted node is accepted, by its depth.
        shares: for rank 1, 2, ...: (u, v), f(n) = sigmoid(u + v logit n).
        children: by depth, of each branch: how many are drawn below it. Branches of another tree count as one.
        first: depth of the first decision.
        ahead: share of the acceptance that is looked ahead with.
        width: most branches extended at a depth.
        floor: branches that are expected to survive with less than this, judged by the parent, are not read.

    Attributes:
        verify_tokens: [n] by number of nodes, what verifying them costs in tokens.
        rises: [n] by number of nodes, the least that each of some further nodes costs.
    """

    kind = "gain"

    def __init__(
        self,
        rate: float,
        opening_s: float,
        draft_s: Sequence[float],
        verify_s: Sequence[float],
        acceptance: Sequence[float],
        shares: Sequence[Sequence[float]],
        children: Sequence[Sequence[int]],
        first: int = 1,
        ahead: float = 1.0,
        width: int = 64,
        floor: float = 0.0,
    ) -> None:
        self.rate, self.opening_s, self.first, self.ahead, self.width = rate, opening_s, first, ahead, width
        self.floor = floor
        self.draft_s, self.verify_s, self.acceptance = tuple(draft_s), tuple(verify_s), tuple(acceptance)
        self.shares = tuple((float(u), float(v)) for u, v in shares)
        self.children = tuple(tuple(level) for level in children)
        self._check()
        self._typical: Array = np.array(self.acceptance, dtype=np.float64)
        self._shares: Array = np.array([(0.0, 1.0), *self.shares])  # the best child's is its own chance
        self._levels: dict[tuple[int, int], LevelTable] = {}
        self._costs: dict[int, Array] = {}
        self.verify_tokens = tokens = self.verify_costs(MOST_NODES)
        # The mean over some further nodes, not the price of the next alone: where seconds rise in steps, that may be next to
        # nothing, or a whole step. With `MOST_NODES` nodes a further one is priced as the last was.
        rises = [((tokens[n + 1 :] - tokens[n]) / np.arange(1, MOST_NODES + 1 - n)).min() for n in range(MOST_NODES)]
        self.rises: Array = np.maximum([*rises, rises[-1]], 0.0)

    def _check(self) -> None:
        lists = (self.draft_s, self.verify_s, self.acceptance)
        if not all(0 < len(some) <= MOST_ENTRIES for some in lists) or len(self.shares) > MOST_ENTRIES:
            raise PolicyError("rule gain: expected draft_s, verify_s and acceptance, none empty")
        numbers = [self.rate, self.opening_s, self.ahead, self.floor, *(x for some in lists for x in some)]
        if not all(0.0 <= x < math.inf for x in numbers) or not self.rate > 0.0:
            raise PolicyError("rule gain: expected seconds, acceptance and a rate, all finite, none below 0")
        if not all(math.isfinite(x) for pair in self.shares for x in pair):
            raise PolicyError("rule gain: expected shares that are finite")
        wholes = (self.first, self.width, *(n for level in self.children for n in level))
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MOST_ENTRIES for n in wholes):
            raise PolicyError("rule gain: expected first, width and numbers of children, whole and not below 0")
        if self.first > len(self.acceptance) or self.width < 1:
            raise PolicyError(f"rule gain: first {self.first} and width {self.width} are out of range")
        sizes = [1, *(sum(level) for level in self.children)]
        if sum(sizes) > MOST_ENTRIES or any(len(level) != n for level, n in zip(self.children, sizes, strict=False)):
            raise PolicyError("rule gain: expected the numbers of children by depth, each level as wide as they say")

    @functools.cached_property
    def _tree(self) -> list[tuple[Array, Array]]:
        """By depth, rank and mean survival of each node of the tree that the rule was made for; the root first."""
        # Nodes are numbered by depth, so that entry i of `counts` is of node i - 1, and entry 0 of the root.
        depths = np.repeat(np.arange(len(self.children)) + 1, [sum(level) for level in self.children])
        counts = np.concatenate([np.zeros(0, dtype=np.int64), *(np.array(n, dtype=np.int64) for n in self.children)])
        parent = np.repeat(np.arange(len(counts)) - 1, counts)
        ranks = np.empty(len(parent), dtype=np.int64)
        kernels().sibling_ranks(parent, ranks)
        drawn, unread = np.ones((1, len(parent)), dtype=bool), np.empty((1, 2, 0))
        (mean,) = self.survival(parent[None], depths[None], drawn, unread)
        at = [depths == d for d in range(1, len(self.children) + 1)]
        return [(np.zeros(1, dtype=np.int64), np.ones(1)), *((ranks[nodes], mean[nodes]) for nodes in at)]

    def level(self, depth: int, branches: int) -> LevelTable:
        """Return what is known of the branches of a depth; those of another tree have one child and are best children."""
        key = depth, branches
        if key not in self._levels:
            self._levels[key] = self._level(depth, branches)
        return self._levels[key]

    def _level(self, depth: int, branches: int) -> LevelTable:
        counts, ranks = np.ones(branches, dtype=np.int64), np.zeros(branches, dtype=np.int64)
        if depth < len(self.children) and len(self.children[depth]) == branches:
            counts = np.array(self.children[depth], dtype=np.int64)
        if depth < len(self._tree) and len(self._tree[depth][0]) == branches:
            ranks = self._tree[depth][0]
        elif depth == 1:
            ranks = np.arange(branches)  # all are children of the root
        mean = np.full(branches, math.prod(self.acceptance[:depth], start=1.0))
        if depth < len(self._tree) and len(self._tree[depth][1]) >= branches:
            mean = self._tree[depth][1][:branches].copy()
        mean_parent = np.array([math.prod(self.acceptance[: max(depth - 1, 0)], start=1.0)])
        if 1 < depth <= len(self._tree):
            mean_parent = np.concatenate([self._tree[depth - 1][1], mean_parent])
        levels = max(len(self.acceptance) - depth, 0)
        # At depth 0 the first step reads the root alone, at a price of its own (`opening_s`).
        rows, steps = (
            extend(self.draft_s, branches)[:, None],
            np.arange(1, levels + 1),
        )  # [B, 1], [T]
        costs = self.rate * (rows * steps if depth else self.opening_s + rows * (steps - 1))
        decay = np.cumprod([1.0, *(self.ahead * self._typical[depth + 1 :])])[:levels]  # _typical[d] is a_{d + 1}
        # The root is read in any case: there is nothing that could have been refused.
        return LevelTable(ranks, counts, mean, mean_parent, float(self.floor) if depth else 0.0, costs, decay)

    def verify_costs(self, nodes: int) -> Array:
        """Return [N + 1], what verifying 0..N nodes costs in tokens."""
        if nodes not in self._costs:
            seconds = extend(self.verify_s, nodes + 1)
            self._costs[nodes] = (seconds - seconds[0]) * self.rate  # the anchor is verified in any case
        return self._costs[nodes]

    def ask(
        self, depth: int, alive: Array, parent: Array, features: Array, before: Array
    ) -> tuple[Array, Array, Array]:
        """Return the places [R] of the branches to read, the survival [R] of their parents, and their features [R, F].

        Args:
            depth: j.
            alive, parent, features: of the branches; see `DraftStep`.
            before: [S, 2, B] survival and next of the depth before, survival below 0 where it was not read; [S, 2, 0] = not
                known.
        """
        level, size = self.level(depth, alive.shape[1]), alive.size
        rows, parent_chance = np.empty(size, dtype=np.int64), np.empty(size)
        read = np.empty((size, features.shape[2]), dtype=np.float32)
        count = kernels().ask(
            np.ascontiguousarray(alive),
            np.ascontiguousarray(parent),
            features,
            before,
            level.ranks,
            level.mean,
            level.mean_parent,
            level.floor,
            self._shares,
            rows,
            parent_chance,
            read,
        )
        return rows[:count], parent_chance[:count], read[:count]

    def price(self, known: Array) -> Array:
        """Return [S], what a further node must be worth, given survival and next [S, 2, N] of those there are."""
        out = np.empty(len(known))
        kernels().price(known, self.verify_tokens, self.rises, out)
        return out

    def extend(self, depth: int, values: Array, price: Array) -> Array:
        """Return [S, B] bool, the branches to extend.

        Args:
            depth: j.
            values: [S, 2, B] survival and next of the branches; survival below 0 where there is none.
            price: [S] of a further node.
        """
        streams, _, branches = values.shape
        level, out = self.level(depth, branches), np.empty((streams, branches), dtype=bool)
        kernels().extend(values, price, level.counts, level.costs, level.decay, self._shares, self.width, out)
        return out

    def survival(self, parent: Array, depth: Array, drawn: Array, known: Array) -> Array:
        """Return [S, N], the survival of the nodes; of those never read what is expected; -1 if not drawn.

        Args:
            parent, depth, drawn: [S, N]; see `DraftTree`.
            known: [S, 2, N'] survival and next of the nodes from the first decision on, as far as they were read.
        """
        out = np.empty(drawn.shape)
        kernels().node_survival(parent, depth, drawn, known, max(self.first, 1), self._typical, self._shares, out)
        return out

    def select(self, values: Array) -> Array:
        """Return [S, N] bool, the nodes to verify, given their survival; those below 0 are not there."""
        out = np.empty(values.shape, dtype=bool)
        kernels().select(values, self.verify_costs(values.shape[1]), out)
        return out

    def changed(self, **entries: Any) -> TreeRule:
        """Return a rule with other entries."""
        mine = {name: value for name, value in self.to_dict().items() if name != "kind"}
        return TreeRule(**{**mine, **entries})

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as it is saved."""
        return {
            "kind": self.kind,
            "rate": self.rate,
            "opening_s": self.opening_s,
            "draft_s": list(self.draft_s),
            "verify_s": list(self.verify_s),
            "acceptance": list(self.acceptance),
            "shares": [list(pair) for pair in self.shares],
            "children": [list(level) for level in self.children],
            "first": self.first,
            "ahead": self.ahead,
            "width": self.width,
            "floor": self.floor,
        }
