"""Exact replay of policies on a trace, with many streams side by side.

The rounds are those of the live loop (`decode.rounds`), with the trace as their source.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...collect.store import Trace
from ...decode.drafters.spec import drafter_index
from ...decode.rounds import play_round
from ...policies.contract import Array, DraftStep, State, StopPolicy
from ...policies.features import HISTORY_FEATURES, History
from ...policies.host import PolicyHost
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile, load_profile
from ...policies.registry import PolicySpec, as_policy
from ...policies.rules import Rule
from .arrays import TraceArrays, trace_arrays
from .checks import check_replayable, load_traces
from .rounds import COUNTS, NoPolicy, Rounds
from .source import TraceSource

MAX_STREAMS = 1 << 14
"""Streams side by side when many policies are replayed at once."""

MAX_HIDDEN_BYTES = 1 << 26
"""Bytes of the hidden states that these streams receive at once."""

MIN_ACTIVE_SHARE = 0.75
"""Share of active streams below which the inactive ones are removed."""


def replay(traces: TraceArrays | Trace | str | Path, policy: PolicySpec, profile: Profile | str | Path) -> Rounds:
    """Replay a policy on all texts of a trace. A policy that carries its state decodes them in order, as the live loop does.

    Args:
        traces: a trace, its folder, or its arrays.
        policy: a policy, a spec such as `fixed:4`, or a policy folder; it must not read the clock.
        profile: costs of rounds; a profile or its file.

    Raises:
        TraceError: the policy drafts deeper than the trace, reads what the trace does not have, or comes to an anchor that
            has no round.
    """
    arrays = traces if isinstance(traces, TraceArrays) else trace_arrays(load_traces(traces))
    policy, profile = as_policy(policy), load_profile(profile)
    own, costs = arrays.of_policy(policy), profile.of_policy(policy, arrays.drafters)
    check_replayable(own, policy, costs)
    return _among_all(_play(own, policy, costs, _queues(arrays, policy), [policy]), arrays, profile)[0]


def _among_all(results: list[Rounds], arrays: TraceArrays, profile: Profile) -> list[Rounds]:
    """Return rounds of one of several drafters as those of a policy that routes: all are then priced by one profile."""
    policy = results[0].policy
    if policy.routes or not profile.others or arrays.tree.drafters == 1:
        return results
    index = drafter_index(policy, arrays.drafters)
    return [one.among_drafters(index, arrays.tree.drafters, arrays.depth, profile) for one in results]


def replay_anchors(
    arrays: TraceArrays,
    policy: StopPolicy,
    profile: Profile,
    history: History,
    backlog: Array,
    on_decision: Callable[[DraftStep, State], None] | None = None,
) -> Rounds:
    """Play one round of a policy at each anchor of a dense trace; return the N rounds in the order of the rows.

    Args:
        arrays: the trace.
        policy: starts anew at each anchor.
        profile: costs of rounds.
        history: of the N streams.
        backlog: [N], or [N, D] with several drafters, at each anchor.
        on_decision: see `PolicyHost`.
    """
    check_replayable(arrays, policy, profile)
    owner = arrays.owner.numpy()
    source = TraceSource(arrays, policy, owner[:, None])
    source.anchor, source.backlog = arrays.anchor_by_row.numpy().copy(), backlog
    drafters = source.topology.drafters
    host = PolicyHost(policy, drafters=drafters, on_decision=on_decision)
    host.start(arrays.keys.numpy()[owner])
    host.history = history
    turn = _play_turn(source, host, owner)
    return _results(arrays, profile, [policy], [turn], not source.topology.is_chain, drafters)[0]


def replay_many(arrays: TraceArrays, policies: Sequence[StopPolicy], profile: Profile) -> list[Rounds]:
    """Replay many policies. Neighbouring learned policies that differ only in a threshold run side by side."""
    each = max(
        1, min([MAX_STREAMS, *(_most_streams(arrays, policy) for policy in policies)]) // max(arrays.sequences, 1)
    )
    results: list[Rounds] = []
    while len(results) < len(policies):
        group = list(policies[len(results) : len(results) + each])
        queues = _queues(arrays, group[0])
        # Policies of one kind are neighbours in a sweep: a few halvings leave only such.
        while (policy := _stacked(group, len(queues))) is None:
            group = group[: len(group) // 2]
        own, costs = arrays.of_policy(policy), profile.of_policy(policy, arrays.drafters)
        check_replayable(own, policy, costs)
        results += _among_all(_play(own, policy, costs, np.tile(queues, (len(group), 1)), group), arrays, profile)
    return results


def _most_streams(arrays: TraceArrays, policy: StopPolicy) -> int:
    """Return how many streams' hidden states of one depth fit into `MAX_HIDDEN_BYTES`."""
    width = arrays.tree.width * sum(arrays.hidden_state(name).width for name in policy.hidden)
    return MAX_HIDDEN_BYTES // (4 * width) if width else MAX_STREAMS


