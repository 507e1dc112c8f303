"""What no policy can beat: the clairvoyant bound, a shortest path over anchors."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..policies.costs import Profile
from .data import TraceArrays


def clairvoyant_seconds(arrays: TraceArrays, profile: Profile) -> Tensor:
    """Return [S], the least seconds in which anyone who knows every accepted length could decode each text.

        V(t) = min over 0 <= k <= K of cost(k) + V(t + min(A_t, k) + 1)

    `cost` is the running minimum from above (a verification may be padded to a cheaper size), without decisions and
    without a backlog of more than one token, so no policy is below it.
    """
    profile = _cheapest_steps(profile)
    offset = arrays.offset
    length = arrays.text_tokens - arrays.first_anchor  # tokens that rounds must commit
    longest = int(length.max())
    streams = arrays.sequences
    value = torch.zeros(streams, longest + arrays.depth + 2, dtype=torch.float64)
    k = torch.arange(arrays.depth + 1)[None].expand(streams, -1)
    one = torch.ones_like(k)
    for t in range(longest - 1, -1, -1):
        row = torch.minimum(offset + t, offset + arrays.rows - 1)
        context = (arrays.prompt_tokens + arrays.first_anchor + t)[:, None] * one
        cost = profile.round_seconds(
            context.flatten(), k.flatten(), k.flatten(), one.flatten(), 0 * k.flatten(), 0.0
        ).view(streams, -1)
        cost = cost.flip(1).cummin(1).values.flip(1)
        reached = t + torch.minimum(arrays.accepted[row][:, None], k) + 1
        total = cost + value.gather(1, torch.minimum(reached, length[:, None].clamp_min(0)))
        value[:, t] = torch.where(t < length, total.min(1).values, 0.0)
    return value[:, 0] + profile.prefill_seconds(arrays.prompt_tokens)


def _cheapest_steps(profile: Profile) -> Profile:
    """Return the profile with no first step dearer than one that reads two tokens: noise can turn them round."""
    low, high = (
        dataclasses.replace(table, draft_s=(min(table.draft_s), table.draft_s[1]))
        for table in (profile.low, profile.high)
    )
    return dataclasses.replace(profile, low=low, high=high)
