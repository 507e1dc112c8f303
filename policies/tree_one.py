"""The learned tree policy for one stream and few branches, in plain numbers: what `TreeGain` does on arrays.

A decision on arrays is some fifty small operations, each of several microseconds once a model call has emptied the
processor's caches; on a small pair that is more than the draft step it decides about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .heads import Head
from .tree_calibration import PathCalibrator
from .tree_rule import TreeRule

FEW = 32
"""Branches alive at a depth up to which plain numbers are faster: measured, 6 to 8 us each, against 340 to 490 us for all."""

Level = tuple[list[float], list[float]]
"""Of a depth, by branch: survival, -1 where the policy was not asked, and `next`."""

_EDGE, _LEAST, _SHARE_EDGE = 1e-6, 1e-9, 1e-4


def _sigmoid(odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-(60.0 if odds > 60.0 else -60.0 if odds < -60.0 else odds)))


def _path(row: Sequence[float], above: float, logit: float, rank: int) -> float:
    """Return what `PathCalibrator.of` returns, given its row of the depth."""
    product = above * _sigmoid(logit)
    product = _EDGE if product < _EDGE else 1.0 - _EDGE if product > 1.0 - _EDGE else product
    shift = row[2 + min(rank, len(row) - 3)]
    chance = _sigmoid(row[0] * math.log(product / (1.0 - product)) + row[1] * logit + shift)
    return above if above < chance else chance


class OneTree:
    """Decides for one stream.

    Args:
        head, accept, following, rule, first: of the policy whose decisions these are.
    """

    def __init__(
        self, head: Head, accept: PathCalibrator, following: PathCalibrator, rule: TreeRule, first: int
    ) -> None:
        self._head, self._rule, self._first = head, rule, first
        # As lists: an entry of an array costs as much as the arithmetic on it.
        self._verify: list[float] = rule.verify_tokens.tolist()
        self._rises: list[float] = rule.rises.tolist()
        self._typical = [rule.typical(depth) for depth in range(1, len(rule.acceptance) + 1)]
        self._accept, self._next = (c.knots.double().tolist() for c in (accept, following))
        self._ranks: dict[tuple[int, ...], list[int]] = {}
        self._steps: dict[tuple[int, int], tuple[list[int], list[int], list[list[float]], list[float]]] = {}

    def _tables(self, depth: int, branches: int) -> tuple[list[int], list[int], list[list[float]], list[float]]:
        """Return ranks and children counts of the branches, the costs of extending them, and how acceptance falls."""
        key = depth, branches
        if key not in self._steps:
            rule = self._rule
            costs = rule.costs(depth, branches).tolist()
            ranks, counts = rule.ranks(depth, branches).tolist(), rule.counts(depth, branches).tolist()
            self._steps[key] = ranks, counts, costs, rule.decay(depth).tolist()
        return self._steps[key]

    def keep(
        self, depth: int, alive: Sequence[bool], parent: Sequence[int], rows: Sequence[Sequence[float]],
        levels: Sequence[Level],
    ) -> tuple[list[bool], list[float], list[float]]:  # fmt: skip
        """Return which branches to extend, and the level: survival and `next`.

        Args:
            depth: j.
            alive, parent: by branch.
            rows: features of each branch.
            levels: of the depths above, as far as the policy was asked.
        """
        ranks, counts, costs, decay = self._tables(depth, len(alive))
        accept, following = (table[min(depth, len(table) - 1)] for table in (self._accept, self._next))
        above = self._above(depth, parent, levels)
        if depth and self._rule.floor:
            expected = self._expected(depth, parent, ranks, levels, alive)
            alive = [there and e >= self._rule.floor for there, e in zip(alive, expected, strict=True)]
        survival, chances = [], []
        for b, row in enumerate(rows):
            if not alive[b]:
                survival.append(-1.0)
                chances.append(0.0)
                continue
            one, two = self._head.logits_one(row, depth)
            s = 1.0 if depth == 0 else _path(accept, above[b], one, ranks[b])
            survival.append(s)
            chances.append(_path(following, s, two, ranks[b]) / (s if s > _LEAST else _LEAST))
        if not costs or not costs[0]:
            return [False] * len(alive), survival, chances
        known = [s for level in levels for s in level[0]]
        if depth:
            known += survival
        price = self.price(known) if known else self._rises[0]
        return self._extended(survival, chances, counts, costs, decay, price), survival, chances

    def _above(self, depth: int, parent: Sequence[int], levels: Sequence[Level]) -> list[float]:
        if depth <= 1:
            return [1.0] * len(parent)
        if not levels:
            mean = self._rule.mean_survival(depth - 1, max(parent) + 1).tolist()
            return [mean[p] for p in parent]
        return [max(levels[-1][0][p], 0.0) for p in parent]

    def _expected(
        self, depth: int, parent: Sequence[int], ranks: Sequence[int], levels: Sequence[Level], alive: Sequence[bool]
    ) -> list[float]:
        """Return what survival is expected of the branches that are alive, given the ones above."""
        if depth <= 1 or not levels:
            mean: list[float] = self._rule.mean_survival(depth, len(parent)).tolist()
            return mean
        survival, chances = levels[-1]
        return [
            max(survival[p], 0.0) * self._share(chances[p], rank) if there else 0.0
            for p, rank, there in zip(parent, ranks, alive, strict=True)
        ]

    def price(self, values: Sequence[float]) -> float:
        """Return what `TreeRule.node_price` returns."""
        total = best = 0.0
        count, least = 0, math.inf
        ordered = sorted(values, reverse=True)[: len(self._rises) - 1]
        for at, (value, tokens) in enumerate(zip(ordered, self._verify[1:], strict=False), 1):
            total += value
            if total - tokens > best:
                best, count, least = total - tokens, at, value
        return min(self._rises[count], least)

    def _extended(
        self, survival: Sequence[float], chances: Sequence[float], counts: Sequence[int],
        costs: Sequence[Sequence[float]], decay: Sequence[float], price: float,
    ) -> list[bool]:  # fmt: skip
        """Return what `TreeRule.extend` returns."""
        best = [s * n if s > 0.0 and count else 0.0 for s, n, count in zip(survival, chances, counts, strict=True)]
        order = sorted(range(len(best)), key=lambda b: -best[b])
        # Below the level at which the best branch is worth nothing more, steps only cost.
        reach = sum(best[order[0]] * share > price for share in decay) if order else 0
        levels = min(len(costs[0]), max(reach, 1))
        gains = [0.0] * levels
        most, rows = 0.0, 0
        for m, b in enumerate(order[: self._rule.width], 1):
            if not best[b] > 0.0:
                break
            worth = 0.0
            for rank in range(1, counts[b]):
                worth += max(survival[b] * self._share(chances[b], rank) - price, 0.0)
            row = costs[m - 1]
            for t in range(levels):
                more = best[b] * decay[t] - price
                if more > 0.0:
                    worth += more
                gains[t] += worth
                if gains[t] - row[t] > most:
                    most, rows = gains[t] - row[t], m
        chosen = set(order[:rows])
        return [b in chosen and best[b] > 0.0 for b in range(len(survival))]

    def select(
        self, parent: Sequence[int], depth: Sequence[int], drawn: Sequence[bool], levels: Sequence[Level]
    ) -> list[bool]:
        """Return which nodes to verify.

        Args:
            parent, depth, drawn: by node.
            levels: after drafting.
        """
        values = self.survival(parent, depth, levels, drawn)
        order = sorted((node for node, there in enumerate(drawn) if there), key=lambda node: -values[node])
        tokens = self._rule.verify_all(len(parent))
        total = best = 0.0
        count = 0
        for at, node in enumerate(order, 1):
            total += values[node]
            if total - tokens[at] > best:
                best, count = total - tokens[at], at
        chosen = [False] * len(parent)
        for node in order[:count]:
            chosen[node] = True
        return chosen

    def survival(
        self, parent: Sequence[int], depth: Sequence[int], levels: Sequence[Level], drawn: Sequence[bool] | None = None
    ) -> list[float]:
        """Return what `TreeGain.node_survival` returns; of nodes that are not drawn, nor is any below them, 0."""
        offset, typical = max(self._first, 1), self._typical
        ranks = self._node_ranks(tuple(parent))
        width = [depth.count(d) for d in range(offset, offset + len(levels))]
        values: list[float] = []
        chances: list[float] = []
        place, last = 0, 0
        for node, above in enumerate(parent):
            d = depth[node]
            place, last = (place + 1, last) if d == last else (0, d)
            if drawn is not None and not drawn[node]:
                values.append(0.0)
                chances.append(0.0)
                continue
            inherited, chance = (values[above], chances[above]) if above >= 0 else (1.0, typical[0])
            at = d - offset
            if 0 <= at < len(levels) and width[at] == len(levels[at][0]) and levels[at][0][place] >= 0.0:
                values.append(min(levels[at][0][place], inherited))
                chances.append(levels[at][1][place])
            else:
                values.append(inherited * self._share(chance, ranks[node]))
                chances.append(typical[min(d, len(typical) - 1)])
        return values

    def _share(self, chance: float, rank: int) -> float:
        """Return what `TreeRule.share` returns."""
        pairs = self._rule.shares
        if rank == 0 or not pairs:
            return chance
        u, v = pairs[min(rank, len(pairs)) - 1]
        inside = min(max(chance, _SHARE_EDGE), 1.0 - _SHARE_EDGE)
        return _sigmoid(u + v * math.log(inside / (1.0 - inside)))

    def _node_ranks(self, parent: tuple[int, ...]) -> list[int]:
        if parent not in self._ranks:
            seen: dict[int, int] = {}
            ranks = []
            for above in parent:
                ranks.append(seen.get(above, 0))
                seen[above] = ranks[-1] + 1
            self._ranks[parent] = ranks
        return self._ranks[parent]
