"""Replay that remembers what every round consisted of, so that other latencies can price it again without a replay."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.latency.profile import Profile
from ...policies.latency.tables import CostTable, Price
from .arrays import TraceArrays
from .counted import Counted, count_rounds
from .run import Replayed, replay
from .seconds import prompt_seconds, round_seconds
from .state import Array

_Call = tuple[Array, Array, Array, Array, Array, "Array | None"]


@dataclass(frozen=True)
class _Meter(Profile):
    """A profile that keeps the arguments of every call of `round_seconds`."""

    calls: list[_Call] = field(default_factory=list, compare=False)

    def round_seconds(
        self,
        context: Array,
        drafted: Array,
        verified: Array,
        backlog: Array,
        decisions: Array,
        decision: float | Price,
        fed: Array | None = None,
    ) -> Array:
        """See `Profile.round_seconds`."""
        self.calls.append((context, drafted, verified, backlog, decisions, fed))
        return super().round_seconds(context, drafted, verified, backlog, decisions, decision, fed)


@dataclass(frozen=True)
class Rounds:
    """What the rounds of a replay consisted of; all [R], in the order of `Replayed.log`.

    Attributes:
        sequence, anchor: where.
        context: tokens committed before the round, the prompt's included.
        drafted, verified, accepted: tokens.
        backlog: committed tokens that the draft had not read.
        decisions: times the policy was asked.
        steps: draft steps, the depth that was drafted.
        fed: [R, K] of trees, tokens read at each draft step; None for chains.
        cost_name: of the policy.
    """

    sequence: Tensor
    anchor: Tensor
    context: Tensor
    drafted: Tensor
    verified: Tensor
    accepted: Tensor
    backlog: Tensor
    decisions: Tensor
    steps: Tensor
    fed: Tensor | None
    cost_name: str

    def seconds(self, profile: Profile) -> Tensor:
        """Return [R] float64, what a profile says that these rounds take."""
        return round_seconds(
            profile, self.context, self.drafted, self.verified, self.backlog, self.decisions,
            profile.decision(self.cost_name), self.fed,
        )  # fmt: skip

    def of_texts(self, profile: Profile, prompt_tokens: Tensor) -> Tensor:
        """Return [S] float64, what a profile says that texts take; prompts of no token are not read."""
        read = prompt_seconds(profile, prompt_tokens) * (prompt_tokens > 0)
        return self.by_sequence(self.seconds(profile), len(prompt_tokens)) + read

    def bare_seconds(self, profile: Profile) -> Tensor:
        """Return [R] float64, the same without decisions and with a draft that has read all but the anchor."""
        one = torch.ones_like(self.drafted)
        return round_seconds(profile, self.context, self.drafted, self.verified, one, fed=self.fed)

    def decision_seconds(self, profile: Profile) -> Tensor:
        """Return [R] float64 seconds of decisions."""
        return torch.from_numpy(profile.decision(self.cost_name).of(self.decisions.numpy()))

    def counted(self, sequences: int) -> Counted:
        """Return these rounds by what they consisted of, for each of the sequences."""
        return count_rounds(
            sequences,
            self.sequence.numpy(),
            self.context.numpy(),
            self.drafted.numpy(),
            self.verified.numpy(),
            self.backlog.numpy(),
            self.decisions.numpy(),
            None if self.fed is None else self.fed.numpy(),
        )

    def by_sequence(self, values: Tensor, sequences: int) -> Tensor:
        """Return [S] float64, the sums of values [R] over the rounds of each sequence."""
        return torch.zeros(sequences, dtype=torch.float64).index_add_(0, self.sequence, values.double())


@dataclass(frozen=True)
class Played:
    """A policy, its replay, and its rounds."""

    policy: StopPolicy
    result: Replayed
    rounds: Rounds

    def seconds(self, arrays: TraceArrays, profile: Profile) -> Tensor:
        """Return [S], what the texts take under another profile if the policy stops where it did."""
        return self.rounds.of_texts(profile, arrays.prompt_tokens)


def play(arrays: TraceArrays, policy: StopPolicy, profile: Profile) -> Played:
    """Replay a policy and keep what its rounds consisted of; arguments and errors as of `replay`."""
    meter = _Meter(**{f.name: getattr(profile, f.name) for f in dataclasses.fields(profile)})
    result = replay(arrays, policy, meter)
    return Played(policy, result, _rounds(result, meter.calls, policy))


def _rounds(result: Replayed, calls: list[_Call], policy: StopPolicy) -> Rounds:
    """Bring the calls, one a turn for all streams, into the order of the log: by sequence."""
    sequences, turns = len(result.rounds), len(calls)
    if not turns:
        none = torch.zeros(0, dtype=torch.int64)
        return Rounds(none, none, none, none, none, none, none, none, none, None, policy.cost_name)
    streams = len(calls[0][0])
    if streams == sequences and not policy.carries:  # a stream for each sequence; it is idle once its text has ended
        place = np.arange(turns) < result.rounds.numpy()[:, None]
        order = np.arange(turns * streams).reshape(turns, streams).T[place]
    else:  # one stream, all sequences in their order
        order = np.arange(turns)

    def column(at: int) -> Tensor:
        parts = [part for call in calls if (part := call[at]) is not None]
        return torch.from_numpy(np.concatenate(parts)[order])

    context, drafted, verified, backlog, decisions = (column(at) for at in range(5))
    fed = None if calls[0][5] is None else column(5)
    sequence, anchor, drafted_then, verified_then, accepted = result.log.unbind(1)
    assert torch.equal(drafted, drafted_then) and torch.equal(verified, verified_then), "calls and log fall apart"
    steps = drafted if fed is None else (fed > 0).sum(1)
    return Rounds(
        sequence, anchor, context, drafted, verified, accepted, backlog, decisions, steps, fed, policy.cost_name
    )


def scaled(profile: Profile, draft: float = 1.0, verify: float = 1.0, decision: float = 1.0) -> Profile:
    """Return a profile whose draft steps, verifications and decisions cost these factors of what they did."""

    def table(side: CostTable) -> CostTable:
        return dataclasses.replace(
            side,
            draft_s=(side.draft_s[0] * draft, side.draft_s[1] * draft),
            draft_token_s=side.draft_token_s * draft,
            later_draft_s=None if side.later_draft_s is None else side.later_draft_s * draft,
            second_draft_s=None if side.second_draft_s is None else side.second_draft_s * draft,
            tree_draft_s=tuple((rows, s * draft) for rows, s in side.tree_draft_s),
            verify_s=tuple(s * verify for s in side.verify_s),
            tree_verify_s=tuple((tokens, s * verify) for tokens, s in side.tree_verify_s),
        )

    prices = {name: profile.decision(name).times(decision) for name in profile.decision_s if decision != 1.0}
    return dataclasses.replace(profile.with_decisions(prices), low=table(profile.low), high=table(profile.high))
