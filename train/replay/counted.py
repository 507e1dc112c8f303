"""Rounds counted by what they consisted of: what they take under another profile is a sum over few kinds, not over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...policies.contract import Array
from ...policies.profile import Profile
from .log import Rounds

Values = np.ndarray[Any, np.dtype[np.float64]]

LONG = 2
"""Backlogs beyond which each token of a first draft step costs as much as the one before."""


@dataclass(frozen=True)
class Kinds:
    """What rounds consisted of; all [C].

    Attributes:
        drafted, verified, backlog: tokens.
        fed: [C, K] of trees, tokens read at each draft step; None for chains.
    """

    drafted: Array
    verified: Array
    backlog: Array
    fed: Array | None

    def seconds(self, profile: Profile, counts: Values) -> Values:
        """Return [R, C] seconds of model calls and of what is outside of them, decisions left out.

        They are those of so many rounds at the mean context of their kind. `Profile.round_seconds` is linear in it, so that
        sums are exact; but where a context is so far from those measured that costs are held at a quarter, they may be a
        little low.

        Args:
            profile: any.
            counts: [R, 2, C] rounds of each kind, and the sums of their contexts.
        """
        rounds, context = counts[:, 0], counts[:, 1]
        # Also of kinds that are counted below 0: both their rounds and their contexts are negative, the mean is not.
        mean = np.divide(context, rounds, out=np.zeros_like(context), where=rounds != 0)
        decisions = np.zeros_like(self.drafted)
        seconds: Values = profile.round_seconds(
            mean, self.drafted, self.verified, self.backlog, decisions, 0.0, self.fed
        )
        return rounds * seconds


@dataclass(frozen=True)
class Counted:
    """Rounds of S sequences.

    Attributes:
        kinds: C of them.
        counts: [S, 2, C], see `Kinds.seconds`.
        decisions: [S], calls of the policy.
    """

    kinds: Kinds
    counts: Values
    decisions: Values


def count_rounds(rounds: Rounds, sequences: int) -> Counted:
    """Count rounds of S sequences by kind.

    A backlog of more than `LONG` tokens is counted as one of `LONG`, and each token beyond as the difference between a round
    with one token more and one without: a kind of its own, and another one counted less than not at all.
    """
    columns = (rounds.sequence, rounds.context, rounds.drafted, rounds.verified, rounds.backlog, rounds.decisions)
    sequence, context, drafted, verified, backlog, decisions = (column.numpy() for column in columns)
    fed = None if rounds.fed is None else rounds.fed.numpy()
    beyond = np.maximum(backlog - LONG, 0) * (drafted > 0)  # nothing is read where nothing is drafted
    short = np.where(drafted > 0, np.minimum(backlog, LONG), 1)
    rows = np.column_stack([drafted, verified, short, *([] if fed is None else [fed])])
    # Where nothing is drafted no backlog is read: `short` makes one kind of them.
    found, kind = np.unique(rows, axis=0, return_inverse=True)
    # With backlog b > 2: cost(b) = cost(2) + (b - 2) (cost(3) - cost(2)). What the two kinds draft and send cancels; they
    # feed a token, or no first step would be priced.
    one_more = np.zeros((2, found.shape[1]), dtype=np.int64)
    one_more[:, 0], one_more[:, 2], one_more[:, 3:4] = 1, [LONG + 1, LONG], 1
    found = np.concatenate([found, one_more])
    sums = np.zeros((2, sequences, len(found)))
    for at, value in enumerate((np.ones_like(context), context)):
        np.add.at(sums[at], (sequence, kind.ravel()), value)  # numpy 2.0 keeps the axis in `kind`
        extra = np.bincount(sequence, value * beyond, sequences)
        sums[at, :, -2], sums[at, :, -1] = extra, -extra  # in the order of `one_more`
    kinds = Kinds(found[:, 0], found[:, 1], found[:, 2], None if fed is None else found[:, 3:])
    return Counted(kinds, sums.transpose(1, 0, 2), np.bincount(sequence, decisions, sequences).astype(np.float64))


def joined(kinds: Sequence[Kinds]) -> tuple[Kinds, list[int]]:
    """Return the kinds of several replays, all of chains or all of trees, after each other, and where those of each begin."""
    feeds = [one.fed for one in kinds if one.fed is not None]
    deepest = max((fed.shape[1] for fed in feeds), default=0)
    wide = [np.pad(fed, ((0, 0), (0, deepest - fed.shape[1]))) for fed in feeds]
    begins = np.cumsum([0, *(len(one.drafted) for one in kinds[:-1])]).tolist()
    columns = ([one.drafted, one.verified, one.backlog] for one in kinds)
    drafted, verified, backlog = map(np.concatenate, zip(*columns, strict=True))
    return Kinds(drafted, verified, backlog, np.concatenate(wide) if wide else None), begins