def replay_lengths(
    arrays: TraceArrays,
    drafted: Tensor,
    verified: Tensor,
    profile: Profile,
    policies: Sequence[StopPolicy] | None = None,
) -> list[Rounds]:
    """Replay C rules with draft lengths that are known for each anchor, without calling a policy; HISTORY is unknown.

    Each anchor then has one possible round. The rounds of a text are found by going from anchor to anchor, of all rules and
    texts at once.

    Args:
        arrays: a dense trace of chains.
        drafted, verified: [C, N] tokens by anchor, cut to `TraceArrays.draft_bound`. Of several drafters [C, N, D], of which
            at most one drafts.
        profile: costs of rounds.
        policies: of the rules, for names and prices. One that routes decides once a round, unless it is never called.
    """
    tokens = KnownTokens.of(arrays, drafted, verified)
    left = arrays.text_tokens[arrays.owner] - arrays.anchor_by_row  # [N]
    step, goes_on = tokens.committed.flatten().numpy(), (tokens.committed < left).flatten().numpy()
    rules, anchors = tokens.committed.shape
    begins = arrays.offset[arrays.first_anchor < arrays.text_tokens].numpy()
    at = (np.arange(rules)[:, None] * anchors + begins).ravel()
    visited: list[Array] = []
    while len(at):
        visited.append(at)
        at = (at + step[at])[goes_on[at]]
    rows = np.sort(np.concatenate(visited)) if visited else at
    first = np.searchsorted(rows, np.arange(rules + 1) * anchors)
    policies = [NoPolicy()] * rules if policies is None else policies
    return [
        _known_rounds(
            arrays, profile, policy, torch.from_numpy(rows[begin:end] - rule * anchors), *(x[rule] for x in tokens)
        )
        for rule, (policy, begin, end) in enumerate(zip(policies, first[:-1], first[1:], strict=True))
    ]


class KnownTokens(NamedTuple):
    """The tokens of C rules at each anchor; see `replay_lengths`.

    Attributes:
        fed, drafted, verified: [C, N] or [C, N, D]. A drafter that is fed its last token may draw none.
        accepted, committed: [C, N].
    """

    fed: Tensor
    drafted: Tensor
    verified: Tensor
    accepted: Tensor
    committed: Tensor

    @staticmethod
    def of(arrays: TraceArrays, lengths: Tensor, sent: Tensor) -> KnownTokens:
        """Return the tokens of rules that want to draft `lengths` and verify `sent`, [C, N] or [C, N, D]."""
        wanted = torch.minimum(lengths, arrays.draft_bound)
        drafted = torch.minimum(wanted, arrays.token_bound)
        verified = torch.minimum(drafted, sent)
        if drafted.dim() == 2:
            fed, accepted = drafted, torch.minimum(verified, arrays.accepted)
        else:
            fed = torch.minimum(wanted, arrays.token_bound + 1)
            accepted = torch.minimum(verified, torch.stack([one.accepted for one in arrays.each_drafter], 1)).sum(2)
        left = arrays.text_tokens[arrays.owner] - arrays.anchor_by_row
        return KnownTokens(
            fed, drafted, verified, accepted, torch.minimum(accepted + 1, left)
        )  # the end of the text cuts


