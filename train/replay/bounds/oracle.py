"""What no policy can beat: the oracle bound, a shortest path over anchors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ....policies.profile import Profile
from ..seconds import prompt_seconds, round_seconds
from ..traces.arrays import TraceArrays

SAME_S = 1e-12
"""Seconds below which two plans are equally good: sums of the same numbers in another order."""


@dataclass(frozen=True)
class Ideal:
    """What someone who knows every accepted length would do.

    Attributes:
        value: [S, L] float64 seconds from the anchor first + t to the end of the text, t = 0, 1, ...; 0 beyond it.
        steps: [S, L] how deep it drafts there, the shallowest of equally good plans.
        seconds: [S] of whole texts, prompts included: the oracle bound.
        profile: that its rounds are priced with: the given one, no first step more expensive than one that reads two tokens.
    """

    value: Tensor
    steps: Tensor
    seconds: Tensor
    profile: Profile


def oracle_plan(arrays: TraceArrays, profile: Profile) -> Ideal:
    """Return how someone who knows every accepted length would decode each text in the least seconds.

        V(t) = min over 0 <= k <= K of cost(k) + V(t + min(A_t, k) + 1)

    `cost` is the running minimum from above (more may be verified where that is cheaper), without decisions and without a
    backlog of more than one token, so no policy is below it. In a tree it is that of drafting and verifying one path, as a
    chain where that costs less.
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
    path = (k.flatten() == sent) & (sent <= cheap.max_depth)  # which may be drafted as a chain, too
    for t in range(longest - 1, -1, -1):
        row = torch.minimum(arrays.offset + t, arrays.offset + arrays.rows - 1)
        context = (arrays.prompt_tokens + arrays.first_anchor + t).repeat_interleave(options)
        cost = round_seconds(cheap, context, k.flatten(), sent, one, fed=fed)
        if fed is not None:
            chains = round_seconds(cheap, context[path], sent[path], sent[path], one[path])
            cost[path] = torch.minimum(cost[path], chains)
        cost = cost.view(streams, -1)
        if fed is None:
            # More tokens may be cheaper to verify: who drafts k need pay no more than the cheapest larger round costs.
            cost = cost.flip(1).cummin(1).values.flip(1)
        reached = t + torch.minimum(arrays.accepted[row][:, None], k) + 1
        total = cost + value.gather(1, torch.minimum(reached, length[:, None].clamp_min(0)))
        least = total.min(1).values
        first = (total <= least[:, None] + SAME_S).int().argmax(1)  # argmax: the first, the shallowest
        value[:, t] = torch.where(t < length, least, 0.0)
        chosen[:, t] = torch.where(t < length, steps[first], 0)
    return Ideal(value, chosen, value[:, 0] + prompt_seconds(profile, arrays.prompt_tokens), cheap)


def oracle_seconds(arrays: TraceArrays, profile: Profile) -> Tensor:
    """Return [S], the least seconds in which anyone could decode each text: the bound of `oracle_plan`."""
    return oracle_plan(arrays, profile).seconds


def _sizes(arrays: TraceArrays, profile: Profile) -> tuple[Tensor, Tensor]:
    """Return [M] draft steps and [M] tokens verified: of trees, also every larger verification that may be cheaper."""
    if arrays.tree.is_chain:  # nobody drafts beyond what was timed
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
    """Return the profile with no first step more expensive than one that reads two tokens: noise can turn them round."""
    low, high = (
        dataclasses.replace(table, draft_s=(min(table.draft_s), table.draft_s[1]))
        for table in (profile.low, profile.high)
    )
    return dataclasses.replace(profile, low=low, high=high)
