"""Replay: what a policy would have done on a trace, round by round, exactly, in the time of a profile.

One loop over rounds with many streams side by side. A round looks the features of (anchor, node) up in the trace, asks the
policy as the live loop does, commits min(A, k) + 1 tokens and moves the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.latency.profile import Profile
from .arrays import TraceArrays
from .drafting import TreeShape, draft_chains, draft_trees
from .stacking import stacked
from .state import Array, Walk, check_replayable, concatenated, orders

MOST_STREAMS = 1 << 14
"""Streams side by side when many policies are replayed at once."""

MOST_HIDDEN_BYTES = 1 << 26
"""Of the hidden states that they are shown at once."""


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


def replay(arrays: TraceArrays, policy: StopPolicy, profile: Profile) -> Replayed:
    """Replay a policy on all sequences; one that carries its state decodes them in their order, as the live loop does.

    Args:
        arrays: a trace.
        policy: any policy but one that reads the clock.
        profile: the latency profile that rounds are timed with.

    Raises:
        TraceError: the policy drafts deeper than the trace, reads what the trace does not hold, or comes where it has no
            round.
    """
    check_replayable(arrays, policy, profile)
    return _played(arrays, policy, profile, _queues(arrays, policy), [policy])[0]


def replay_orders(
    arrays: TraceArrays, policy: StopPolicy, profile: Profile, count: int = 5, seed: int = 0
) -> list[Replayed]:
    """Replay a policy that carries its state in several orders of the texts: that of the trace, then shuffled ones."""
    check_replayable(arrays, policy, profile)
    return _played(arrays, policy, profile, orders(arrays.sequences, count, seed), [policy] * count)


def replay_many(arrays: TraceArrays, policies: Sequence[StopPolicy], profile: Profile) -> list[Replayed]:
    """Replay many policies; those that differ in a threshold only run side by side, which is what a sweep wants."""
    most = min([MOST_STREAMS, *(_streams_of(arrays, policy) for policy in policies if policy.hidden)])
    each = max(1, most // max(arrays.sequences, 1))
    done: list[Replayed] = []
    at = 0
    while at < len(policies):
        group = list(policies[at : at + each])
        queues = _queues(arrays, group[0])
        while len(group) > 1 and stacked(group, len(queues)) is None:
            group = group[: len(group) // 2]
        one = stacked(group, len(queues)) if len(group) > 1 else None
        if one is None:
            done.append(replay(arrays, group[0], profile))
            at += 1
            continue
        check_replayable(arrays, one, profile)
        done += _played(arrays, one, profile, np.tile(queues, (len(group), 1)), group)
        at += len(group)
    return done


def _queues(arrays: TraceArrays, policy: StopPolicy) -> Array:
    """Return [R, Q], the streams of a policy: one for each sequence, or one for all where it carries its state on."""
    every = np.arange(arrays.sequences)
    return every[None] if policy.carries else every[:, None]


def _streams_of(arrays: TraceArrays, policy: StopPolicy) -> int:
    """Return how many streams' hidden states of one depth fit into `MOST_HIDDEN_BYTES`."""
    return MOST_HIDDEN_BYTES // (4 * arrays.tree.width * sum(arrays.vector(name).width for name in policy.hidden))


def _played(
    arrays: TraceArrays, policy: StopPolicy, profile: Profile, queues: Array, names: Sequence[StopPolicy]
) -> list[Replayed]:
    """Play all rounds; the streams fall into as many equal parts as there are names, each with every sequence once."""
    walk = Walk(arrays, policy, profile, queues)
    shape = None if arrays.tree.is_chain and arrays.drawn is None else TreeShape(arrays.tree.limited(policy.max_depth))
    part = np.arange(len(queues)) // (len(queues) // len(names)) * arrays.sequences
    bins = len(names) * arrays.sequences
    lines: list[Array] = []
    histories: list[Array] = []
    owners = [np.arange(bins)]  # seconds begin with those of reading the prompts
    spent = [np.tile(profile.prefill_seconds(arrays.prompt_tokens.numpy()), len(names))]
    while walk.active.any():
        row, owner = walk.rows(), (part + walk.sequence)[walk.active]
        made = draft_chains(walk, row) if shape is None else draft_trees(walk, shape, row)
        line, seconds, before = walk.advance(made)
        owners.append(owner)
        spent.append(seconds)
        lines.append(line)
        histories.append(before)
    seconds = np.bincount(np.concatenate(owners), np.concatenate(spent), bins)
    owner = np.concatenate([np.zeros(0, dtype=np.int64), *owners[1:]])
    log, history = concatenated(lines, 6, np.int64), concatenated(histories, 4, np.float32)
    del owners, spent, lines, histories  # those of a large trace
    rounds = np.bincount(owner, minlength=bins)
    sums = np.stack([np.bincount(owner, column, bins) for column in log.T[2:]]).astype(np.int64)
    order = np.argsort(owner, kind="stable")
    log, history = log[order, :5], history[order]
    first = np.concatenate([[0], np.cumsum(rounds)])
    out = []
    for at, named in enumerate(names):
        mine = slice(at * arrays.sequences, (at + 1) * arrays.sequences)
        here = slice(first[mine.start], first[mine.stop])
        drafted, verified, accepted, committed = torch.from_numpy(sums[:, mine])
        out.append(
            Replayed(
                named.name,
                arrays.first_anchor + committed,
                torch.from_numpy(seconds[mine]),
                torch.from_numpy(rounds[mine]),
                drafted,
                verified,
                accepted,
                committed,
                torch.from_numpy(log[here]),
                torch.from_numpy(history[here]),
            )
        )
    return out
