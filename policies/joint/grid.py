"""What a policy of batches asks of costs: seconds by streams and tokens in all, as tables that compiled code looks up."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..baselines.scores import check_number
from ..contract import StopPolicy
from ..errors import InputError, PolicyError
from ..profile import Profile

Array = np.ndarray[Any, Any]

LEAST_STREAMS = 16
"""Tables are made for so many streams at once, and for twice as many whenever they are too few."""


class Costs(Protocol):
    """Seconds of the steps of a batch, by arrays of counts at a context length."""

    def first_draft_s(self, streams: ArrayLike, context: float) -> Array:
        """Return the seconds of the first draft step of a round, by the streams that draft."""

    def draft_s(self, streams: ArrayLike, context: float) -> Array:
        """Return the seconds of each draft step after it."""

    def verify_s(self, streams: ArrayLike, tokens: ArrayLike, context: float) -> Array:
        """Return the seconds of a verification of so many tokens in all, the anchors of the streams included."""


@dataclass(frozen=True)
class LinearCosts:
    """Costs in the place of measured ones, in units of a target call of one token.

    Attributes:
        draft: of a draft step.
        token: of each token beyond the first, in a draft step as share of it, in a verification as it is.
    """

    draft: float = 0.1
    token: float = 0.01

    def first_draft_s(self, streams: ArrayLike, context: float) -> Array:
        """See `Costs`."""
        return self.draft_s(streams, context)

    def draft_s(self, streams: ArrayLike, context: float) -> Array:
        """See `Costs`."""
        count = np.asarray(streams, dtype=np.float64)
        return np.where(count > 0, self.draft * (1.0 + self.token * (count - 1.0)), 0.0)

    def verify_s(self, streams: ArrayLike, tokens: ArrayLike, context: float) -> Array:
        """See `Costs`."""
        return 1.0 + self.token * (np.asarray(tokens, dtype=np.float64) - 1.0)


def priced(who: str, profile: str | Path | Profile, draft: float, token: float) -> Grids:
    """Return the tables that a policy of these options decides by.

    Args:
        who: the policy, for messages.
        profile: a latency profile or its path; empty = linear costs.
        draft, token: see `LinearCosts`.

    Raises:
        PolicyError: there is no such profile.
    """
    if not profile:
        return Grids(LinearCosts(check_number(who, "draft", draft, 0.0), check_number(who, "token", token, 0.0)), 0.0)
    try:
        return grids_of(profile if isinstance(profile, Profile) else Profile.load(str(profile)))
    except InputError as error:
        raise PolicyError(f"{who}: {error.command_line.removeprefix('--profile: ')}") from None


def grids_of(profile: Profile, decision: float = 0.0) -> Grids:
    """Return the tables of a profile, at the context length between the two that were measured; see `Grids`."""
    return Grids(profile, 0.5 * (profile.low.context + profile.high.context), decision)


class ByCosts(StopPolicy):
    """A policy that decides by the costs of a profile, or by `LinearCosts` where it was given none."""

    _grids: Grids

    def with_costs(self, profile: Profile) -> StopPolicy:
        """Return this policy, deciding by the costs of a profile unless it was given others than the usual ones."""
        if self._grids.costs != LinearCosts():
            return self
        other = copy.copy(self)
        other._grids = grids_of(profile)
        return other


@dataclass(frozen=True)
class Grid:
    """Costs as tables; all float64, row n of n streams.

    Attributes:
        drafts: [2, R] seconds of a draft step: the first of a round, each later one.
        verify: [R, T] seconds of a verification by tokens in all; as of n tokens where they are fewer.
    """

    drafts: Array
    verify: Array

    def drafting_s(self, streams: Array, steps: Array) -> Array:
        """Return the seconds of so many draft steps of so many streams, broadcast."""
        return drafting_s(steps, self.drafts[:, streams])


@dataclass
class Grids:
    """The tables of some costs, made when they are first wanted.

    Attributes:
        costs: what they are made of.
        context: length that they are of.
        decision: seconds of a decision, one for each draft step.
    """

    costs: Costs
    context: float
    decision: float = 0.0
    _made: dict[int, Grid] = field(default_factory=dict)

    def of(self, streams: int, nodes: int) -> Grid:
        """Return tables for up to so many streams, each with up to so many drafted tokens."""
        # By powers of two: a batch that grows by a stream mostly finds its table made.
        most = LEAST_STREAMS
        while most < streams:
            most *= 2
        known = self._made.get(most)
        if known is None or known.verify.shape[1] < most * (nodes + 1) + 1:
            known = self._made[most] = self._make(most, nodes)
        return known

    def _make(self, most: int, nodes: int) -> Grid:
        count, tokens = np.arange(most + 1), np.arange(most * (nodes + 1) + 1)
        # No streams cost as one does, fewer tokens than anchors as the anchors: only calls that can be made have a price.
        rows, sent = np.broadcast_arrays(np.maximum(count, 1)[:, None], tokens)
        verify = self.costs.verify_s(rows, np.maximum(sent, rows), self.context)
        drafts = draft_steps_s(self.costs, count, self.context) + self.decision * (count > 0)
        return Grid(*(np.ascontiguousarray(table, dtype=np.float64) for table in (drafts, verify)))


def draft_steps_s(costs: Costs, streams: Array, context: float) -> Array:
    """Return [2, n] the seconds of the first draft step of a round and of each later one."""
    return np.stack([costs.first_draft_s(streams, context), costs.draft_s(streams, context)])


def length_rates(costs: Costs, context: float, streams: Array, tokens: Array) -> Array:
    """Return [n, K + 1] tokens a second of every fixed length in batches of so many streams.

    Args:
        costs, context: of the rounds.
        streams: [n]; of none the rate is 0.
        tokens: [K + 1] that a stream is expected to commit in a round of each length.
    """
    rows, lengths = streams[:, None], np.arange(len(tokens))
    drafting = drafting_s(lengths, draft_steps_s(costs, streams, context)[..., None])
    # No streams have the seconds of one, as in `Grid`.
    sharing, sent = np.broadcast_arrays(np.maximum(rows, 1), np.maximum(rows, 1) * (lengths + 1))
    out: Array = rows * tokens / (drafting + costs.verify_s(sharing, sent, context))
    return out


def drafting_s(steps: Array, drafts: Array) -> Array:
    """Return the seconds of numbers of draft steps that cost `drafts` [2, ...]: the first and each later one."""
    first, later = drafts
    out: Array = (steps > 0) * first + np.maximum(steps - 1, 0) * later
    return out
