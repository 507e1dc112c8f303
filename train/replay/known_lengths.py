"""Replay of rules whose draft length is known without asking a policy: thousands of settings at once, priced by any profile.

That is so of fixed lengths, of one threshold on recorded probabilities, and of an engine's rule that gives a whole batch one
length. What is accepted and committed is the trace's say as in any replay. The rounds do not depend on what they cost, so
that playing them once serves every profile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...decode.round_state import RoundState
from ...policies.contract import Array
from ...policies.fixed import FixedLength
from ...policies.profile import Profile
from .log import Rounds
from .seconds import prompt_seconds
from .source import TraceSource
from .traces.arrays import TraceArrays


@dataclass(frozen=True)
class ReplayedRuns:
    """Rounds of C runs over the same S texts.

    Attributes:
        arrays: the trace.
        runs: C.
        run: [R] whose round it was.
        every: the R rounds; their decisions are nobody's. `accepted` is less than what the target accepts where the end of
            the text cut the round.
    """

    arrays: TraceArrays
    runs: int
    run: Tensor
    every: Rounds

    def seconds(self, profile: Profile) -> Tensor:
        """Return [C, S] float64 seconds, reading each text's prompt included, decisions left out."""
        return self.of_rounds(profile)[1] + prompt_seconds(profile, self.arrays.prompt_tokens)

    def rounds(self, run: int) -> Rounds:
        """Return the rounds of a run."""
        return self.every.part(self.run == run)

    def of_rounds(self, profile: Profile) -> tuple[Tensor, Tensor]:
        """Return [C, S] committed tokens and [C, S] float64 seconds of the rounds alone."""
        bins = self.run * self.arrays.sequences + self.every.sequence  # [R] below C * S
        sums = torch.zeros(2, self.runs * self.arrays.sequences, dtype=torch.float64)
        sums.index_add_(1, bins, torch.stack([(self.every.accepted + 1).double(), self.every.seconds(profile)]))
        committed, seconds = sums.view(2, self.runs, -1).unbind(0)
        return committed, seconds


def draft_bound(arrays: TraceArrays) -> Tensor:
    """Return [N], the most tokens that can be drafted at each anchor of a dense trace: up to EOS, or the length limit."""
    # One place of the text is the target's own.
    allowed = (arrays.header.max_new_tokens - arrays.every_anchor - 1).clamp(0, arrays.depth)
    if not arrays.header.eos or not arrays.ends.shape[1]:
        return allowed
    # The end of text itself is drafted; nothing is drafted after it.
    ends = torch.where(arrays.ends.any(1), arrays.ends.int().argmax(1) + 1, arrays.depth)
    return torch.minimum(allowed, ends)


class KnownLengths(TraceSource):
    """A trace as the source of rounds that draft as many tokens as they are told, the streams of C runs side by side.

    Args:
        arrays: a dense trace of chains.
        run, sequence: [R] int64, whose stream each is, and its first text.
    """

    def __init__(self, arrays: TraceArrays, run: Array, sequence: Array) -> None:
        # No policy is asked: one of length 0 reads no feature, so that none is looked up.
        super().__init__(arrays, FixedLength(0), sequence[:, None])
        self.run, self._bound = run, draft_bound(arrays).numpy()
        self._log: list[Array] = []

    def play(self, round: RoundState, drafted: Array, verified: Array) -> Array:
        """Play a round that has begun and return [R] accepted tokens; what EOS and the limit forbid is cut."""
        round.drafted = np.minimum(drafted, self._bound[self.row])
        round.verified = np.minimum(verified, round.drafted)
        # Read before `commit`, which moves the anchor on.
        before = self.run, self.sequence, self.anchor, round.context, round.drafted, round.verified
        self.verify(round)
        self.commit(round)
        self._log.append(np.stack([*before, round.backlog, round.committed])[:, round.active])
        return round.accepted

    def take(self, streams: Array) -> None:
        """See `TraceSource.take`."""
        super().take(streams)
        self.run = self.run[streams]

    def replayed(self, runs: int) -> ReplayedRuns:
        """Return all rounds so far, of so many runs."""
        columns = torch.from_numpy(np.concatenate([np.zeros((8, 0), dtype=np.int64), *self._log], 1))
        run, sequence, anchor, context, drafted, verified, backlog, committed = columns
        none, accepted = torch.zeros_like(drafted), committed - 1
        every = Rounds(
            sequence, anchor, context, drafted, verified, accepted, backlog, none, drafted, None, cost_name=""
        )
        return ReplayedRuns(self.arrays, runs, run, every)


def replay_lengths(arrays: TraceArrays, drafted: Tensor, verified: Tensor) -> ReplayedRuns:
    """Replay all texts under C rules.

    Args:
        arrays: a dense trace of chains.
        drafted, verified: [C, N] by anchor.
    """
    runs, texts = len(drafted), arrays.sequences
    source = KnownLengths(arrays, np.arange(runs).repeat(texts), np.tile(np.arange(texts), runs))
    draws, sends = drafted.numpy(), verified.numpy()
    while source.active.any():
        # Streams whose text has ended leave: the last rounds are of few streams.
        source.take(np.flatnonzero(source.active))
        round = source.begin()  # which finds the rows
        source.play(round, draws[source.run, source.row], sends[source.run, source.row])
        source.next_texts()
    return source.replayed(runs)


def replay_fixed(arrays: TraceArrays, depth: int) -> ReplayedRuns:
    """Replay all texts under the fixed lengths 0..`depth`."""
    length = torch.arange(depth + 1)[:, None].expand(-1, len(arrays.accepted))
    return replay_lengths(arrays, length, length)
