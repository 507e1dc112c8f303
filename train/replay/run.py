"""Replay: what a policy would have done on a trace, round by round, exactly, in the time of a profile.

The live loop's own rounds (`decode.rounds`), with many streams side by side and the trace as their source (`source`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...collect.store import Trace
from ...decode.rounds import play_round
from ...policies.contract import Array, StopPolicy
from ...policies.display import Table
from ...policies.features import History
from ...policies.host import PolicyHost
from ...policies.profile import Profile, as_profile
from ...policies.registry import PolicySpec, as_policy
from .source import TraceSource
from .stacking import stacked
from .traces.arrays import TraceArrays, trace_arrays
from .traces.checking import check_replayable, load_traces

MOST_STREAMS = 1 << 14
"""Streams side by side when many policies are replayed at once."""

MOST_HIDDEN_BYTES = 1 << 26
"""Of the hidden states that they are shown at once."""

CROWDED = 0.75
"""Share of the streams that still have a text below which the others are left out."""


@dataclass(frozen=True, repr=False)
class Replayed:
    """A replayed policy.

    Attributes:
        name: of the policy.
        tokens, seconds, rounds, drafted, verified, accepted: [S] sums by sequence; `tokens` and `seconds` include the
            first token and the reading of the prompt.
        log: [R, 5] int64, one line a round: sequence, anchor, drafted, verified, accepted; in order within a sequence.
        history: [R, 4], what the HISTORY features were when each round began.
        committed: [S] tokens committed by rounds.
        details: [R, 3 + K] int64, further columns of the log, where they were asked for: context, backlog, decisions, and
            the rows fed at each depth.
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
    details: Tensor | None = None

    @property
    def rate(self) -> float:
        """Tokens per second over all sequences: a ratio of sums, never a mean of ratios."""
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def table(self) -> Table:
        """One row: speed, tokens per target call, and means over rounds."""
        rounds = int(self.rounds.sum())
        means = {
            name: float(getattr(self, name).sum()) / max(rounds, 1) for name in ("drafted", "verified", "accepted")
        }
        speed = {"policy": self.name, "tokens_per_s": self.rate, "tokens_per_call": self.block_efficiency}
        return Table([speed | means | {"rounds": rounds, "texts": len(self.tokens)}])

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`."""
        return self.table.to_pandas()

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    @property
    def block_efficiency(self) -> float:
        """Committed tokens per target call."""
        return float(self.committed.sum() / self.rounds.sum().clamp_min(1))


def replay(
    traces: TraceArrays | Trace | str | Path,
    policy: PolicySpec,
    profile: Profile | str | Path,
    details: bool = False,
) -> Replayed:
    """Replay a policy on all sequences; one that carries its state decodes them in their order, as the live loop does.

    Args:
        traces: a trace, its folder, or its arrays.
        policy: a policy, a spec such as `fixed:4`, or a policy folder; it must not read the clock.
        profile: prices the rounds; a profile or its file.
        details: keep more of each round.

    Raises:
        TraceError: the policy drafts deeper than the trace, reads what the trace does not hold, or comes where it has no
            round.
    """
    arrays = traces if isinstance(traces, TraceArrays) else trace_arrays(load_traces(traces))
    policy, profile = as_policy(policy), as_profile(profile)
    check_replayable(arrays, policy, profile)
    return _played(arrays, policy, profile, _queues(arrays, policy), [policy], details)[0]


def replay_many(arrays: TraceArrays, policies: Sequence[StopPolicy], profile: Profile) -> list[Replayed]:
    """Replay many policies; those that differ in a threshold only run side by side, which is what a sweep wants."""
    most = min([MOST_STREAMS, *(_streams_of(arrays, policy) for policy in policies if policy.hidden)])
    each = max(1, most // max(arrays.sequences, 1))
    done: list[Replayed] = []
    at = 0
    while at < len(policies):
        group = list(policies[at : at + each])
        queues = _queues(arrays, group[0])
        # A sweep has policies of one kind next to each other: halving soon leaves a run of such.
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
    """Return [R, Q], the streams of a policy: one for each sequence, or where it carries its state one for each of N draws.

    What carries its state meets a text once, not N draws of it.
    """
    every = np.arange(arrays.sequences)
    # The N draws of a text are sequences that follow one another.
    return every.reshape(-1, arrays.header.draws).T.copy() if policy.carries else every[:, None]


def _streams_of(arrays: TraceArrays, policy: StopPolicy) -> int:
    """Return how many streams' hidden states of one depth fit into `MOST_HIDDEN_BYTES`."""
    return MOST_HIDDEN_BYTES // (4 * arrays.tree.width * sum(arrays.hidden_state(name).width for name in policy.hidden))


def _played(
    arrays: TraceArrays,
    policy: StopPolicy,
    profile: Profile,
    queues: Array,
    names: Sequence[StopPolicy],
    details: bool = False,
) -> list[Replayed]:
    """Play all rounds; the streams fall into as many equal parts as there are names, each with every sequence once."""
    source = TraceSource(arrays, policy, queues)
    # Rounds are priced in one call after the replay, unless the policy reads their seconds.
    observes_seconds = policy.reads_seconds and type(policy).observe is not StopPolicy.observe
    host = PolicyHost(policy, profile=profile if observes_seconds else None)
    host.start(arrays.keys.numpy()[source.sequence])
    bins = len(names) * arrays.sequences
    part = np.arange(len(queues)) // (len(queues) // len(names)) * arrays.sequences
    by_stream = policy is not names[0]  # stacked: each stream has thresholds of its own, and no stream may move
    turns: list[tuple[Array, ...]] = []
    is_tree = not source.topology.is_chain
    while on := int(np.count_nonzero(source.active)):
        if not by_stream and on <= CROWDED * len(part):
            left = np.flatnonzero(source.active)
            part = part[left]
            source.take(left)
            host.take(left)
        begin = source.active, part + source.sequence, host.history.record, source.sequence, source.anchor
        made = play_round(source, host)
        counts = made.drafted, made.verified, made.accepted, made.committed, made.context, made.backlog, made.decisions
        turns.append((*begin, *counts, *(made.steps.T if details or is_tree else ())))
        begun = source.next_texts()
        if len(begun):
            host.refill(begun, arrays.keys.numpy()[source.sequence[begun]])
    columns = [np.concatenate(column) for column in zip(*turns, strict=True)] or _no_rounds(source.topology.deepest)
    del turns
    _, owner, history, *columns = [column[columns[0]] for column in columns]
    history = History(history).values()
    table = np.stack(columns, 1)  # [R, 9 + K]
    context, drafted, verified, backlog, decisions = table[:, [6, 2, 3, 7, 8]].T
    price, fed = profile.decision(policy.cost_name), table[:, 9:] if is_tree else None
    spent = profile.round_seconds(context, drafted, verified, backlog, decisions, price, fed)
    reading = np.tile(profile.prefill_seconds(arrays.prompt_tokens.numpy()), len(names))
    seconds = np.bincount(np.concatenate([np.arange(bins), owner]), np.concatenate([reading, spent]), bins)
    rounds = np.bincount(owner, minlength=bins)
    sums = np.stack([np.bincount(owner, column, bins) for column in table.T[2:6]]).astype(np.int64)
    order = np.argsort(owner, kind="stable")  # within a sequence in the order they were played
    log, more, history = table[order, :5], table[order, 6:], history[order]
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
                torch.from_numpy(more[here]) if details else None,
            )
        )
    return out


def _no_rounds(depth: int) -> list[Array]:
    """Return the columns of a replay without rounds."""
    none = np.zeros(0, dtype=np.int64)
    return [none.astype(bool), none, History.start(0).record, *[none] * (9 + depth)]
