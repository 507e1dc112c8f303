"""A policy that now and then drafts all it may, so that what it would not have drafted is recorded too."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..decode.decide import up_to_date
from ..decode.noise import mix
from ..policies.checking import check_policy
from ..policies.contract import (
    DraftStep,
    DraftTree,
    RoundOutcome,
    State,
    StopPolicy,
    checked_keep,
    checked_observe,
    checked_select,
    checked_short,
    checked_start,
)

_SALT = 0x5EED
_SHARE = 1 << 24


class Exploring(StopPolicy):
    """Wraps a policy; in a share of the rounds, chosen by stream and round number, every branch is kept to full depth.

    Use `exploring`, which adds what the wrapped policy has: `select`, `keep_one`.

    Args:
        inner: the policy.
        share: of the rounds, 0 to 1.
        depth: K, the full depth.
    """

    def __init__(self, inner: StopPolicy, share: float, depth: int) -> None:
        self.inner, self.share = inner.limited(depth), share
        self.features, self.vectors = inner.features, inner.vectors
        self.trims, self.carries, self.reads_clock = inner.trims, inner.carries, inner.reads_clock  # type: ignore[misc]
        self.max_depth, self.first = depth, min(inner.first, self.inner.max_depth)
        self.name = inner.name

    def start(self, streams: int, key: Tensor) -> State:
        """Return (inner state, key, number of the round)."""
        return checked_start(self.inner, streams, key), key, torch.zeros_like(key)

    def explores(self, state: State) -> Tensor:
        """Return [S] bool, whether the round is one of those drafted to full depth."""
        _, key, number = state
        drawn: Tensor = mix(mix(key ^ _SALT) + number) & (_SHARE - 1)
        return drawn < round(self.share * _SHARE)

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Ask the policy, and overrule it in rounds that explore."""
        inner, key, number = state
        kept = torch.zeros_like(step.alive)
        if self.inner.first <= step.depth < self.inner.max_depth:
            kept, inner = checked_keep(self.inner, step, inner)
        return step.alive & (kept | self.explores(state)[:, None]), (inner, key, number)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Tell the policy, and count the round."""
        inner, key, number = state
        return checked_observe(self.inner, outcome, inner), key, number + outcome.active


class _Selects:
    inner: Any
    explores: Any

    def select(self, tree: DraftTree, state: State) -> Tensor | None:
        """Let the policy select, but in rounds that explore."""
        mask = checked_select(self.inner, tree, state[0])
        return None if mask is None else mask | (self.explores(state)[:, None] & tree.drawn)


class _KeepsOne:
    inner: Any
    explores: Any

    def keep_one(self, depth: int, features: Any, state: State, *vectors: Any) -> tuple[bool, State]:
        """Ask the policy's `keep_one`; see `StopPolicy.keep_one`."""
        inner, key, number = state
        kept = False
        if self.inner.first <= depth < self.inner.max_depth:
            kept, inner = checked_short(self.inner, "keep_one")(depth, features, inner, *vectors)
        return kept or bool(self.explores(state)), (inner, key, number)


def exploring(policy: StopPolicy, share: float, depth: int) -> Exploring:
    """Return the policy, drafting to full depth in a share of its rounds."""
    parts: list[type] = []
    check_policy(policy)
    if type(policy).select is not StopPolicy.select:
        parts.append(_Selects)
    if policy.keep_one is not None and up_to_date(type(policy)):
        parts.append(_KeepsOne)
    made = Exploring(copy.copy(policy), share, depth)
    made.__class__ = type("Exploring", (*parts, Exploring), {})
    return made
