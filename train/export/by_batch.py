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
import torch
from torch import Tensor

from ...decode.benchmark import Ratio
from ...policies.contract import StopPolicy
from ...policies.fixed import FixedLength
from ...policies.profile import Profile
from ..evaluate.pricing import Priced, ResampleSource
from ..evaluate.statistics import Resamples, Values
from ..replay.arrivals import at_once, deal
from ..replay.batch import replay_batch
from ..replay.known_lengths import ReplayedRuns
from ..replay.log import Rounds
from ..replay.traces.arrays import TraceArrays
from .folder import Export
from .serving import batch_profile

WORTH = 0.005
"""A length changes with the batch size only where that makes it faster by more than this share: lengths that change with
every request that comes or goes cost more than they bring (vLLM, issue 49548)."""


def batch_seconds(replayed: ReplayedRuns, profile: Profile, size: int, seed: int = 0) -> Tensor:
    """Return [K + 1, S] seconds of the fixed lengths 0..K in batches of a size: each text's share of the engine's time.

    Args:
        replayed: the fixed lengths of single streams.
        profile: where it has batches these are replayed, else the rounds of single streams are priced in a batch.
        size: texts side by side.
        seed: of the order of the requests.
    """
    if profile.batch is None or size == 1:
        return replayed.seconds(batch_profile(profile, size))
    lengths = [FixedLength(length) for length in range(replayed.runs)]
    return torch.stack([text_seconds(replayed.arrays, one, profile, size, seed) for one in lengths])


def text_seconds(arrays: TraceArrays, policy: StopPolicy, profile: Profile, size: int, seed: int = 0) -> Tensor:
    """Return [S] float64 seconds: what each text takes of batches that are replayed, in the mean over its requests.

    The requests and their order are those of `specstop evaluate --batch`, with the same seed.

    Args:
        arrays: dense traces of chains.
        policy: any that can be replayed.
        profile: with batches; larger ones than those measured are extrapolated.
        size: texts side by side.
        seed: of the order of the requests.
    """
    order = deal(arrays.sequences, size, seed)
    played = replay_batch(arrays, policy, profile, size, at_once(len(order)), order, beyond=True)
    total = np.bincount(order, played.seconds, arrays.sequences)
    return torch.from_numpy(total * arrays.sequences / len(order))  # each text is requested as often


class FixedBatches:
    """All fixed lengths in batches of each size, on the prompts of the choice and on the held-out ones.

    Args:
        export: with the fixed lengths replayed.
        sizes: rising.

    Attributes:
        fit, held: by size [K + 1, S] seconds of the texts (`batch_seconds`).
        fit_boot: resamples of the prompts of the choice.
    """

    def __init__(self, export: Export, sizes: Sequence[int]) -> None:
        self.export, self.sizes = export, list(sizes)
        self.fit: dict[int, Tensor] = {}
        self.held: dict[int, Tensor] = {}
        for done, size in enumerate(self.sizes):
            export.progress("batches", done, len(self.sizes))
            for side, replayed in ((self.fit, export.fit_fixed), (self.held, export.held_fixed)):
                side[size] = batch_seconds(replayed, export.profile, size, export.seed)
        export.progress("batches", len(self.sizes), len(self.sizes))
        self.fit_boot = Resamples(export.sides.fit.clusters, export.seed)

    def fit_spent(self, size: int) -> Values:
        """Return [1 + R, K + 1] seconds of all lengths in every resample, on the side of the choice."""
        runs = self.export.fit_fixed
        return self._spent(self.fit_boot, runs.arrays, self.fit[size], [runs.rounds(k) for k in range(runs.runs)], size)

    def held_spent(self, size: int, lengths: Sequence[int]) -> Values:
        """Return [1 + R, L] seconds of some lengths in every resample, on the held-out side."""
        runs, boot = self.export.held_fixed, self.export.held_boot
        return self._spent(boot, runs.arrays, self.held[size][list(lengths)], [runs.rounds(k) for k in lengths], size)

    def policy_to(self, length: int, size: int, alone: Rounds) -> Ratio:
        """Return the speed of the policy in batches of a size over that of a length, held out.

        Args:
            length: of all requests.
            size: of the batch, which the profile has measured or extrapolates.
            alone: the policy's rounds with a single stream.
        """
        export, runs = self.export, self.export.held_fixed
        assert export.policy is not None
        mine = alone.of_texts(export.profile, runs.arrays.prompt_tokens)
        if size > 1:
            mine = text_seconds(runs.arrays, export.policy, export.profile, size, export.seed)
        seconds, rounds = torch.stack([self.held[size][length], mine]), [runs.rounds(length), alone]
        spent = self._spent(export.held_boot, runs.arrays, seconds, rounds, size)
        return export.held_boot.interval(spent[:, 0] / spent[:, 1])

    def _spent(
        self, boot: Resamples, arrays: TraceArrays, seconds: Tensor, rounds: Sequence[Rounds], size: int
    ) -> Values:
        """Return [1 + R, P] of [P, S] seconds in every resample of prompts and timings."""
        total = boot.total(seconds.T)
        if not self.export.draws.profiles:
            return total
        # What other timings would make of it is told by single streams' rounds, which can be priced again.
        priced = Priced(boot, self.export.draws, rounds, arrays.prompt_tokens)
        share = partial(batch_profile, batch=size)
        out: Values = total * priced.seconds(change=share) / priced.seconds(ResampleSource.PROMPTS, share)
        return out


def choose_lengths(batches: FixedBatches) -> dict[int, int]:
    """Return the fixed length of each batch size: together the fastest on the fit side among those that do not rise.

    Of the first size it is the fastest one. Lengths that the held-out prompts put clearly below plain decoding are left
    out, so that no table contradicts the figures on its page.
    """
    export, sizes = batches.export, batches.sizes
    # Logarithms, so that shares such as `WORTH` add up over sizes.
    loss = np.stack([np.log(batches.fit[size].sum(1).numpy()) for size in sizes])
    for at, size in enumerate(sizes):
        loss[at] -= loss[at].min()  # [K + 1], over the best length of this size
        spent = export.held_boot.total(batches.held[size].T)  # [1 + R, K + 1]
        # Plain decoding's seconds over those of length k: below 1 where drafting loses.
        slower = [export.held_boot.interval(spent[:, 0] / spent[:, k]).is_below for k in range(spent.shape[1])]
        loss[at][slower] = np.inf
    best = loss.argmin(1)
    moves = [
        _moves(batches, size if here > before else None)
        for before, here, size in zip(best, best[1:], sizes[1:], strict=False)
    ]
    return dict(zip(sizes, _path(loss, moves), strict=True))


def _moves(batches: FixedBatches, size: int | None) -> Values:
    """Return [K + 1, K + 1], what going from one length to another costs: nothing, `WORTH`, or more than anything.

    A longer one has to be clearly faster, over prompts and over the timings of the profile; where it has kept none, nothing
    is clear. It is looked into at the batch sizes where it would be longer than at the one before.
    """
    export = batches.export
    count = export.depth + 1
    # [from, to]; a length that rises is out of the question until it has proved itself.
    out = np.full((count, count), WORTH)
    np.fill_diagonal(out, 0.0)
    out[np.triu_indices(count, 1)] = np.inf
    if size is None or not export.draws.profiles:
        return out
    spent = batches.fit_spent(size)
    for shorter, longer in itertools.combinations(range(count), 2):
        if batches.fit_boot.interval(spent[:, shorter] / spent[:, longer]).is_above:
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
