"""Rounds counted by what they consisted of: what they take under another profile is a sum over few kinds, not over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.costs import Profile

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

    drafted: Tensor
    verified: Tensor
    backlog: Tensor
    fed: Tensor | None

    def seconds(self, profile: Profile, counts: Values) -> Values:
        """Return [R, C] seconds of model calls and of what is outside of them, decisions left out.

        They are those of so many rounds at the mean context of their kind. `Profile.round_seconds` is linear in it, so that
        sums are exact; but where a context is so far from those measured that costs are held at a quarter, they may be a
        little low.

        Args:
            profile: any.
            counts: [R, 2, C] rounds of each kind, and the sums of their contexts.
        """
        rows, kinds = len(counts), len(self.drafted)
        rounds, context = (torch.from_numpy(counts[:, at].copy()) for at in range(2))
        each = profile.round_seconds(
            torch.where(rounds == 0, 0.0, context / rounds).flatten(),
            self.drafted.repeat(rows),
            self.verified.repeat(rows),
            self.backlog.repeat(rows),
            torch.zeros(rows * kinds, dtype=torch.int64),
            0.0,
            None if self.fed is None else self.fed.repeat(rows, 1),
        )
        spent: Values = (each.view(rows, kinds) * rounds).numpy()
        return spent


@dataclass(frozen=True)
class Counted:
    """Rounds of S sequences.

    Attributes:
        kinds: C of them.
        counts: [S, 2, C], see `Kinds.seconds`.
        decisions: [S, 2], times the policy was asked, and rounds in which it was.
    """

    kinds: Kinds
    counts: Values
    decisions: Values


def count_rounds(
    sequences: int,
    sequence: Tensor,
    context: Tensor,
    drafted: Tensor,
    verified: Tensor,
    backlog: Tensor,
    decisions: Tensor,
    fed: Tensor | None = None,
) -> Counted:
    """Count rounds by kind.

    A backlog of more than `LONG` tokens is counted as one of `LONG`, and each token beyond as the difference between a round
    with one token more and one without: a kind of its own, and another one counted less than not at all.

    Args:
        sequences: S.
        sequence: [R] whose round it was.
        context, drafted, verified, backlog, decisions, fed: [R], as of `Profile.round_seconds`.
    """
    beyond = (backlog - LONG).clamp_min(0) * (drafted > 0)  # nothing is read where nothing is drafted
    short = torch.where(drafted > 0, backlog.clamp_max(LONG), 1)
    columns = [drafted[:, None], verified[:, None], short[:, None], *([] if fed is None else [fed])]
    found, kind = torch.unique(torch.cat(columns, 1), dim=0, return_inverse=True)
    one_more = torch.zeros(2, found.shape[1], dtype=torch.int64)
    one_more[:, 0], one_more[:, 2], one_more[:, 3:4] = 1, torch.tensor([LONG + 1, LONG]), 1
    found = torch.cat([found, one_more])
    sums = torch.zeros(2, sequences, len(found), dtype=torch.float64)
    for at, value in enumerate((torch.ones_like(context), context)):
        sums[at].index_put_((sequence, kind), value.double(), accumulate=True)
        extra = torch.zeros(sequences, dtype=torch.float64).index_add_(0, sequence, (value * beyond).double())
        sums[at, :, -2], sums[at, :, -1] = extra, -extra
    asked = torch.zeros(2, sequences, dtype=torch.float64)
    asked.index_add_(1, sequence, torch.stack([decisions, (decisions > 0).long()]).double())
    kinds = Kinds(found[:, 0], found[:, 1], found[:, 2], None if fed is None else found[:, 3:])
    return Counted(kinds, sums.transpose(0, 1).numpy(), asked.T.numpy())


def joined(kinds: Sequence[Kinds]) -> tuple[Kinds, list[int]]:
    """Return the kinds of several replays, all of chains or all of trees, after each other, and where those of each begin."""
    feeds = [one.fed for one in kinds if one.fed is not None]
    deepest = max((fed.shape[1] for fed in feeds), default=0)
    wide = [torch.nn.functional.pad(fed, (0, deepest - fed.shape[1])) for fed in feeds]
    begins = np.cumsum([0, *(len(one.drafted) for one in kinds[:-1])]).tolist()
    drafted, verified, backlog = (
        torch.cat([getattr(one, name) for one in kinds]) for name in ("drafted", "verified", "backlog")
    )
    return Kinds(drafted, verified, backlog, torch.cat(wide) if wide else None), begins