def _known_rounds(
    arrays: TraceArrays,
    profile: Profile,
    policy: StopPolicy,
    row: Tensor,
    fed: Tensor,
    drafted: Tensor,
    verified: Tensor,
    accepted: Tensor,
    committed: Tensor,
) -> Rounds:
    """Return the rounds at rows [R], in order; `KnownTokens` of one rule at all anchors."""
    sequence, anchor = arrays.owner[row], arrays.anchor_by_row[row]
    sizes = (fed if policy.routes else drafted)[row].reshape(len(row), -1)  # [R, D]
    context = arrays.prompt_tokens[sequence] + anchor
    begins = arrays.prompt_tokens[sequence] + arrays.first_anchor[sequence]
    backlogs = [
        _known_backlog(reading, sequence, context, begins, size, accepted[row])
        for reading, size in zip(arrays.header.readings, sizes.T, strict=True)
    ]
    limit = arrays.header.max_new_tokens - anchor - 1
    counts: dict[str, Any] = {
        "sequence": sequence, "anchor": anchor, "context": context, "drafted": drafted[row].reshape(len(row), -1).sum(1),
        "verified": verified[row].reshape(len(row), -1).sum(1), "accepted": accepted[row], "committed": committed[row],
        "backlog": backlogs[0], "decisions": (limit > 0).long() * (policy.routes and not policy.first),
        "steps": sizes.amax(1), "history": torch.zeros(len(row), len(HISTORY_FEATURES)),
    }  # fmt: skip
    if len(backlogs) > 1:
        counts["backlog"] = torch.stack(backlogs, 1)
        counts["fed"] = (torch.arange(arrays.depth) < sizes[..., None]).long()  # [R, D, K]
        counts["history"] = torch.zeros(*sizes.shape, len(HISTORY_FEATURES) + 1)
    return Rounds(policy, profile, arrays.prompt_tokens, arrays.first_anchor, **counts)


def _known_backlog(
    reading: str, sequence: Tensor, context: Tensor, begins: Tensor, length: Tensor, taken: Tensor
) -> Tensor:
    """Return [R], the backlog of a drafter before each round, as `source.TraceSource` counts it.

    Args:
        reading: of the drafter.
        sequence, context: of the rounds in order.
        begins: tokens committed when the text of each round began.
        length: tokens that the drafter drafts.
        taken: tokens that were accepted.
    """
    if reading == "nothing":
        return torch.zeros_like(context)
    # A draft reads all that is committed but its last token; one that reads all on the target's states not even its root.
    read = torch.minimum(taken, length - 1) if reading == "path" else -torch.ones_like(length)
    number = torch.arange(len(context))
    used = torch.where(length > 0, number, -1).cummax(0).values.roll(1)  # the last round before in which it drafted
    is_first = (used < 0) | (number == 0) | (sequence[used] != sequence)
    unread = begins if reading == "path" else begins - 1
    return torch.where(is_first, unread + context - begins, context - context[used] - read[used])


def _queues(arrays: TraceArrays, policy: StopPolicy) -> Array:
    """Return [R, Q], the texts of each stream: one each, or all in order if the policy carries its state.

    A policy that carries its state decodes each text once, not N draws of it: there is a stream for each of the N draws.
    """
    every = np.arange(arrays.sequences)
    # The N draws of a text are consecutive sequences.
    return every.reshape(-1, arrays.header.draws).T.copy() if policy.carries else every[:, None]


def _columns(round: Any) -> tuple[Array, ...]:
    """Return `COUNTS` from context to decisions."""
    return (
        round.context, round.drafted, round.verified, round.accepted, round.committed, round.read_backlog, round.decisions
    )  # fmt: skip


def _play(
    arrays: TraceArrays, policy: StopPolicy, profile: Profile, queues: Array, policies: Sequence[StopPolicy]
) -> list[Rounds]:
    """Play all rounds. The streams are divided equally among `policies`; `policy` decides as each of them in its part."""
    source = TraceSource(arrays, policy, queues)
    # Rounds are priced after the replay, unless the policy observes their seconds.
    observes_seconds = policy.reads_seconds and type(policy).observe is not StopPolicy.observe
    drafters = source.topology.drafters
    host = PolicyHost(policy, profile=profile if observes_seconds else None, drafters=drafters)
    host.start(arrays.keys.numpy()[source.sequence])
    part = np.arange(len(queues)) // (len(queues) // len(policies)) * arrays.sequences
    is_stacked, is_tree = policy is not policies[0], not source.topology.is_chain
    turns: list[tuple[Array, ...]] = []
    while active := int(np.count_nonzero(source.active)):
        if not is_stacked and active <= MIN_ACTIVE_SHARE * len(part):  # thresholds of stacked policies are by stream
            left = np.flatnonzero(source.active)
            part = part[left]
            source.take(left)
            host.take(left)
        turns.append(_play_turn(source, host, part + source.sequence))
        begun = source.start_next_texts()
        if len(begun):
            host.refill(begun, arrays.keys.numpy()[source.sequence[begun]])
    return _results(arrays, profile, policies, turns, is_tree, drafters)


