"""Policies of each kind under which the rejection family must be lossless; several try to bias it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from contract_policies import Adaptive, FromAnchor, Randomised, Selecting
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.fixed import Confidence, FixedLength
from trees import FREE, make_tree_policy

MOST = 3


class TrimsUnsure(StopPolicy):
    """Drops tokens drawn from a flat distribution, a PRE feature."""

    name, features, trims, max_depth = "trims-unsure", ("top1",), True, MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[..., 0] > 0.75), state


class TrimsByPlace(StopPolicy):
    """Drops every sibling except the second, by rank."""

    name, features, trims, max_depth = "trims-by-place", ("branch_rank", "depth", "entropy"), True, MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        rank, depth, entropy = np.moveaxis(step.features, -1, 0)
        return step.alive & ((rank == 1) | (depth > 1) | (entropy < 0.4)), state


class TrimsAsRoundsWent(StopPolicy):
    """Trims by HISTORY and PRE features."""

    name, trims, max_depth = "trims-as-rounds-went", True, MOST
    features = ("top1", "mean_accepted", "mean_full", "last_accepted", "last_verified")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        top1, mean, full, accepted, verified = np.moveaxis(step.features, -1, 0)
        return step.alive & (top1 + mean + full - 0.5 * (verified - accepted) > 0.7 * step.depth), state


class TrimsByAlive(StopPolicy):
    """Tries to infer the drawn token from the mask and drops all others."""

    name, features, trims, first, max_depth = "trims-by-alive", ("top1",), True, 0, MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.alive.all(1, keepdims=True) | (step.depth == 0)), state


class SelectsByRound(Selecting):
    """Verifies fewer levels from round to round."""

    name, max_depth = "selects-by-round", MOST

    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.depth <= ((1 + state) % 3)[:, None]


class SelectsUnsure(StopPolicy):
    """Keeps the confidence of the draft in its state and excludes levels by it."""

    name, features, max_depth = "selects-unsure", ("top1",), MOST

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, step.features[..., 0].astype(np.float64).max(1)

    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.drawn & ((tree.depth <= 1) | (state < 0.7)[:, None])


class SelectsByToken(StopPolicy):
    """Tries to exclude tokens by their ids and by whether they have children."""

    name, max_depth = "selects-by-token", MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        bare = np.ones_like(tree.drawn)
        for node, parent in enumerate(tree.parent[0].tolist()):
            if parent >= 0 and bool(tree.drawn[0, node]):
                bare[0, parent] = False
        deepest = int((tree.depth * tree.drawn).max())
        leaves_out = bare & (tree.depth < deepest) if deepest > 1 else np.zeros_like(bare)
        return tree.drawn & (tree.tokens != 0) & ~leaves_out


class RaisingInSelect(SelectsUnsure):
    """Raises in `select` in the second round."""

    name = "raising-in-select"

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + 10.0

    def select(self, tree: DraftTree, state: State) -> Array:
        if float(state[0]) >= 10.0:
            raise RuntimeError("second round")
        return super().select(tree, state)


def limited(kind: type[StopPolicy]) -> StopPolicy:
    return kind().limited(MOST)


DECIDERS: dict[str, Callable[[], StopPolicy]] = {
    "fixed": partial(FixedLength, MOST), "confidence": partial(Confidence, 0.45, MOST),
    "from-anchor": partial(limited, FromAnchor), "trims-unsure": TrimsUnsure, "trims-by-place": TrimsByPlace,
    "trims-as-rounds-went": TrimsAsRoundsWent, "trims-by-alive": TrimsByAlive, "selects-by-round": SelectsByRound,
    "selects-unsure": SelectsUnsure, "selects-by-token": SelectsByToken, "randomised": partial(limited, Randomised),
    "adaptive": partial(limited, Adaptive), "tree-gain": partial(make_tree_policy, FREE, MOST, verify_s=2e-3),
    "raising-in-select": RaisingInSelect,
}  # fmt: skip
"""Policies by name. None declares that it excludes tokens by what was drawn; several try to."""
