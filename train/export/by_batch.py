"""Lengths by batch size, chosen together: a larger batch drafts no longer than a smaller one unless that is clearly faster.

What a length costs in a batch is read off few timings, each a little off, so that the best length of each batch size on its
own goes up and down with them. More requests leave less room for drafting, never more, as long as rows cost alike: where
timings say otherwise, they have to say so beyond their interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from ..report.intervals import Resamples, Values
from ..report.pricing import Priced
from .folder import Export
from .serving import batch_profile, batch_seconds

WORTH = 0.005
"""A length changes with the batch size only where that makes it faster by more than this share: lengths that change with
every request that comes or goes cost more than they bring (vLLM, issue 49548)."""


def choose_lengths(export: Export, sizes: Sequence[int]) -> dict[int, int]:
    """Return the fixed length of each batch size: together the fastest on the fit side among those that do not rise.

    Of the first size it is the fastest one. Lengths that the held-out prompts put clearly below plain decoding are left
    out, so that no table contradicts the figures on its page.

    Args:
        export: with the fixed lengths replayed.
        sizes: rising.
    """
    fit, held = (batch_seconds(side, export.profile, sizes) for side in (export.fit_fixed, export.held_fixed))
    # Logarithms, so that shares such as `WORTH` add up over sizes.
    loss = np.stack([np.log(fit[size].sum(1).numpy()) for size in sizes])
    for at, size in enumerate(sizes):
        loss[at] -= loss[at].min()  # [K + 1], over the best length of this size
        spent = export.held_boot.total(held[size].T)  # [1 + R, K + 1]
        # Plain decoding's seconds over those of length k: below 1 where drafting loses.
        slower = [export.held_boot.interval(spent[:, 0] / spent[:, k]).is_below for k in range(spent.shape[1])]
        loss[at][slower] = np.inf
    best = loss.argmin(1)
    moves = [
        _moves(export, size if here > before else None)
        for before, here, size in zip(best, best[1:], sizes[1:], strict=False)
    ]
    return dict(zip(sizes, _path(loss, moves), strict=True))


def _moves(export: Export, size: int | None) -> Values:
    """Return [K + 1, K + 1], what going from one length to another costs: nothing, `WORTH`, or more than anything.

    A longer one has to be clearly faster, over prompts and over the timings of the profile; where it has kept none, nothing
    is clear. It is looked into at the batch sizes where it would be longer than at the one before.
    """
    count = export.depth + 1
    # [from, to]; a length that rises is out of the question until it has proved itself.
    out = np.full((count, count), WORTH)
    np.fill_diagonal(out, 0.0)
    out[np.triu_indices(count, 1)] = np.inf
    if size is None or not export.draws.drawn:
        return out
    boot = Resamples(export.sides.fit.prompt_ids, export.seed)
    rounds = [export.fit_fixed.rounds(length) for length in range(count)]
    priced = Priced(boot, export.draws, rounds, export.sides.fit.prompt_tokens)
    spent = priced.seconds(change=partial(batch_profile, batch=size))  # [1 + R, K + 1]
    for shorter, longer in itertools.combinations(range(count), 2):
        if boot.interval(spent[:, shorter] / spent[:, longer]).is_above:
            out[shorter, longer] = WORTH
    return out


def _path(loss: Values, moves: Sequence[Values]) -> list[int]:
    """Return the length at each size, from the best one of the first on, that loses least in all."""
    # Dynamic programming (Viterbi): by length the least loss so far, and the length before on that path.
    total = np.full(loss.shape[1], np.inf)
    total[loss[0].argmin()] = 0.0
    came_from = []
    for here, move in zip(loss[1:], moves, strict=True):
        reached = total[:, None] + move
        came_from.append(reached.argmin(0))
        total = reached.min(0) + here
    lengths = [int(total.argmin())]
    for before in reversed(came_from):
        lengths.append(int(before[lengths[-1]]))
    return lengths[::-1]
