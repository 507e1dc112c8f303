"""Rounds of random features on chains and trees: what a policy decides of any number of streams side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from specstop.decode.topology import Topology
from specstop.policies.contract import DraftStep, DraftTree, RoundOutcome, StopPolicy
from specstop.policies.features import feature

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rounds:
    """What R rounds of S streams would show.

    Attributes:
        tree: what is drafted where the policy never stops; row 0 is the anchor.
        features: [R, S, rows, F] float32.
        ended: [R, S, rows] bool, branches that end with EOS.
        accepted: [R, S] tokens that the target would accept.
        seconds: [R, S] of the rounds.
    """

    tree: Topology
    features: Array
    ended: Array
    accepted: Array
    seconds: Array


def draw_rounds(policy: StopPolicy, tree: Topology, streams: int, count: int, seed: int) -> Rounds:
    """Return `count` random rounds with the features that the policy reads, each within its range."""
    chance = np.random.default_rng(seed)
    shape = (count, streams, len(tree))
    features = np.empty((*shape, len(policy.features)), dtype=np.float32)
    for at, name in enumerate(policy.features):
        drawn = chance.random(shape)
        if name == "depth":
            drawn[:] = tree.depth
        elif name == "path_logprob":
            drawn = np.log(drawn)
            for row, parent in enumerate(tree.parent):
                drawn[..., row] = drawn[..., parent] + drawn[..., row] if parent >= 0 else 0.0
        elif not feature(name).is_probability:
            drawn = 3.0 * drawn
        features[..., at] = drawn
    ended = chance.random(shape) < 0.03
    return Rounds(tree, features, ended, chance.integers(0, 4, shape[:2]), chance.random(shape[:2]) * 0.02 + 0.005)


def play(policy: StopPolicy, rounds: Rounds, part: slice, keys: Array) -> Array:
    """Return [s, R, rows, 2] bool, what the policy kept and what it sent to the target, of some of the streams together."""
    tree, keys = rounds.tree, keys[part]
    out = np.zeros((len(keys), len(rounds.features), len(tree), 2), dtype=bool)
    state = policy.start(len(keys), keys)
    for r, features in enumerate(rounds.features[:, part]):
        drawn, alive = np.zeros((len(keys), len(tree)), dtype=bool), np.ones((len(keys), 1), dtype=bool)
        drawn[:, 0] = True
        for depth in range(min(policy.max_depth, tree.deepest)):
            rows, next_rows = tree.levels[depth], tree.levels[depth + 1]
            if depth >= policy.first and alive.any():
                parent = np.tile(tree.parent_in_level[depth], (len(keys), 1))
                shown = np.ascontiguousarray(features[:, rows])
                kept, state = policy.keep(DraftStep(depth, alive, parent, shown, {}, np.arange(len(keys))), state)
                alive = alive & kept
            out[:, r, rows, 0] = alive
            drawn[:, next_rows] = alive[:, tree.parent_in_level[depth + 1]]
            alive = np.ascontiguousarray(drawn[:, next_rows] & ~rounds.ended[r, part][:, next_rows])
        out[:, r, :, 1] = sent = drawn & _selected(policy, tree, drawn, state)
        verified = sent[:, 1:].sum(1)
        accepted = np.minimum(rounds.accepted[r, part], verified)
        active, cut = np.ones(len(keys), dtype=bool), np.zeros(len(keys), dtype=bool)
        told = RoundOutcome(active, drawn[:, 1:].sum(1), verified, accepted, cut, rounds.seconds[r, part].copy())
        state = policy.observe(told, state)
    return out


def _selected(policy: StopPolicy, tree: Topology, drawn: Array, state: Any) -> Array:
    """Return [s, rows] bool, what the policy sends of what was drawn."""
    nodes = drawn[:, 1:]
    parent, depth = (np.tile(numbers, (len(nodes), 1)) for numbers in (tree.parents[1:] - 1, tree.depths[1:]))
    mask = policy.select(DraftTree(np.where(nodes, 5, -1), parent, depth, nodes.copy()), state)
    return drawn if mask is None else np.concatenate([drawn[:, :1], mask], 1)
