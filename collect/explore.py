"""A policy that now and then drafts all it may, so that what it would not have drafted is recorded too."""

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
    """Of `Exploring`.

    Attributes:
        inner: the policy's.
        keys, number: [S] int64, of the streams, and the number of the round.
        asked: [S] bool, whether the policy was asked in it; so it begins.
    """

    inner: State
    keys: Array
    number: Array
    asked: Array


class Exploring(StopPolicy):
    """Wraps a policy; in a share of the rounds, chosen by stream and round number, every branch is kept to full depth.

    Use `exploring`, which knows whether the policy selects.

    Args:
        inner: the policy.
        share: of the rounds, 0 to 1.
        depth: K, the full depth.
    """

    def __init__(self, inner: StopPolicy, share: float, depth: int) -> None:
        self.inner, self.share = inner.limited(depth), share
        self.parts = (self.inner,)
        self.features, self.hidden = inner.features, inner.hidden
        self.sizes: Mapping[str, int] = getattr(
            inner, "sizes", {}
        )  # a model with others is refused, not met in a round
        self.trims, self.carries, self.reads_clock = inner.trims, inner.carries, inner.reads_clock  # type: ignore[misc]
        self.reads_seconds = inner.reads_seconds  # type: ignore[misc]
        self.joint = inner.joint  # type: ignore[misc]
        # From its deepest depth on the inner policy is not asked, and in batches of some sizes nowhere: this one must be, to
        # end the rounds that do not explore.
        self.max_depth, self.first = depth, min(inner.first, self.inner.max_depth, *inner.unasked.values())
        self.name = inner.name

    def start(self, streams: int, keys: Array) -> State:
        """Return the state before the first round."""
        inner = self.inner.start(streams, keys)
        return ExploringState(inner, keys, np.zeros_like(keys), np.ones(streams, dtype=bool))

    def explores(self, state: State) -> Array:
        """Return [S] bool, whether the round is one of those drafted to full depth."""
        # Whole numbers, keyed by stream and round alone: a shard that is collected again explores the same rounds.
        drawn: Array = mix(mix(state.keys ^ _SALT) + state.number) & (_SHARE - 1)
        return drawn < round(self.share * _SHARE)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Ask the policy, and overrule it in rounds that explore."""
        inner, depth, length = state.inner, step.depth, self._unasked(step)
        alive = step.alive.copy()  # a plugin may write into what it is shown
        if length is None and self.inner.first <= depth < self.inner.max_depth:
            kept, inner = self.inner.keep(step, inner)
        else:
            kept = np.full_like(step.alive, depth < (self.inner.max_depth if length is None else length))
        asked = np.full(len(step.alive), length is None)
        kept = alive & (kept | self.explores(state)[:, None])
        return kept, ExploringState(inner, state.keys, state.number, asked)

    def _unasked(self, step: DraftStep) -> int | None:
        """Return what the policy drafts without being asked, by how many streams share the round; None = it is asked."""
        together = step.batch[step.batch >= 0]
        return self.inner.unasked.get(int(np.count_nonzero(together == together[0]))) if len(together) else None

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Tell the policy, and count the round."""
        inner = self.inner.observe(outcome, state.inner)
        return ExploringState(inner, state.keys, state.number + outcome.active, np.ones_like(state.asked))


class SelectingExploring(Exploring):
    """The same of a policy that selects."""

    def select(self, tree: DraftTree, state: State) -> Array | None:
        """Let the policy select, but in rounds that explore, and where it was not asked: it knows nothing of those."""
        if not state.asked.any():
            return None
        mask = self.inner.select(tree, state.inner)
        return None if mask is None else mask | (self.explores(state)[:, None] & tree.drawn)


def exploring(policy: StopPolicy, share: float, depth: int) -> Exploring:
    """Return the policy, drafting to full depth in a share of its rounds."""
    validate_policy(policy)
    selects = type(policy).select is not StopPolicy.select
    return (SelectingExploring if selects else Exploring)(copy.copy(policy), share, depth)
