"""The learned tree policy: its decisions against the formulas in plain numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from specstop.policies.contract import Array, DraftStep, DraftTree, StopPolicy
from specstop.policies.costs import extrapolate
from specstop.policies.learned import TreeGain
from steps import draft_step
from trees import BELOW, make_tree_policy

Levels = list[tuple[Array, Array]]
"""By depth of decision: survival [S, B], -1 where a branch was not read, and next."""

PARENT = np.array([-1, -1, -1, 0, 0, 1, 3, 3, 4, 6, 9])
OTHER = np.array([-1, -1, 1, 0, 1, 0, 0, 2, 2, 6])
"""Siblings that are not adjacent, and more of them than the rule and the calibration have entries for."""

NEAR = 1e-9
"""Between survivals of kernels and of numpy, whose exponentials differ in the last place."""


def depths_of(parent: Array) -> Array:
    depth: list[int] = []
    for parent_node in parent.tolist():
        depth.append(1 if parent_node < 0 else depth[parent_node] + 1)
    return np.array(depth)


def children_of(parent: Array) -> list[list[int]]:
    """Return by depth, of each branch, how many children it has."""
    depth, counts = depths_of(parent), [int((parent == node).sum()) for node in range(-1, len(parent))]
    return [[counts[0]], *([counts[1 + n] for n in np.flatnonzero(depth == d)] for d in range(1, depth.max() + 1))]


def make_steps(
    policy: StopPolicy, seed: int, streams: int = 1, parent: Array = PARENT, digits: int = 9
) -> list[DraftStep]:
    """Return steps of the tree of `parent` from the first decision on; with few digits many branches tie."""
    rng, depth, steps = np.random.default_rng(seed), depths_of(parent), []
    for d in range(policy.first, int(depth.max())):
        nodes = np.flatnonzero(depth == d) if d else np.array([0])
        above = parent[nodes] - np.flatnonzero(depth == d - 1)[0] if d > 1 else np.zeros(len(nodes), dtype=np.int64)
        alive = rng.random((streams, len(nodes))) > 0.15 * (d > 0)
        features = rng.random((streams, len(nodes), len(policy.features))).round(digits) * alive[..., None]
        batch = np.zeros(streams, dtype=np.int64)
        steps.append(draft_step(d, features, alive, np.tile(above, (streams, 1)), batch=batch))
    return steps


def make_drawn(seed: int, streams: int = 1, parent: Array = PARENT) -> DraftTree:
    drawn = np.random.default_rng(seed).random((streams, len(parent))) > 0.2
    for node, above in enumerate(parent.tolist()):
        drawn[:, node] &= drawn[:, above] if above >= 0 else True
    return DraftTree(*(np.tile(values, (streams, 1)) for values in (parent, parent, depths_of(parent))), drawn)


class Reference:
    """The decisions of a policy from the formulas in plain numpy."""

    def __init__(self, policy: TreeGain) -> None:
        self.policy, self.rule = policy, policy.rule
        tokens = self.tokens(64)
        rises = [((tokens[n + 1 :] - tokens[n]) / np.arange(1, 65 - n)).min() for n in range(64)]
        self.rises = np.maximum([*rises, rises[-1]], 0.0)

    def share(self, chance: Array, ranks: Array) -> Array:
        pairs = np.array([(0.0, 1.0), *self.rule.shares])[np.minimum(ranks, len(self.rule.shares))]
        inside = np.clip(chance, 1e-4, 1.0 - 1e-4)
        odds = pairs[..., 0] + pairs[..., 1] * np.log(inside / (1.0 - inside))
        return np.where(ranks > 0, 1.0 / (1.0 + np.exp(-odds)), chance)

    def mean(self, depth: int) -> float:
        """Return the probability that the best child at a depth is accepted, given its parent is."""
        return self.rule.acceptance[min(depth, len(self.rule.acceptance)) - 1]

    def ranks(self, depth: int, branches: int) -> Array:
        children = self.rule.children
        if 0 < depth <= len(children) and sum(children[depth - 1]) == branches:
            return np.concatenate([np.arange(n) for n in children[depth - 1]])
        return np.arange(branches) if depth == 1 else np.zeros(branches, dtype=np.int64)

    def counts(self, depth: int, branches: int) -> Array:
        children = self.rule.children
        fits = depth < len(children) and len(children[depth]) == branches
        return np.array(children[depth] if fits else [1] * branches)

    def mean_survival(self, depth: int, branches: int) -> Array:
        """Return the expected survival in the tree of the rule, if that has as many branches."""
        mean = np.ones(1)
        for d, counts in enumerate(self.rule.children[:depth], 1):
            ranks = np.concatenate([np.arange(n) for n in counts])
            mean = np.repeat(mean, counts) * self.share(np.full(len(ranks), self.mean(d)), ranks)
        if depth <= len(self.rule.children) and len(mean) >= branches:
            return mean[:branches]
        return np.full(branches, np.prod(self.rule.acceptance[:depth]))

    def path(self, table: Array, parent_chance: Array, logits: Array, depth: int, ranks: Array) -> Array:
        scale, tilt, *shifts = table[min(depth, len(table) - 1)].astype(np.float64)
        product = np.clip(parent_chance / (1.0 + np.exp(-np.clip(logits, -60.0, 60.0))), 1e-6, 1.0 - 1e-6)
        odds = scale * np.log(product / (1.0 - product)) + tilt * logits
        odds = np.clip(odds + np.array(shifts)[np.minimum(ranks, len(shifts) - 1)], -60.0, 60.0)
        return np.minimum(1.0 / (1.0 + np.exp(-odds)), parent_chance)

    def read(self, step: DraftStep, levels: Levels) -> tuple[Array, Array]:
        """Return survival and next of the branches of a depth."""
        depth, (streams, branches) = step.depth, step.alive.shape
        ranks = self.ranks(depth, branches)
        scores = self.policy.head.scores(step.features.reshape(-1, step.features.shape[2]), depth)
        accept, next_ = np.moveaxis(scores.reshape(streams, branches, 2), 2, 0)
        if depth < 2 or not levels:
            wide = int(step.parent.max()) + 1
            parent_chance = self.mean_survival(depth - 1, wide)[step.parent] if depth > 1 else np.ones(step.alive.shape)
            expected = np.broadcast_to(self.mean_survival(depth, branches), step.alive.shape)
        else:
            one, two = (np.take_along_axis(values, step.parent, 1) for values in levels[-1])
            parent_chance = np.maximum(one, 0.0)
            expected = parent_chance * self.share(two, ranks)
        is_read = step.alive & ((depth == 0) | (expected >= self.rule.floor))
        survival = np.ones(is_read.shape)
        if depth:
            survival = self.path(self.policy.accept.knots, parent_chance, accept, depth, ranks)
        chance = self.path(self.policy.next.knots, survival, next_, depth, ranks) / np.maximum(survival, 1e-9)
        return np.where(is_read, survival, -1.0), np.where(is_read, chance, 0.0)

    def price(self, values: Array) -> Array:
        best = -np.sort(-values, 1)[:, :64]
        sums = np.cumsum(best, 1) - self.tokens(64)[1 : best.shape[1] + 1]
        count = np.where(sums.max(1) > 0.0, sums.argmax(1) + 1, 0)
        least = np.where(count > 0, np.take_along_axis(best, np.maximum(count - 1, 0)[:, None], 1)[:, 0], np.inf)
        return np.minimum(self.rises[count], least)

    def tokens(self, nodes: int) -> Array:
        seconds = extrapolate(self.rule.verify_s, nodes + 1)
        return (seconds - seconds[0]) * self.rule.rate

    def keep(self, step: DraftStep, levels: Levels) -> Array:
        """Return the branches to extend, and append the level."""
        depth, acceptance = step.depth, self.rule.acceptance
        survival, next_ = self.read(step, levels)
        if depth:
            levels.append((survival, next_))
        further = np.arange(1, max(len(acceptance) - depth, 0) + 1)
        if not further.size:
            return np.zeros(step.alive.shape, dtype=bool)
        counts = self.counts(depth, step.alive.shape[1])
        nodes = [values for values, _ in levels]
        price = self.price(np.concatenate(nodes, 1)) if nodes else self.price(np.zeros((len(survival), 1)) - 1.0)
        survival = np.where(counts > 0, np.maximum(survival, 0.0), 0.0)
        best = survival * next_
        falls = [self.rule.ahead * self.mean(d) for d in range(depth + 2, len(acceptance) + 1)]
        worth = np.maximum(best[..., None] * np.cumprod([1.0, *falls]) - price[:, None, None], 0.0)
        for rank in range(1, int(counts.max(initial=0))):
            other = survival * self.share(next_, np.full(next_.shape, rank)) * (counts > rank)
            worth[..., 0] += np.maximum(other - price[:, None], 0.0)
        order = np.argsort(-best, axis=1, kind="stable")
        rows = extrapolate(self.rule.draft_s, len(counts))[:, None]
        seconds = rows * further if depth else self.rule.opening_s + rows * (further - 1)
        gain = np.take_along_axis(worth.cumsum(2), order[..., None], 1).cumsum(1) - self.rule.rate * seconds
        most = gain.max(2)[:, : self.rule.width]
        rows = np.where(most.max(1) > 0.0, most.argmax(1) + 1, 0)
        return (np.argsort(order, axis=1) < rows[:, None]) & (survival > 0.0)

    def values(self, tree: DraftTree, levels: Levels) -> Array:
        """Return the survival of all nodes."""
        parent, depth, drawn = tree.parent[0], tree.depth[0], tree.drawn
        out, next_ = np.empty(drawn.shape), np.empty(drawn.shape)
        for d in range(1, int(depth.max()) + 1):
            nodes = np.flatnonzero(depth == d)
            parents = parent[nodes]
            ranks = np.tril(parents[:, None] == parents[None], -1).sum(1)
            inherited, chance = np.ones((len(drawn), len(nodes))), np.full((len(drawn), len(nodes)), self.mean(1))
            if d > 1:
                inherited, chance = out[:, parents], next_[:, parents]
            out[:, nodes] = inherited * self.share(chance, ranks)
            next_[:, nodes] = self.mean(d + 1)
            at = d - max(self.rule.first, 1)
            if 0 <= at < len(levels):
                read = levels[at][0] >= 0.0
                out[:, nodes] = np.where(read, np.minimum(levels[at][0], inherited), out[:, nodes])
                next_[:, nodes] = np.where(read, levels[at][1], next_[:, nodes])
        return np.where(drawn, out, -1.0)

    def select(self, values: Array) -> Array:
        order = np.argsort(-values, axis=1, kind="stable")
        sums = np.take_along_axis(values, order, 1).cumsum(1) - self.tokens(values.shape[1])[1:]
        count = np.where(sums.max(1) > 0.0, sums.argmax(1) + 1, 0)
        return (np.argsort(order, axis=1) < count[:, None]) & (values >= 0.0)


def random_policy(seed: int, parent: Array) -> TreeGain:
    """Return a policy with random prices and limits; every second one has the children of this tree."""
    rng = np.random.default_rng(seed)
    verify = np.cumsum(rng.random(int(rng.integers(2, 14)))) * rng.choice([5e-4, 4e-3, 1.5e-2])
    changes = {
        "rate": rng.integers(20, 250).item() if seed % 4 else float(rng.uniform(20.0, 250.0)),
        "draft_s": (np.cumsum(rng.random(int(rng.integers(1, 5)))) * 5e-4).tolist(),
        "verify_s": verify.tolist(),
        "acceptance": rng.uniform(0.3, 0.95, 5).tolist(),
        "shares": rng.normal(-1.0, 0.7, (int(rng.integers(0, 4)), 2)).tolist(),
        "children": children_of(parent) if seed % 2 else [list(level) for level in BELOW],
        "ahead": float(rng.choice([0.0, 0.5, 1.0])),
        "width": int(rng.choice([1, 2, 64])),
        "floor": float(rng.choice([0.0, 0.05, 0.2])),
        "first": int(rng.integers(0, 3)),
    }
    policy = make_tree_policy()
    return policy.with_rule(dataclasses.replace(policy.rule, **changes))


@pytest.mark.parametrize("seed", range(24))
def test_decisions_follow_the_formulas_for_random_prices_trees_and_ties(seed):
    parent, streams = (PARENT, OTHER)[seed // 2 % 2], 60
    policy = random_policy(seed, parent)
    reference, levels = Reference(policy), Levels()
    state = policy.start(streams, np.arange(streams))
    for step in make_steps(policy, seed, streams, parent, digits=(0, 1, 9)[seed % 3]):
        mask, state = policy.keep(step, state)
        assert np.array_equal(mask, reference.keep(step, levels) & step.alive)
    assert state[0] == pytest.approx(np.concatenate([np.stack(level, 1) for level in levels], 2), abs=NEAR)
    tree = make_drawn(seed, streams, parent)
    values = policy.node_survival(tree, state)
    assert values == pytest.approx(reference.values(tree, levels), abs=NEAR)
    assert np.array_equal(policy.select(tree, state), reference.select(values))
