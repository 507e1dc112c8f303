"""Replay that remembers what every round consisted of, so that other latencies can price it again without a replay."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.costs import CostTable
from ...policies.profile import Profile
from .run import Replayed, replay
from .seconds import prompt_seconds, round_seconds
from .traces.arrays import TraceArrays


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

    def part(self, use: Tensor) -> Rounds:
        """Return the rounds where `use` [R] holds."""
        columns = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        kept: dict[str, Any] = {name: values[use] for name, values in columns.items() if isinstance(values, Tensor)}
        return dataclasses.replace(self, **kept)

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
        """Return [R] float64, the same with free decisions and with a draft that has read all but the anchor."""
        one = torch.ones_like(self.drafted)
        return round_seconds(profile, self.context, self.drafted, self.verified, one, self.decisions, fed=self.fed)

    def decision_seconds(self, profile: Profile) -> Tensor:
        """Return [R] float64 seconds of decisions."""
        return profile.decision(self.cost_name) * self.decisions.double()

    def by_sequence(self, values: Tensor, sequences: int) -> Tensor:
        """Return [S] float64, the sums of values [R] over the rounds of each sequence."""
        return torch.zeros(sequences, dtype=torch.float64).index_add_(0, self.sequence, values.double())


@dataclass(frozen=True)
class Played:
    """A policy, its replay, and its rounds."""

    policy: StopPolicy
    result: Replayed
    rounds: Rounds


def play(arrays: TraceArrays, policy: StopPolicy, profile: Profile) -> Played:
    """Replay a policy and keep what its rounds consisted of; arguments and errors as of `replay`."""
    result = replay(arrays, policy, profile, details=True)
    assert result.details is not None
    sequence, anchor, drafted, verified, accepted = result.log.unbind(1)
    context, backlog, decisions = result.details[:, :3].unbind(1)
    # Of the tree as the policy's depth limits it, as `Drafted.fed_by_step` has it: cut to depth 0 it is a chain.
    fed = None if arrays.tree.limited(policy.max_depth).is_chain else result.details[:, 3:]
    steps = drafted if fed is None else (fed > 0).sum(1)
    rounds = Rounds(
        sequence, anchor, context, drafted, verified, accepted, backlog, decisions, steps, fed, policy.cost_name
    )
    return Played(policy, result, rounds)


def scaled(profile: Profile, draft: float = 1.0, verify: float = 1.0, decision: float = 1.0) -> Profile:
    """Return a profile whose draft steps, verifications and decisions cost these factors of what they did."""

    def table(side: CostTable) -> CostTable:
        return dataclasses.replace(
            side,
            draft_s=(side.draft_s[0] * draft, side.draft_s[1] * draft),
            draft_token_s=side.draft_token_s * draft,
            later_draft_s=None if side.later_draft_s is None else side.later_draft_s * draft,
            verify_s=tuple(s * verify for s in side.verify_s),
            tree_verify_s=tuple((tokens, s * verify) for tokens, s in side.tree_verify_s),
        )

    # `with_decisions` forgets the timings behind a price, so that prices that stay must not be passed to it.
    prices = {name: profile.decision(name) * decision for name in profile.decision_s if decision != 1.0}
    return dataclasses.replace(profile.with_decisions(prices), low=table(profile.low), high=table(profile.high))
