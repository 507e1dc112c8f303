"""Bounds that no policy can exceed, and the loss of each round against them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array
from ...policies.costs import MIN_CALL_S, CostTable
from ...policies.profile import Profile
from .arrays import TraceArrays
from .rounds import Rounds

SAME_S = 1e-12
"""Difference in seconds below which two plans are equally good: sums of the same numbers in another order."""


@dataclass(frozen=True)
class OraclePlan:
    """The fastest decoding of each text by someone who knows every accepted length: the oracle bound.

    Attributes:
        value: [S, L] float64 seconds from the anchor first + t to the end of the text, t = 0, 1, ...; 0 after it.
        steps: [S, L] draft depth there, the smallest of equally good ones.
        seconds: [S] of whole texts, including prompts.
        profile: of the plan's rounds, with a first step that costs at most as much as one that reads two tokens.
    """

    value: Tensor
    steps: Tensor
    seconds: Tensor
    profile: Profile


def oracle_plan(arrays: TraceArrays, profile: Profile) -> OraclePlan:
    """Return the oracle's plan, a shortest path over anchors:

        V(t) = min over 0 <= k <= K of cost(k) + V(t + min(A_t, k) + 1)

    `cost` is the smallest cost of k or more tokens, without decisions and with a backlog of one token, so that no policy is
    faster. In a tree it is that of drafting and verifying one path, as a chain if that costs less.
    """
    cheap = _cheapest_steps(profile)
    length = arrays.text_tokens - arrays.first_anchor
    longest = int(length.max())
    steps, verified = _plan_sizes(arrays, cheap)
    streams, options = arrays.sequences, len(steps)
    value = torch.zeros(streams, longest + arrays.depth + 2, dtype=torch.float64)
    chosen = torch.zeros(streams, longest + 1, dtype=torch.int64)
    k, sent = steps.expand(streams, -1), verified.repeat(streams)
    fed = (
        None
        if arrays.tree.is_chain
        else (torch.arange(arrays.depth) < steps[:, None]).long().repeat(streams, 1).numpy()
    )
    path = ((k.flatten() == sent) & (sent <= cheap.max_depth)).numpy()  # these can also be drafted as a chain
    columns = np.stack([k.flatten().numpy(), sent.numpy(), np.ones(len(sent), dtype=np.int64)])  # backlog 1
    for t in range(longest - 1, -1, -1):
        row = torch.minimum(arrays.offset + t, arrays.offset + arrays.rows - 1)
        context = (arrays.prompt_tokens + arrays.first_anchor + t).repeat_interleave(options).numpy()
        seconds = cheap.round_seconds(context, *columns, np.zeros_like(columns[0]), 0.0, fed)
        if fed is not None:
            drafted, _, one = columns[:, path]
            chains = cheap.round_seconds(context[path], drafted, drafted, one, np.zeros_like(one), 0.0)
            seconds[path] = np.minimum(seconds[path], chains)
        cost = torch.from_numpy(seconds).view(streams, -1)
        if fed is None:
            # Verifying more tokens can be cheaper: drafting k costs at most as much as any larger round.
            cost = cost.flip(1).cummin(1).values.flip(1)
        reached = t + torch.minimum(arrays.accepted[row][:, None], k) + 1
        total = cost + value.gather(1, torch.minimum(reached, length[:, None].clamp_min(0)))
        least = total.min(1).values
        first = (total <= least[:, None] + SAME_S).int().argmax(1)  # argmax returns the first, the smallest depth
        value[:, t] = torch.where(t < length, least, 0.0)
        chosen[:, t] = torch.where(t < length, steps[first], 0)
    read = torch.from_numpy(profile.prefill_seconds(arrays.prompt_tokens.numpy()))
    return OraclePlan(value, chosen, value[:, 0] + read, cheap)


def oracle_seconds(arrays: TraceArrays, profile: Profile) -> Tensor:
    """Return [S] float64, the least seconds in which each text can be decoded: the bound of `oracle_plan`."""
    return oracle_plan(arrays, profile).seconds


def _plan_sizes(arrays: TraceArrays, profile: Profile) -> tuple[Tensor, Tensor]:
    """Return [M] draft steps and [M] tokens verified; of trees, including larger verifications that may be cheaper."""
    if arrays.tree.is_chain:  # no chain is longer than what was timed
        k = torch.arange(min(arrays.depth, profile.max_depth) + 1)
        return k, k
    low, high = (side.tree_verify(arrays.tree.nodes) for side in (profile.low, profile.high))
    pairs = [
        (steps, sent)
        for steps in range(arrays.depth + 1)
        for sent in range(steps, arrays.tree.nodes + 1)
        if sent == steps or low[sent] < low[steps] or high[sent] < high[steps]
    ]
    steps, sent = torch.tensor(pairs).unbind(1)
    return steps, sent


def _cheapest_steps(profile: Profile) -> Profile:
    """Return the profile with no first step that costs more than one that reads two tokens; noise can reverse them."""
    low, high = (
        dataclasses.replace(table, draft_s=(min(table.draft_s), table.draft_s[1]))
        for table in (profile.low, profile.high)
    )
    return dataclasses.replace(profile, low=low, high=high)


def planned_rounds(arrays: TraceArrays, plan: OraclePlan) -> Rounds:
    """Return the rounds of the oracle's plan, in which one path is drafted and verified, in the order of decoding."""
    sequence = torch.arange(arrays.sequences)
    anchor, parts = arrays.first_anchor, []
    while len(sequence):
        at = anchor - arrays.first_anchor[sequence]
        steps = plan.steps[sequence, at]
        accepted = torch.minimum(arrays.accepted[arrays.offset[sequence] + at], steps)
        committed = torch.minimum(accepted + 1, arrays.text_tokens[sequence] - anchor)
        context = arrays.prompt_tokens[sequence] + anchor
        parts.append(torch.stack([sequence, anchor, context, steps, steps, accepted, committed]))
        anchor = anchor + accepted + 1
        on = anchor < arrays.text_tokens[sequence]
        sequence, anchor = sequence[on], anchor[on]
    columns = torch.cat(parts, 1)
    steps, one = columns[3], torch.ones_like(columns[3])
    fed = None if arrays.tree.is_chain else (torch.arange(arrays.depth) < steps[:, None]).long()
    return Rounds(None, plan.profile, arrays.prompt_tokens, arrays.first_anchor, *columns, one, 0 * one, steps, fed)


