"""Replay: what a policy would have done on a trace, round by round, exactly, in the time of a profile.

One loop over rounds with all sequences side by side. A round looks the features of (anchor, depth) up in the trace, asks the
policy as the live loop does, commits min(A, k) + 1 tokens and moves the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..policies.contract import (
    DraftStep,
    DraftTree,
    RoundOutcome,
    State,
    StopPolicy,
    checked_keep,
    checked_select,
)
from ..policies.costs import Profile
from ..policies.errors import TraceError
from ..policies.features import Layout
from ..policies.history import History
from .data import TraceArrays


@dataclass(frozen=True)
class Replayed:
    """A replayed policy.

    Attributes:
        name: of the policy.
        tokens, seconds, rounds, drafted, verified, accepted: [S] sums by sequence; `tokens` and `seconds` include the
            first token and the reading of the prompt.
        log: [R, 5] int64, one line a round: sequence, anchor, drafted, verified, accepted; in order within a sequence.
        history: [R, 4], what the HISTORY features were when each round began.
        committed: [S] tokens committed by rounds.
    """

    name: str
    tokens: Tensor
    seconds: Tensor
    rounds: Tensor
    drafted: Tensor
    verified: Tensor
    accepted: Tensor
    committed: Tensor
    log: Tensor
    history: Tensor

    @property
    def rate(self) -> float:
        """Tokens per second over all sequences: a ratio of sums, never a mean of ratios."""
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def block_efficiency(self) -> float:
        """Committed tokens per target call."""
        return float(self.committed.sum() / self.rounds.sum().clamp_min(1))


class _Run:
    """The moving parts of a replay; every tensor is [S]."""

    def __init__(self, arrays: TraceArrays, policy: StopPolicy, profile: Profile) -> None:
        self.arrays, self.policy, self.profile = arrays, policy, profile
        self.layout = Layout(policy.features)
        self.anchor_columns, self.node_columns = arrays.tensors(policy.features)
        self.decision_s = profile.decision(policy.cost_name)
        streams = arrays.sequences
        self.anchor = arrays.first_anchor.clone()
        self.backlog = arrays.prompt_tokens + self.anchor
        self.history = History.start(streams)
        self.state: State = policy.start(streams, arrays.keys)
        self.active = self.anchor < arrays.text_tokens
        self.limit = torch.full_like(self.anchor, arrays.header.max_new_tokens)

    def rows(self) -> Tensor:
        """Return [S], the row of each sequence's anchor; any row for finished ones."""
        at = self.arrays.offset + (self.anchor - self.arrays.first_anchor)
        return torch.where(self.active, at, self.arrays.offset)

    def draft(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ask the policy depth by depth; return drafted, dropped, decisions and whether a limit or EOS ended it."""
        arrays, policy = self.arrays, self.policy
        depth = min(arrays.depth, policy.max_depth)
        cap = (self.limit - self.anchor - 1).clamp(max=depth)
        drafting = self.active.clone()
        drafted, dropped, decisions = (torch.zeros_like(self.anchor) for _ in range(3))
        capped = torch.zeros_like(drafting)
        base = self.layout.base(self.anchor_columns[row], self.history.values(self.layout.history))
        parent = torch.zeros(len(row), 1, dtype=torch.int64)
        for j in range(depth + 1):
            at_cap = drafting & (cap <= j)
            capped |= at_cap & (cap < depth)
            drafting = drafting & ~at_cap
            if not bool(drafting.any()):
                break
            if j >= policy.first:
                features = self.layout.step(base, self.node_columns[row, j - 1] if j else None)
                features = features * drafting[:, None]
                step = DraftStep(j, drafting[:, None], parent, features[:, None])
                keep, self.state = checked_keep(policy, step, self.state)
                decisions += drafting
                stops = drafting & ~keep[:, 0]
                if policy.trims and j > 0:
                    dropped += stops
                drafting = drafting & keep[:, 0]
            drafted += drafting
            ended = drafting & arrays.ends[row, min(j, arrays.depth - 1)]
            capped |= ended
            drafting = drafting & ~ended
        return drafted, dropped, decisions, capped

    def choose(self, row: Tensor, drafted: Tensor, dropped: Tensor) -> Tensor:
        """Return [S], the tokens sent to the target: all but those that the policy trims."""
        verified = drafted - dropped
        if type(self.policy).select is StopPolicy.select or not int(verified.max()):
            return verified
        nodes = torch.arange(self.policy.max_depth)[None].expand(len(row), -1)
        drawn = nodes < verified[:, None]
        tokens = torch.where(drawn, self.arrays.tokens[row, : nodes.shape[1]], -1)
        tree = DraftTree(tokens, nodes - 1, nodes + 1, drawn)
        mask = checked_select(self.policy, tree, self.state)
        return verified if mask is None else (mask & drawn).long().cumprod(1).sum(1)

    def advance(self) -> tuple[Tensor, ...]:
        """Play one round of every unfinished sequence; return what is summed."""
        arrays, row, active = self.arrays, self.rows(), self.active
        drafted, dropped, decisions, capped = self.draft(row)
        verified = self.choose(row, drafted, dropped)
        accepted = torch.minimum(arrays.accepted[row], verified) * active
        committed = torch.minimum(accepted + 1, arrays.text_tokens - self.anchor) * active
        context = arrays.prompt_tokens + self.anchor
        seconds = (
            self.profile.round_seconds(context, drafted, verified, self.backlog, decisions, self.decision_s) * active
        )
        ends = self.anchor + committed >= arrays.text_tokens
        outcome = RoundOutcome(active, drafted, verified, accepted, (capped | ends) & active, seconds)
        before = self.history.values()[active]
        self.history = self.history.after(accepted, verified, active & ~outcome.cut)
        self.state = self.policy.observe(outcome, self.state)
        log = torch.stack([torch.arange(len(row)), self.anchor, drafted, verified, accepted], 1)[active]
        # The draft has read all drafted tokens but the last one; what was rejected of them is forgotten.
        read = torch.where(drafted > 0, torch.minimum(accepted, drafted - 1), -self.backlog)
        self.backlog = torch.where(active, committed - read, self.backlog)
        self.anchor = self.anchor + committed
        self.active = active & ~ends
        return active.long(), drafted * active, verified * active, accepted, committed, seconds, log, before


def replay(arrays: TraceArrays, policy: StopPolicy, profile: Profile) -> Replayed:
    """Replay a policy on all sequences.

    Args:
        arrays: a trace.
        policy: any policy but one with hidden-state vectors, or one that reads the clock.
        profile: the latency profile that rounds are timed with.

    Raises:
        TraceError: the policy drafts deeper than the trace, or reads what the trace does not hold.
    """
    if policy.max_depth > arrays.depth:
        raise TraceError(
            f"{policy.name} drafts up to {policy.max_depth} tokens, but the trace was recorded to depth {arrays.depth}; "
            f"limit the policy (max_depth={arrays.depth}) or collect with --depth {policy.max_depth}"
        )
    if profile.max_depth < policy.max_depth:
        raise TraceError(
            f"{policy.name} drafts up to {policy.max_depth} tokens, but the profile ends at {profile.max_depth}"
        )
    if policy.vectors or policy.reads_clock:
        raise TraceError(f"{policy.name} reads hidden states or the clock, which this trace does not hold")
    if policy.carries:
        raise TraceError(f"{policy.name} carries its state from text to text; replay plays all texts side by side")
    run = _Run(arrays, policy, profile)
    sums = [torch.zeros_like(run.anchor) for _ in range(5)]
    seconds = profile.prefill_seconds(arrays.prompt_tokens)
    logs: list[Tensor] = [torch.zeros(0, 5, dtype=torch.int64)]
    histories: list[Tensor] = [torch.zeros(0, 4)]
    while bool(run.active.any()):
        *counts, spent, log, before = run.advance()
        sums = [total + count for total, count in zip(sums, counts, strict=True)]
        seconds = seconds + spent
        logs.append(log)
        histories.append(before)
    rounds, drafted, verified, accepted, committed = sums
    log = torch.cat(logs)
    order = torch.argsort(log[:, 0], stable=True)
    return Replayed(
        policy.name,
        arrays.first_anchor + committed,
        seconds,
        rounds,
        drafted,
        verified,
        accepted,
        committed,
        log[order],
        torch.cat(histories)[order],
    )
