"""Rules whose draft length follows from the anchor's row alone: thousands of settings walked at once, priced by any profile.

Replay asks a policy token by token. Where the length is known beforehand for every anchor, as of fixed lengths and of one
threshold on recorded probabilities, walking the texts is all that is left; the tests hold it to replay. The rounds do not
depend on what they cost, so one walk serves every profile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...policies.latency.profile import Profile
from ..replay.log import Rounds
from ..replay.seconds import prompt_seconds, round_seconds
from ..replay.traces.arrays import TraceArrays


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
        anchor, none = context - self.arrays.prompt_tokens[sequence], torch.zeros_like(drafted)
        return Rounds(
            sequence, anchor, context, drafted, verified, committed - 1, backlog, none, drafted, None, cost_name=""
        )

    def rates(self, profile: Profile) -> Tensor:
        """Return [C] committed tokens per second of the rounds alone: of a batch that is always full."""
        committed, spent = self.of_rounds(profile)
        return committed.sum(1) / spent.sum(1)

    def of_rounds(self, profile: Profile) -> tuple[Tensor, Tensor]:
        """Return [C, S] committed tokens and [C, S] float64 seconds of the rounds alone."""
        spent = round_seconds(profile, self.context, self.drafted, self.verified, self.backlog)
        bins = self.run * self.arrays.sequences + self.sequence
        sums = torch.zeros(2, self.runs * self.arrays.sequences, dtype=torch.float64)
        sums.index_add_(1, bins, torch.stack([self.committed.double(), spent]))
        committed, seconds = sums.view(2, self.runs, -1).unbind(0)
        return committed, seconds


def draft_bound(arrays: TraceArrays) -> Tensor:
    """Return [N], the most tokens that can be drafted at each anchor of a dense trace: up to EOS, or the length limit."""
    sequence = torch.repeat_interleave(torch.arange(arrays.sequences), arrays.rows)
    anchor = arrays.first_anchor[sequence] + torch.arange(len(sequence)) - arrays.offset[sequence]
    allowed = (arrays.header.max_new_tokens - anchor - 1).clamp(0, arrays.depth)
    if not arrays.header.eos or not arrays.ends.shape[1]:
        return allowed
    ends = torch.where(arrays.ends.any(1), arrays.ends.int().argmax(1) + 1, arrays.depth)
    return torch.minimum(allowed, ends)


def walk_lengths(arrays: TraceArrays, drafted: Tensor, verified: Tensor) -> Walked:
    """Walk all texts under C rules.

    Args:
        arrays: a dense trace of chains.
        drafted, verified: [C, N] by anchor; what EOS and the limit forbid is cut here.
    """
    bound = draft_bound(arrays)
    drafted = torch.minimum(drafted.long(), bound)
    verified = torch.minimum(verified.long(), drafted)
    runs, texts = len(drafted), arrays.sequences
    run = torch.arange(runs).repeat_interleave(texts)
    sequence = torch.arange(texts).repeat(runs)
    anchor = arrays.first_anchor[sequence]
    backlog = arrays.prompt_tokens[sequence] + anchor
    parts: list[Tensor] = []
    while len(run):
        row = arrays.offset[sequence] + anchor - arrays.first_anchor[sequence]
        drew, sent = drafted[run, row], verified[run, row]
        accepted = torch.minimum(arrays.accepted[row], sent)
        left = arrays.text_tokens[sequence] - anchor
        committed = torch.minimum(accepted + 1, left)
        context = arrays.prompt_tokens[sequence] + anchor
        parts.append(torch.stack([run, sequence, context, drew, sent, backlog, committed]))
        read = torch.minimum(accepted, drew - 1)
        backlog = committed + torch.where(drew > 0, -read, backlog)
        anchor = anchor + committed
        on = committed < left
        run, sequence, anchor, backlog = run[on], sequence[on], anchor[on], backlog[on]
    return Walked(arrays, runs, *torch.cat(parts, 1).unbind(0))


def walk_fixed(arrays: TraceArrays, depth: int) -> Walked:
    """Walk all texts under the fixed lengths 0..`depth`."""
    length = torch.arange(depth + 1)[:, None].expand(-1, len(arrays.accepted))
    return walk_lengths(arrays, length, length)