@dataclass(frozen=True)
class Regret:
    """The loss of each round against the oracle that continues from the same anchor; all [R].

    Attributes:
        ideal: draft depth of the oracle.
        early: bool, committed less than the ideal round.
        late: bool, drafted or sent more than the ideal round in vain.
        choice_s: seconds lost by where the policy stopped, including the effect on the rest of the text.
        decision_s: seconds of decisions.
        backlog_s: seconds of reading tokens that the draft had not read, which the bound leaves out.
    """

    ideal: Tensor
    early: Tensor
    late: Tensor
    choice_s: Tensor
    decision_s: Tensor
    backlog_s: Tensor


def judge(arrays: TraceArrays, rounds: Rounds, plan: OraclePlan, profile: Profile) -> Regret:
    """Compare rounds with the oracle's plan.

    A round that took c seconds from anchor t to t' loses c + V(t') - V(t). Summed over a text the V's cancel, so that the
    losses add up to the seconds by which the policy is slower than the oracle.
    """
    sequence = rounds.sequence
    at = rounds.anchor - arrays.first_anchor[sequence]
    best = plan.steps[sequence, at]
    left = arrays.text_tokens[sequence] - rounds.anchor
    reached = torch.minimum(torch.minimum(arrays.accepted[arrays.offset[sequence] + at], best) + 1, left)
    bare = rounds.bare_seconds(plan.profile)
    choice = bare + plan.value[sequence, at + rounds.committed] - plan.value[sequence, at]
    decision = rounds.decision_seconds(profile)
    early = rounds.committed < reached
    late = ~early & (choice > SAME_S) & ((rounds.steps > best) | (rounds.verified > best))
    return Regret(best, early, late, choice, decision, rounds.price(profile) - decision - bare)


def batch_bound(arrays: TraceArrays, profile: Profile, batch: int) -> Tensor:
    """Return [S] float64 seconds of each text, with the least sum in which `batch` streams could decode all of them.

    Streams of a batch share the cost of their rounds, so that the best plan is not a shortest path of each text. But for any
    price l of a token, and any round of s streams that sends n tokens,

        verify(s, n) >= s a + l n,   a = min over s' <= batch and n' of (verify(s', n') - l n') / s'

    and a draft step of m streams costs at least m times the smallest share of any such step. The oracle therefore needs at
    least what every text needs alone at these prices, which is the shortest path of `oracle_plan`. Every price gives a
    bound, and the highest one is returned. No policy is faster; the bound may be out of reach.

    Args:
        arrays: a dense trace of chains.
        profile: with batches, unless `batch` is 1.
        batch: number of streams.
    """
    if batch == 1 or profile.batch is None:
        return oracle_seconds(arrays, profile)
    last = float((arrays.prompt_tokens + arrays.text_tokens).max())
    # The smallest of costs that are linear in the context is concave: a line between the ends of all contexts is below it.
    contexts = min(profile.batch.low.context, 1.0), max(profile.batch.high.context, last)
    depth = min(arrays.depth, profile.max_depth)
    # Verifications can be cheapest only where their costs have a corner.
    corners, most = {n for points in profile.batch.low.verify_s.values() for n, _ in points}, batch * (depth + 1)
    tokens = np.array(sorted({n for n in corners if n <= most} | set(range(1, batch + 1)) | {most}))
    # The prices to try: 0, and the slopes from plain decoding to every larger verification.
    middle, larger = 0.5 * sum(contexts), tokens[tokens > batch]
    rises = profile.verify_s(batch, larger, middle) - profile.verify_s(batch, batch, middle)
    prices = sorted({0.0, *np.maximum(rises / (larger - batch), 0.0).tolist()})
    shares = [_stream_shares(profile, batch, tokens, price, contexts, depth) for price in prices]
    bounds = [oracle_seconds(arrays, one) for one in shares if one is not None]
    return max(bounds, key=lambda seconds: float(seconds.sum()))


def _stream_shares(
    profile: Profile, batch: int, tokens: Array, price: float, contexts: tuple[float, float], depth: int
) -> Profile | None:
    """Return the least costs of a round for one stream, see `batch_bound`; None if a verification would cost nothing."""
    streams = np.arange(1, batch + 1)
    possible = tokens[None] >= streams[:, None]  # each stream sends at least its anchor

    def table(context: float) -> CostTable | None:
        verify = profile.verify_s(streams[:, None], tokens[None], context) - price * tokens[None]
        share = float(np.where(possible, verify / streams[:, None], np.inf).min())
        if share + price <= 0.0:
            return None
        first, later = (
            float((step_s(streams, context) / streams).min()) for step_s in (profile.first_draft_s, profile.draft_s)
        )
        sent = tuple(max(share + price * (n + 1), MIN_CALL_S) for n in range(depth + 1))
        return CostTable(context, (first, first), 0.0, sent, later)  # reading a backlog is free

    low, high = (table(context) for context in contexts)
    return Profile(low, high, 0.0, 0.0, profile.prefill_s) if low and high else None
