"""Policies of each kind that must not bias the rejection family; a few try to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from contract_policies import Adaptive, FromAnchor, Randomised, Selecting
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.fixed import Confidence, FixedLength
from trees import FREE, make_tree_policy

MOST = 3


class BestBranch(StopPolicy):
    """Extends only the branch whose path the draft likes best, and none below a threshold."""

    name, features, max_depth = "best-branch", ("path_logprob",), MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        score = np.where(step.alive, step.features[..., 0], -np.inf)
        return step.alive & (score == score.max(1, keepdims=True)) & (score > -3.0), state


class UnlikelyBranches(StopPolicy):
    """Extends what the draft found unlikely, and all siblings of it or none."""

    name, features, first, max_depth = "unlikely-branches", ("drawn_prob", "branch_rank"), 0, MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        low = step.alive & (step.features[..., 0] < 0.45)
        return step.alive & low.any(1, keepdims=True) if step.depth % 2 else low, state


class TrimsUnsure(StopPolicy):
    """Drops what was drawn from a flat distribution: known before drawing."""

    name, features, trims, max_depth = "trims-unsure", ("top1",), True, MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[..., 0] > 0.75), state


class TrimsByPlace(StopPolicy):
    """Drops every sibling but the second, as their places say."""

    name, features, trims, max_depth = "trims-by-place", ("branch_rank", "depth", "entropy"), True, MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        rank, depth, entropy = np.moveaxis(step.features, -1, 0)
        return step.alive & ((rank == 1) | (depth > 1) | (entropy < 0.4)), state


class AsRoundsWent(StopPolicy):
    """Drafts on by HISTORY and PRE features."""

    name, max_depth = "as-rounds-went", MOST
    features = ("top1", "mean_accepted", "mean_full", "last_accepted", "last_verified")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        top1, mean, full, accepted, verified = np.moveaxis(step.features, -1, 0)
        return step.alive & (top1 + mean + full - 0.5 * (verified - accepted) > 0.7 * step.depth), state


class TrimsAsRoundsWent(AsRoundsWent):
    """Trims by HISTORY and PRE features."""

    name, trims = "trims-as-rounds-went", True


class TrimsByAlive(StopPolicy):
    """Tries to tell from the mask which token was drawn, and drops all others."""

    name, features, trims, first, max_depth = "trims-by-alive", ("top1",), True, 0, MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.alive.all(1, keepdims=True) | (step.depth == 0)), state


class SelectsByRound(Selecting):
    """Verifies fewer levels from round to round."""

    name, max_depth = "selects-by-round", MOST

    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.depth <= ((1 + state) % 3)[:, None]


class SelectsUnsure(StopPolicy):
    """Remembers how sure the draft was at each depth, and leaves levels out by that."""

    name, features, max_depth = "selects-unsure", ("top1",), MOST

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, step.features[..., 0].astype(np.float64).max(1)

    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.drawn & ((tree.depth <= 1) | (state < 0.7)[:, None])


class SelectsByToken(StopPolicy):
    """Tries to leave tokens out by what they are, and by whether anything could be drafted below them."""

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


class Raising(StopPolicy):
    """Breaks at certain tokens."""

    name, features, max_depth = "raising", ("drawn_prob",), MOST

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        if float(step.features[step.alive].min()) < 0.4:
            raise RuntimeError("unlikely")
        return step.alive, state


class RaisingInSelect(SelectsUnsure):
    """Breaks while it selects in the second round."""

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
    "fixed": partial(FixedLength, MOST),
    "one": partial(FixedLength, 1),
    "confidence": partial(Confidence, 0.45, MOST),
    "best-branch": BestBranch,
    "unlikely-branches": UnlikelyBranches,
    "from-anchor": partial(limited, FromAnchor),
    "trims-unsure": TrimsUnsure,
    "trims-by-place": TrimsByPlace,
    "trims-as-rounds-went": TrimsAsRoundsWent,
    "trims-by-alive": TrimsByAlive,
    "selects-by-round": SelectsByRound,
    "selects-unsure": SelectsUnsure,
    "selects-by-token": SelectsByToken,
    "randomised": partial(limited, Randomised),
    "as-rounds-went": AsRoundsWent,
    "adaptive": partial(limited, Adaptive),
    "tree-gain": partial(make_tree_policy, FREE, MOST, verify_s=2e-3),
    "raising": Raising,
    "raising-in-select": RaisingInSelect,
}
"""One of each kind by name. None declares that it excludes tokens by what was drawn; a few try to."""
