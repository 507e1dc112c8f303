"""What nodes of a tree cost and bring: which branches to extend, and which nodes to verify."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .errors import PolicyError

Array = np.ndarray[Any, Any]
MOST_NODES = 64
"""Values that the price of a further node is worked out from: those of the best nodes."""

_EDGE = 1e-4

MOST_ENTRIES = 1024
"""Of any list, and nodes of the tree."""


class TreeRule:
    """Buys draft steps and verified nodes with expected tokens, at the policy's own rate rho.

    With s the survival of a node and n = `next`, its children of rank 0, 1, ... are expected to have survival s n, s f_1(n),
    s f_2(n), ..., and those below the best child a share of that which falls by the mean acceptance from level to level.
    What is above the price of a node counts as gain. The m best branches are extended by t levels where that gain, summed,
    less rho times the seconds of t steps of m rows, is largest; none where it is never positive. (The derived rule with
    look-ahead, for trees; a draft step's price is shared by the branches.) The price of a node is what verifying one more
    costs, or the value of the least node that it would displace.

    Args:
        rate: rho, tokens per second.
        opening_s: seconds of the first draft step of a round, the decision behind it included.
        draft_s: of a later step that reads 1, 2, ... rows, likewise.
        verify_s: of verifying 0, 1, ... nodes; beyond the tables seconds go on as at their end.
        acceptance: a_1..a_K, mean chance that the best child of an accepted node is accepted, by its depth.
        shares: for rank 1, 2, ...: (u, v), f(n) = sigmoid(u + v logit n).
        children: by depth, of each branch: how many are drawn below it. Branches of another tree count as one.
        first: depth of the first decision.
        ahead: share of the acceptance that is looked ahead with.
        width: most branches extended at a depth.
        floor: branches that are expected to survive with less than this, judged by the branch above, are not read.

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
        pairs = np.array([(0.0, 1.0), *self.shares])
        self._u, self._v = pairs[:, 0], pairs[:, 1]
        self._counts = [np.array(level, dtype=np.int64) for level in self.children]
        self._ranks, self._mean = [np.zeros(1, dtype=np.int64)], [np.ones(1)]
        for depth, counts in enumerate(self._counts, 1):
            ranks = np.concatenate([np.arange(n) for n in counts]) if counts.size else np.zeros(0, dtype=np.int64)
            chance = self.share(np.full(len(ranks), self.typical(depth)), ranks)
            self._ranks.append(ranks)
            self._mean.append(np.repeat(self._mean[-1], counts) * chance)
        self._costs: dict[tuple[int, int], Array] = {}
        self._verify_all: dict[int, list[float]] = {}
        verify = np.array(longer(self.verify_s, MOST_NODES + 1)) * rate
        self.verify_tokens: Array = verify - verify[0]
        rises = [min((verify[n + 1 :] - verify[n]) / np.arange(1, MOST_NODES + 1 - n)) for n in range(MOST_NODES)]
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

    def typical(self, depth: int) -> float:
        """Return the mean chance that the best child at `depth` is accepted, if its parent is."""
        return self.acceptance[min(depth, len(self.acceptance)) - 1]

    def share(self, chance: Array, ranks: Array) -> Array:
        """Return the chance that the child of each rank is accepted, given that of the best one."""
        at = np.minimum(ranks, len(self._u) - 1)
        inside = np.clip(chance, _EDGE, 1.0 - _EDGE)
        other = 1.0 / (1.0 + np.exp(-self._u[at] - self._v[at] * np.log(inside / (1.0 - inside))))
        out: Array = np.where(ranks > 0, other, chance)
        return out

    def counts(self, depth: int, branches: int) -> Array:
        """Return [B], how many children are drawn below each branch of a depth."""
        if depth < len(self._counts) and len(self._counts[depth]) == branches:
            return self._counts[depth]
        return np.ones(branches, dtype=np.int64)

    def ranks(self, depth: int, branches: int) -> Array:
        """Return [B], the rank of each branch of a depth among its siblings."""
        if depth < len(self._ranks) and len(self._ranks[depth]) == branches:
            return self._ranks[depth]
        return np.arange(branches) if depth == 1 else np.zeros(branches, dtype=np.int64)

    def mean_survival(self, depth: int, branches: int) -> Array:
        """Return [B], the mean survival of the branches of a depth."""
        if depth < len(self._mean) and len(self._mean[depth]) >= branches:
            return self._mean[depth][:branches]
        return np.full(branches, float(np.prod(self.acceptance[:depth])))

    def node_price(self, values: Array) -> Array:
        """Return [S], what a further node must be worth, given the values [S, N] of those there are."""
        best = -np.sort(-values, 1)[:, :MOST_NODES]
        sums = np.cumsum(best, 1) - self.verify_tokens[1 : best.shape[1] + 1]
        count = np.where(sums.max(1) > 0.0, sums.argmax(1) + 1, 0)
        least = np.where(count > 0, np.take_along_axis(best, np.maximum(count - 1, 0)[:, None], 1)[:, 0], np.inf)
        return np.minimum(self.rises[count], least)

    def verify_all(self, nodes: int) -> list[float]:
        """Return [N + 1], what verifying 0..N nodes costs in tokens."""
        if nodes not in self._verify_all:
            seconds = np.array(longer(self.verify_s, nodes + 1))
            self._verify_all[nodes] = ((seconds - seconds[0]) * self.rate).tolist()
        return self._verify_all[nodes]

    def choose(self, values: Array) -> Array:
        """Return [S, N] bool, the nodes to verify, given their values; those below 0 are not there."""
        order = np.argsort(-values, axis=1, kind="stable")
        best = np.take_along_axis(values, order, 1)
        sums = np.cumsum(best, 1)
        sums = sums - np.array(self.verify_all(values.shape[1]))[1:]
        count = np.where(sums.max(1) > 0.0, sums.argmax(1) + 1, 0)
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.broadcast_to(np.arange(values.shape[1]), order.shape), 1)
        mask: Array = place < count[:, None]
        return mask

    def costs(self, depth: int, branches: int) -> Array:
        """Return [B, T], in tokens, of extending 1..B branches of a depth by 1..T levels."""
        key = depth, branches
        if key not in self._costs:
            steps = np.arange(1, max(len(self.acceptance) - depth, 0) + 1)
            rows = np.array(longer(self.draft_s, branches))[:, None]
            seconds = rows * steps if depth else self.opening_s + rows * (steps - 1)
            self._costs[key] = self.rate * seconds
        return self._costs[key]

    def decay(self, depth: int) -> Array:
        """Return [T], the share of a best child's survival that the best node 0, 1, ... levels below it should have."""
        falls = [self.ahead * self.typical(d) for d in range(depth + 2, len(self.acceptance) + 1)]
        out: Array = np.cumprod([1.0, *falls])[: max(len(self.acceptance) - depth, 0)]
        return out

    def extend(self, depth: int, survival: Array, following: Array, levels: Sequence[Array]) -> Array:
        """Return [S, B] bool, the branches to extend.

        Args:
            depth: j.
            survival, following: [S, B] of the branches; survival below 0 where there is none.
            levels: survival of the nodes of all depths down to j, as far as it is known.
        """
        streams, branches = survival.shape
        costs = self.costs(depth, branches)
        if not costs.shape[1]:
            return np.zeros(survival.shape, dtype=bool)
        counts = self.counts(depth, branches)
        survival = np.where(counts > 0, np.maximum(survival, 0.0), 0.0)
        price = self.node_price(np.concatenate(levels, 1)) if levels else np.full(streams, self.rises[0])
        best = survival * following
        worth = np.maximum(best[..., None] * self.decay(depth) - price[:, None, None], 0.0)  # [S, B, T]
        further = np.arange(1, int(counts.max(initial=0)))
        if further.size:
            other = survival[..., None] * self.share(following[..., None], further) * (counts[:, None] > further)
            worth[..., 0] += np.maximum(other - price[:, None, None], 0.0).sum(2)
        worth = worth.cumsum(2)
        order = np.argsort(-best, axis=1, kind="stable")
        gain = np.take_along_axis(worth, order[..., None], 1).cumsum(1) - costs
        most = gain.max(2)[:, : self.width]
        rows = np.where(most.max(1) > 0.0, most.argmax(1) + 1, 0)
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.broadcast_to(np.arange(branches), order.shape), 1)
        mask: Array = (place < rows[:, None]) & (survival > 0.0)
        return mask

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


def build_tree_rule(raw: Mapping[str, Any]) -> TreeRule:
    """Return the rule saved as `raw`; a mangled one is a `PolicyError`."""
    entries = {name: value for name, value in raw.items() if name != "kind"}
    try:
        return TreeRule(**entries)
    except (TypeError, ValueError, IndexError) as error:
        raise PolicyError(f"rule gain: lacks or mangles an entry ({error})") from None


def longer(table: Sequence[float], count: int) -> list[float]:
    """Return `count` entries of a table, which goes on with its mean rise."""
    rise = (table[-1] - table[0]) / (len(table) - 1) if len(table) > 1 else 0.0
    return [*table[:count], *(table[-1] + rise * (i + 1) for i in range(count - len(table)))]
