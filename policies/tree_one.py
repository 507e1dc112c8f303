"""The learned tree policy for one stream and few branches, in plain numbers: what `TreeGain` does on arrays.

A decision on arrays is some fifty small operations, each of several microseconds once a model call has emptied the
processor's caches; on a small pair that is more than the draft step it decides about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log

from .heads import Head
from .tree_calibration import PathCalibrator
from .tree_rule import TreeRule

FEW = 32
"""Branches alive at a depth up to which plain numbers are faster: measured, 6 to 8 us each, against 340 to 490 us for all."""

Level = tuple[list[float], list[float]]
"""Of a depth, by branch: survival, -1 where the policy was not asked, and `next`."""

_EDGE, _LEAST, _SHARE_EDGE = 1e-6, 1e-9, 1e-4


@dataclass(slots=True)
class _Step:
    """What is known of the branches of a depth before anything is read.

    Attributes:
        ranks, counts, mean: by branch: its rank, how many children it has, its mean survival.
        accept, following: (scale, tilt) of the calibrations, and by branch their shifts.
        costs: [B][T], of extending 1, 2, ... branches by 1, 2, ... levels; `least` of one more level.
        decay: [T], how survival falls.
    """

    ranks: list[int]
    counts: list[int]
    mean: list[float]
    accept: tuple[float, float, list[float]]
    following: tuple[float, float, list[float]]
    costs: list[list[float]]
    least: float
    decay: list[float]


@dataclass(slots=True)
class _Shape:
    """What is known of the nodes of a tree: rank among siblings, place in the level, and the width of each level."""

    ranks: list[int]
    places: list[int]
    widths: list[int]


def _sigmoid(odds: float) -> float:
    return 1.0 / (1.0 + exp(-(60.0 if odds > 60.0 else -60.0 if odds < -60.0 else odds)))


def _path(scale: float, tilt: float, shift: float, above: float, logit: float) -> float:
    """Return what `PathCalibrator.of` returns, given its row of the depth."""
    product = above / (1.0 + exp(-logit)) if -60.0 < logit < 60.0 else above * _sigmoid(logit)
    product = _EDGE if product < _EDGE else 1.0 - _EDGE if product > 1.0 - _EDGE else product
    odds = scale * log(product / (1.0 - product)) + tilt * logit + shift
    chance = 1.0 / (1.0 + exp(-odds)) if -60.0 < odds < 60.0 else _sigmoid(odds)
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
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._steps: dict[tuple[int, int], _Step] = {}

    def _step(self, depth: int, branches: int) -> _Step:
        key = depth, branches
        if key not in self._steps:
            rule = self._rule
            ranks, counts, mean = (
                values.tolist()
                for values in (f(depth, branches) for f in (rule.ranks, rule.counts, rule.mean_survival))
            )
            rows = (table[min(depth, len(table) - 1)] for table in (self._accept, self._next))
            accept, following = (
                (scale, tilt, [shifts[min(rank, len(shifts) - 1)] for rank in ranks]) for scale, tilt, *shifts in rows
            )
            costs = rule.costs(depth, branches).tolist()
            least = min((b - a for row in costs for a, b in pairwise([0.0, *row])), default=0.0)
            decay = rule.decay(depth).tolist()
            self._steps[key] = _Step(ranks, counts, mean, accept, following, costs, least, decay)
        return self._steps[key]

    def keep(
        self, depth: int, alive: Sequence[bool], parent: Sequence[int], columns: Sequence[Sequence[float]],
        levels: Sequence[Level],
    ) -> tuple[list[bool], list[float], list[float]]:  # fmt: skip
        """Return which branches to extend, and the level: survival and `next`.

        Args:
            depth: j.
            alive, parent: by branch.
            columns: by feature, then by branch.
            levels: of the depths above, as far as the policy was asked.
        """
        step = self._step(depth, len(alive))
        asked, above = self._asked(depth, alive, parent, step, levels)
        survival, chances = [-1.0] * len(alive), [0.0] * len(alive)
        (scale, tilt, shifts), (next_scale, next_tilt, next_shifts) = step.accept, step.following
        for b, a, (one, two) in zip(asked, above, self._head.logits_few(columns, asked, depth), strict=True):
            s = survival[b] = _path(scale, tilt, shifts[b], a, one) if depth else 1.0
            chances[b] = _path(next_scale, next_tilt, next_shifts[b], s, two) / (s if s > _LEAST else _LEAST)
        if not step.decay:
            return [False] * len(alive), survival, chances
        known = [s for level in levels for s in level[0]]
        if depth:
            known += survival
        price = self.price(known) if known else self._rises[0]
        return self._extended(survival, chances, step, price), survival, chances

    def _asked(
        self, depth: int, alive: Sequence[bool], parent: Sequence[int], step: _Step, levels: Sequence[Level]
    ) -> tuple[list[int], list[float]]:
        """Return the branches that are alive and not below the floor by what is expected, and the survival above each."""
        floor = self._rule.floor
        if depth < 2 or not levels:
            asked = [b for b, there in enumerate(alive) if there and (not depth or step.mean[b] >= floor)]
            if depth < 2:
                return asked, [1.0] * len(asked)
            mean = self._rule.mean_survival(depth - 1, max(parent) + 1).tolist()
            return asked, [mean[parent[b]] for b in asked]
        survival, chances = levels[-1]
        asked, above = [], []
        for b, there in enumerate(alive):
            if there:
                p = parent[b]
                s = max(survival[p], 0.0)
                if s * self._share(chances[p], step.ranks[b]) >= floor:
                    asked.append(b)
                    above.append(s)
        return asked, above

    def price(self, values: Sequence[float]) -> float:
        """Return what `TreeRule.node_price` returns."""
        total = best = 0.0
        count, least = 0, inf
        ordered = sorted(values, reverse=True)[: len(self._rises) - 1]
        for at, (value, tokens) in enumerate(zip(ordered, self._verify[1:], strict=False), 1):
            total += value
            if total - tokens > best:
                best, count, least = total - tokens, at, value
        return min(self._rises[count], least)

    def _extended(self, survival: Sequence[float], chances: Sequence[float], step: _Step, price: float) -> list[bool]:
        """Return what `TreeRule.extend` returns."""
        counts, decay = step.counts, step.decay
        best = [s * n if s > 0.0 and count else 0.0 for s, n, count in zip(survival, chances, counts, strict=True)]
        order = [b for b in sorted(range(len(best)), key=best.__getitem__, reverse=True) if best[b] > 0.0]
        kept = [False] * len(best)
        if not order:
            return kept
        # A level that even the best branch gains nothing from only costs, and so does one that all together cannot pay for.
        first, every, levels = best[order[0]], sum(best), len(decay)
        while levels > 1 and (first * decay[levels - 1] <= price or every * decay[levels - 1] <= step.least):
            levels -= 1
        gains, top, rows = [0.0] * levels, 0.0, 0
        for m, b in enumerate(order[: self._rule.width], 1):
            worth = 0.0
            for rank in range(1, counts[b]):
                more = survival[b] * self._share(chances[b], rank) - price
                if more > 0.0:
                    worth += more
            costs, own = step.costs[m - 1], best[b]
            for t in range(levels):
                more = own * decay[t] - price
                if more > 0.0:
                    worth += more
                gains[t] += worth
                if gains[t] - costs[t] > top:
                    top, rows = gains[t] - costs[t], m
        for b in order[:rows]:
            kept[b] = True
        return kept

    def select(
        self, parent: Sequence[int], depth: Sequence[int], drawn: Sequence[bool], levels: Sequence[Level]
    ) -> list[bool]:
        """Return which nodes to verify.

        Args:
            parent, depth, drawn: by node.
            levels: after drafting.
        """
        there = [node for node, drawn_ in enumerate(drawn) if drawn_]
        values = self.survival(parent, depth, levels, there)
        order = sorted(there, key=values.__getitem__, reverse=True)
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
        self, parent: Sequence[int], depth: Sequence[int], levels: Sequence[Level], nodes: Sequence[int]
    ) -> list[float]:
        """Return what `TreeGain.node_survival` returns, of `nodes` and those above them, which are among them; else 0."""
        first, typical, shape = max(self._first, 1), self._typical, self._shape(tuple(parent), depth)
        values, chances = [0.0] * len(parent), [0.0] * len(parent)
        for node in nodes:
            above, d, place = parent[node], depth[node], shape.places[node]
            inherited, chance = (values[above], chances[above]) if above >= 0 else (1.0, typical[0])
            at = d - first
            known = levels[at] if 0 <= at < len(levels) and shape.widths[d] == len(levels[at][0]) else None
            if known is not None and known[0][place] >= 0.0:
                values[node], chances[node] = min(known[0][place], inherited), known[1][place]
            else:
                values[node] = inherited * self._share(chance, shape.ranks[node])
                chances[node] = typical[min(d, len(typical) - 1)]
        return values

    def _share(self, chance: float, rank: int) -> float:
        """Return what `TreeRule.share` returns."""
        pairs = self._rule.shares
        if rank == 0 or not pairs:
            return chance
        u, v = pairs[min(rank, len(pairs)) - 1]
        inside = min(max(chance, _SHARE_EDGE), 1.0 - _SHARE_EDGE)
        return _sigmoid(u + v * log(inside / (1.0 - inside)))

    def _shape(self, parent: tuple[int, ...], depth: Sequence[int]) -> _Shape:
        if parent not in self._shapes:
            children, widths, ranks, places = Counter[int](), [0] * (max(depth, default=0) + 1), [], []
            for above, d in zip(parent, depth, strict=True):
                ranks.append(children[above])
                places.append(widths[d])
                children[above] += 1
                widths[d] += 1
            self._shapes[parent] = _Shape(ranks, places, widths)
        return self._shapes[parent]
