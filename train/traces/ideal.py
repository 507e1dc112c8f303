"""The clairvoyant's plan at every anchor: seconds still to go, and how deep it would draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...policies.costs import Profile
from .bounds import _cheapest_steps, _sizes
from .data import TraceArrays
from .metered import Rounds

_SAME_S = 1e-12
"""Seconds below which two plans are equally good: sums of the same numbers in another order."""


@dataclass(frozen=True)
class Ideal:
    """What someone who knows every accepted length would do.

    Attributes:
        value: [S, L] float64 seconds from the anchor first + t to the end of the text, t = 0, 1, ...; 0 beyond it.
        steps: [S, L] how deep it drafts there, the shallowest of equally good plans.
        seconds: [S] of whole texts, prompts included: the clairvoyant bound.
        profile: that its rounds are priced with: the given one, no first step dearer than one that reads two tokens.
    """

    value: Tensor
    steps: Tensor
    seconds: Tensor
    profile: Profile


def clairvoyant_plan(arrays: TraceArrays, profile: Profile) -> Ideal:
    """Return the plan behind `clairvoyant_seconds`, by the same recursion.

    V(t) = min over 0 <= k <= K of cost(k) + V(t + min(A_t, k) + 1)
    """
    cheap = _cheapest_steps(profile)
    length = arrays.text_tokens - arrays.first_anchor
    longest = int(length.max())
    steps, verified = _sizes(arrays, cheap)
    streams, options = arrays.sequences, len(steps)
    value = torch.zeros(streams, longest + arrays.depth + 2, dtype=torch.float64)
    chosen = torch.zeros(streams, longest + 1, dtype=torch.int64)
    k, sent = steps.expand(streams, -1), verified.repeat(streams)
    fed = None if arrays.tree.is_chain else (torch.arange(arrays.depth) < steps[:, None]).long().repeat(streams, 1)
    one = torch.ones(streams * options, dtype=torch.int64)
    for t in range(longest - 1, -1, -1):
        row = torch.minimum(arrays.offset + t, arrays.offset + arrays.rows - 1)
        context = (arrays.prompt_tokens + arrays.first_anchor + t).repeat_interleave(options)
        cost = cheap.round_seconds(context, k.flatten(), sent, one, 0 * one, 0.0, fed).view(streams, -1)
        if fed is None:
            cost = cost.flip(1).cummin(1).values.flip(1)
        reached = t + torch.minimum(arrays.accepted[row][:, None], k) + 1
        total = cost + value.gather(1, torch.minimum(reached, length[:, None].clamp_min(0)))
        least = total.min(1).values
        first = (total <= least[:, None] + _SAME_S).int().argmax(1)
        value[:, t] = torch.where(t < length, least, 0.0)
        chosen[:, t] = torch.where(t < length, steps[first], 0)
    return Ideal(value, chosen, value[:, 0] + profile.prefill_seconds(arrays.prompt_tokens), cheap)


@dataclass(frozen=True)
class Verdicts:
    """What each round lost against the clairvoyant going on from the same anchor; all [R].

    Attributes:
        ideal: how deep the clairvoyant would have drafted.
        early: bool, committed less than the ideal round.
        late: bool, drafted or sent more than it for nothing.
        choice_s: seconds lost by where the policy stopped, what the rest of the text costs included.
        decision_s: seconds of decisions.
        backlog_s: seconds of reading tokens that the draft had not read, which the bound leaves out.
    """

    ideal: Tensor
    early: Tensor
    late: Tensor
    choice_s: Tensor
    decision_s: Tensor
    backlog_s: Tensor


def judge(arrays: TraceArrays, rounds: Rounds, ideal: Ideal, profile: Profile) -> Verdicts:
    """Compare rounds with the clairvoyant's.

    A round that took c seconds from t to t' loses c + V(t') - V(t). Summed over a text the V's cancel, so that the losses
    add up to exactly the seconds by which the policy is slower than the clairvoyant.
    """
    sequence = rounds.sequence
    at = rounds.anchor - arrays.first_anchor[sequence]
    left = arrays.text_tokens[sequence] - rounds.anchor
    best = ideal.steps[sequence, at]
    committed = torch.minimum(rounds.accepted + 1, left)
    reach = torch.minimum(torch.minimum(arrays.accepted[arrays.offset[sequence] + at], best) + 1, left)
    bare = rounds.bare_seconds(ideal.profile)
    choice = bare + ideal.value[sequence, at + committed] - ideal.value[sequence, at]
    decided = rounds.decision_seconds(profile)
    early = committed < reach
    late = ~early & (choice > _SAME_S) & ((rounds.steps > best) | (rounds.verified > best))
    return Verdicts(best, early, late, choice, decided, rounds.seconds(profile) - decided - bare)
