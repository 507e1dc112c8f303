"""A policy that drafts to full depth in a share of its rounds, so that a live trace shows what it would not have drafted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..policies.counter_rng import mix
from ..policies.host import validate_policy

_SALT = 0x5EED
_SHARE = 1 << 24


@dataclass(frozen=True, slots=True)
class ExploringState:
    """State of `Exploring`.

    Attributes:
        inner: state of the inner policy.
        keys, number: [S] int64, keys of the streams and number of the round.
        called: [S] bool, whether the inner policy was called in this round; initially True.
    """

    inner: State
    keys: Array
    number: Array
    called: Array


class Exploring(StopPolicy):
    """Wraps a policy and keeps every branch to full depth in a share of the rounds, chosen by stream and round number.

    Created by `exploring`.

    Args:
        inner: the policy.
        share: of the rounds, 0 to 1.
        depth: K, the full depth.
    """

    def __init__(self, inner: StopPolicy, share: float, depth: int) -> None:
        self.inner, self.share, self.name = inner.limited(depth), share, inner.name
        self.parts = (self.inner,)
        self.features, self.hidden = inner.features, inner.hidden
        self.sizes: Mapping[str, int] = getattr(inner, "sizes", {})  # checked before a run
        self.trims, self.carries, self.joint = inner.trims, inner.carries, inner.joint  # type: ignore[misc]
        self.reads_clock, self.reads_seconds = inner.reads_clock, inner.reads_seconds  # type: ignore[misc]
        self.routes, self.drafter, self.joins = inner.routes, inner.drafter, inner.routes  # type: ignore[misc]
        # The inner policy is not called from its deepest depth on, nor in batches of some sizes. This one must be, to end the
        # rounds that do not explore.
        self.max_depth, self.first = depth, min(inner.first, self.inner.max_depth, *inner.unasked.values())

    def start(self, streams: int, keys: Array) -> State:
        """Return the state before the first round."""
        return ExploringState(self.inner.start(streams, keys), keys, np.zeros_like(keys), np.ones(streams, dtype=bool))

    def explores(self, state: State) -> Array:
        """Return [S] bool, whether the round is drafted to full depth."""
        # Keyed by stream and round alone: a shard that is collected again explores the same rounds.
        drawn: Array = mix(mix(state.keys ^ _SALT) + state.number) & (_SHARE - 1)
        return drawn < round(self.share * _SHARE)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Return the decisions of the policy, and all branches in rounds that explore."""
        inner, depth, streams = state.inner, step.depth, step.batch[step.batch >= 0]
        # In batches of some sizes the policy drafts a fixed length without being called.
        length = self.inner.unasked.get(int(np.count_nonzero(streams == streams[0]))) if len(streams) else None
        alive = step.alive.copy()  # a plugin may write to its arguments
        if length is None and self.inner.first <= depth < self.inner.max_depth:
            kept, inner = self.inner.keep(step, inner)
        else:
            kept = np.full_like(alive, depth < (self.inner.max_depth if length is None else length))
        kept = alive & (kept | self.explores(state)[:, None])
        return kept, ExploringState(inner, state.keys, state.number, np.full(len(alive), length is None))

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Pass the outcome to the policy, and count the round."""
        inner = self.inner.observe(outcome, state.inner)
        return ExploringState(inner, state.keys, state.number + outcome.active, np.ones_like(state.called))


class SelectingExploring(Exploring):
    """`Exploring` for a policy that selects."""

    def select(self, tree: DraftTree, state: State) -> Array | None:
        """Return the selection of the policy, and everything drawn in rounds that explore or in which it was not called."""
        mask = self.inner.select(tree, state.inner) if state.called.any() else None
        return None if mask is None else mask | (self.explores(state)[:, None] & tree.drawn)


def exploring(policy: StopPolicy, share: float, depth: int) -> Exploring:
    """Return the policy, drafting to full depth in a share of its rounds."""
    validate_policy(policy)
    selects = type(policy).select is not StopPolicy.select
    return (SelectingExploring if selects else Exploring)(copy.copy(policy), share, depth)
