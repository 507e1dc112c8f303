"""Replay of rules whose draft length is known without asking a policy: thousands of settings at once, priced by any profile.

That is so of fixed lengths, of one threshold on recorded probabilities, and of an engine's rule that gives a whole batch one
length. What is accepted and committed is the trace's say as in any replay. The rounds do not depend on what they cost, so
that playing them once serves every profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.baselines.fixed import FixedLength
from ...policies.latency.profile import Profile
from .log import Rounds
from .seconds import prompt_seconds, round_seconds
from .source import Array, TraceSource
from .traces.arrays import TraceArrays


@dataclass(frozen=True)
class Walked:
    """Rounds of C runs over the same S texts; all [R].

    Attributes:
        arrays: the trace.
        runs: C.
        run, sequence: which round it was.
        context: tokens committed before it, the prompt's included.
        drafted, verified: tokens drawn, and sent to the target.
        backlog: committed tokens that the draft had not read.
        committed: tokens.
    """

    arrays: TraceArrays
    runs: int
    run: Tensor
    sequence: Tensor
    context: Tensor
    drafted: Tensor
    verified: Tensor
    backlog: Tensor
    committed: Tensor

    def seconds(self, profile: Profile) -> Tensor:
        """Return [C, S] float64 seconds, reading each text's prompt included, decisions left out."""
        return self.of_rounds(profile)[1] + prompt_seconds(profile, self.arrays.prompt_tokens)

    def rounds(self, run: int) -> Rounds:
        """Return the rounds of a run; its decisions are nobody's."""
        of = self.run == run
        sequence, context, drafted, verified, backlog, committed = (
            column[of]
            for column in (self.sequence, self.context, self.drafted, self.verified, self.backlog, self.committed)
        )
        # `committed - 1` is what was accepted, or less where the end of the text cut the round.
        anchor, none = context - self.arrays.prompt_tokens[sequence], torch.zeros_like(drafted)
        return Rounds(
            sequence, anchor, context, drafted, verified, committed - 1, backlog, none, drafted, None, cost_name=""
        )

    def of_rounds(self, profile: Profile) -> tuple[Tensor, Tensor]:
        """Return [C, S] committed tokens and [C, S] float64 seconds of the rounds alone."""
        spent = round_seconds(profile, self.context, self.drafted, self.verified, self.backlog)
        bins = self.run * self.arrays.sequences + self.sequence  # [R] below C * S
        sums = torch.zeros(2, self.runs * self.arrays.sequences, dtype=torch.float64)
        sums.index_add_(1, bins, torch.stack([self.committed.double(), spent]))
        committed, seconds = sums.view(2, self.runs, -1).unbind(0)
        return committed, seconds


def draft_bound(arrays: TraceArrays) -> Tensor:
    """Return [N], the most tokens that can be drafted at each anchor of a dense trace: up to EOS, or the length limit."""
    allowed = (arrays.header.max_new_tokens - arrays.every_anchor - 1).clamp(0, arrays.depth)  # one is the target's
    if not arrays.header.eos or not arrays.ends.shape[1]:
        return allowed
    # The end of text itself is drafted; nothing is drafted after it.
    ends = torch.where(arrays.ends.any(1), arrays.ends.int().argmax(1) + 1, arrays.depth)
    return torch.minimum(allowed, ends)


@dataclass(frozen=True)
class _Lengths:
    """Tokens [R] that a round draws and sends."""

    drafted: Array
    verified: Array


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

    def play(self, drafted: Array, verified: Array) -> Array:
        """Play the round that has begun and return [R] accepted tokens; what EOS and the limit forbid is cut."""
        drafted = np.minimum(drafted, self._bound[self.row])
        # Of a chain, `verify` and `commit` read no more of `Drafted` than these two.
        found: Any = _Lengths(drafted, np.minimum(verified, drafted))
        # Read before `commit`, which moves anchor and backlog on.
        on, before = self.active, (self.run, self.sequence, self.context(), drafted, found.verified, self.backlog)
        accepted = self.verify(found)
        committed, _ = self.commit(found)
        self._log.append(np.stack([*before, committed])[:, on])
        return accepted

    def take(self, streams: Array) -> None:
        """See `TraceSource.take`."""
        super().take(streams)
        self.run = self.run[streams]

    def walked(self, runs: int) -> Walked:
        """Return all rounds so far, of so many runs."""
        columns = np.concatenate([np.zeros((7, 0), dtype=np.int64), *self._log], 1)
        return Walked(self.arrays, runs, *torch.from_numpy(columns).unbind(0))


def walk_lengths(arrays: TraceArrays, drafted: Tensor, verified: Tensor) -> Walked:
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
        source.begin()
        source.play(draws[source.run, source.row], sends[source.run, source.row])  # `begin` has found the rows
        source.next_texts()
    return source.walked(runs)


def walk_fixed(arrays: TraceArrays, depth: int) -> Walked:
    """Replay all texts under the fixed lengths 0..`depth`."""
    length = torch.arange(depth + 1)[:, None].expand(-1, len(arrays.accepted))
    return walk_lengths(arrays, length, length)
