"""A policy that now and then drafts all it may, so that what it would not have drafted is recorded too."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np

from ..policies.checking import check_policy
from ..policies.contract import (
    Array,
    DraftStep,
    DraftTree,
    RoundOutcome,
    State,
    StopPolicy,
    checked_keep,
    checked_observe,
    checked_select,
    checked_start,
)
from ..policies.draws import mix
from ..policies.plugin_code import own

_SALT = 0x5EED
_SHARE = 1 << 24


class Exploring(StopPolicy):
    """Wraps a policy; in a share of the rounds, chosen by stream and round number, every branch is kept to full depth.

    Use `exploring`, which adds `select` where the wrapped policy has it.

    Args:
        inner: the policy.
        share: of the rounds, 0 to 1.
        depth: K, the full depth.
    """

    def __init__(self, inner: StopPolicy, share: float, depth: int) -> None:
        self.inner, self.share = inner.limited(depth), share
        self.features, self.hidden = inner.features, inner.hidden
        self.trims, self.carries, self.reads_clock = inner.trims, inner.carries, inner.reads_clock  # type: ignore[misc]
        self.max_depth, self.first = depth, min(inner.first, self.inner.max_depth)
        self.name = inner.name

    def start(self, streams: int, keys: Array) -> State:
        """Return (inner state, keys, number of the round)."""
        return checked_start(self.inner, streams, keys.copy()), keys, np.zeros_like(keys)

    def explores(self, state: State) -> Array:
        """Return [S] bool, whether the round is one of those drafted to full depth."""
        _, keys, number = state
        drawn: Array = mix(mix(keys ^ _SALT) + number) & (_SHARE - 1)
        return drawn < round(self.share * _SHARE)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Ask the policy, and overrule it in rounds that explore."""
        inner, keys, number = state
        kept = np.zeros_like(step.alive)
        if self.inner.first <= step.depth < self.inner.max_depth:
            kept, inner = checked_keep(self.inner, self._shown(step), inner)
        return step.alive & (kept | self.explores(state)[:, None]), (inner, keys, number)

    def _shown(self, step: DraftStep) -> DraftStep:
        """Return the step; arrays of its own for a plugin, which may write into them."""
        if own(self.inner):
            return step
        return dataclasses.replace(step, alive=step.alive.copy(), parent=step.parent.copy(), batch=step.batch.copy())

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Tell the policy, and count the round."""
        inner, keys, number = state
        return checked_observe(self.inner, outcome, inner), keys, number + outcome.active


class _Selecting(Exploring):
    def select(self, tree: DraftTree, state: State) -> Array | None:
        """Let the policy select, but in rounds that explore."""
        mask = checked_select(self.inner, tree, state[0])
        return None if mask is None else mask | (self.explores(state)[:, None] & tree.drawn)


def exploring(policy: StopPolicy, share: float, depth: int) -> Exploring:
    """Return the policy, drafting to full depth in a share of its rounds."""
    check_policy(policy)
    made = Exploring(copy.copy(policy), share, depth)
    if type(policy).select is not StopPolicy.select:
        made.__class__ = _Selecting
    return made