def _play_turn(source: TraceSource, host: PolicyHost, owner: Array) -> tuple[Array, ...]:
    """Play a round of each stream; return its columns, see `_results`."""
    on, sequence, anchor, history = source.active, source.sequence, source.anchor, host.history
    record = history.record if history.idle is None else np.concatenate([history.record, history.idle[..., None]], -1)
    round = play_round(source, host)
    fed = () if source.topology.is_chain else round.steps.reshape(len(on), -1).T
    fed = fed if source.topology.drafters == 1 else (*round.backlog.T, *fed)
    return (record, on, owner, sequence, anchor, *_columns(round), *fed)


def _results(
    arrays: TraceArrays,
    profile: Profile,
    policies: Sequence[StopPolicy],
    turns: list[tuple[Array, ...]],
    is_tree: bool,
    drafters: int = 1,
) -> list[Rounds]:
    """Return the rounds of each policy.

    Args:
        arrays: the trace, of S texts.
        profile: of the costs.
        policies: that were replayed.
        turns: columns [R'] of the rounds that were played at the same time: the record [R', 5] of `History`, of several
            drafters [R', D, 6] with `History.idle`; whether the stream was active, owner = policy * S + text, `COUNTS`, of
            several drafters the backlog of each, and of trees the tokens fed at each draft step.
        is_tree: whether there are tokens fed.
        drafters: D.
    """
    if not turns:
        counts: dict[str, Any] = dict.fromkeys((*COUNTS, "steps"), torch.zeros(0, dtype=torch.int64))
        counts["history"] = torch.zeros(0, len(HISTORY_FEATURES))
        return [Rounds(one, profile, arrays.prompt_tokens, arrays.first_anchor, **counts) for one in policies]
    columns = [np.concatenate(column) for column in zip(*turns, strict=True)]
    record, active, owner, *columns = columns
    order = np.flatnonzero(active)
    order = order[np.argsort(owner[order], kind="stable")]  # within a text in the order in which they were played
    first = np.searchsorted(owner[order], np.arange(len(policies) + 1) * arrays.sequences)
    table = torch.from_numpy(np.stack([column[order] for column in columns]))  # [9 + K, R]
    history = torch.from_numpy(History(record[order]).values())
    if drafters > 1:
        history = torch.cat([history, torch.from_numpy(record[order][..., -1:]).float()], -1)
    results = []
    for policy, begin, end in zip(policies, first[:-1], first[1:], strict=True):
        rows = table[:, begin:end]
        counts = dict(zip(COUNTS, rows, strict=False))
        fed = rows[len(COUNTS) :].T.contiguous() if is_tree else None
        if fed is not None and drafters > 1:
            counts["backlog"], fed = fed[:, :drafters], fed[:, drafters:].reshape(len(fed), drafters, -1)
        counts["steps"] = counts["drafted"] if fed is None else (fed > 0).sum(-1).reshape(len(fed), -1).amax(1)
        counts |= {"fed": fed, "history": history[begin:end]}
        results.append(Rounds(policy, profile, arrays.prompt_tokens, arrays.first_anchor, **counts))
    return results


def _stacked(policies: Sequence[StopPolicy], streams: int) -> StopPolicy | None:
    """Return one policy for `len(policies) * streams` streams, the first `streams` under the first policy, and so on.

    Returns:
        None if they are no learned policies, or differ in more than thresholds.
    """
    first = policies[0]
    if len(policies) == 1:
        return first
    learned = [p for p in policies if type(p) is LearnedPolicy]  # decisions of subclasses depend on more than levels
    shared = ("head", "accept", "next", "survival")
    is_same = all(getattr(p, name) is getattr(learned[0], name) for p in learned for name in shared)
    shapes = {(p.max_depth, p.first, p.drafter) for p in learned}
    if len(learned) < len(policies) or not is_same or len(shapes) > 1:
        return None
    rule = _stacked_rule([p.rule for p in learned], streams)
    return None if rule is None else learned[0].with_rule(rule)


def _stacked_rule(rules: Sequence[Rule], streams: int) -> Rule | None:
    """Return a rule with a threshold for each stream; None if they differ in more, or in their depths."""
    first = rules[0]
    shape = type(first), first.kind, first.scales, len(first.levels)
    if any((type(r), r.kind, r.scales, len(r.levels)) != shape for r in rules):
        return None
    rule = copy.copy(first)
    # By depth: [1] of each policy -> [policies * streams].
    rule.levels = tuple(
        np.repeat(np.concatenate(levels), streams) for levels in zip(*(r.levels for r in rules), strict=True)
    )
    return rule
