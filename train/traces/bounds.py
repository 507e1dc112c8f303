"""What no policy can beat: the clairvoyant bound, a shortest path over anchors."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...policies.costs import Profile
from .data import TraceArrays


def clairvoyant_seconds(arrays: TraceArrays, profile: Profile) -> Tensor:
    """Return [S], the least seconds in which anyone who knows every accepted length could decode each text.

        V(t) = min over 0 <= k <= K of cost(k) + V(t + min(A_t, k) + 1)

    `cost` is the running minimum from above (more may be verified where that is cheaper), without decisions and without a
    backlog of more than one token, so no policy is below it. In a tree it is that of drafting and verifying one path.
    """
    profile = _cheapest_steps(profile)
    offset = arrays.offset
    length = arrays.text_tokens - arrays.first_anchor  # tokens that rounds must commit
    longest = int(length.max())
    streams = arrays.sequences
    value = torch.zeros(streams, longest + arrays.depth + 2, dtype=torch.float64)
    steps, verified = _sizes(arrays, profile)
    cells = streams * len(steps)
    k = steps.expand(streams, -1)
    fed = None if arrays.tree.is_chain else (torch.arange(arrays.depth) < steps[:, None]).long().repeat(streams, 1)
    one = torch.ones(cells, dtype=torch.int64)
    for t in range(longest - 1, -1, -1):
        row = torch.minimum(offset + t, offset + arrays.rows - 1)
        context = (arrays.prompt_tokens + arrays.first_anchor + t).repeat_interleave(len(steps))
        sent = verified.repeat(streams)
        cost = profile.round_seconds(context, k.flatten(), sent, one, 0 * one, 0.0, fed).view(streams, -1)
        if fed is None:
            cost = cost.flip(1).cummin(1).values.flip(1)
        reached = t + torch.minimum(arrays.accepted[row][:, None], k) + 1
        total = cost + value.gather(1, torch.minimum(reached, length[:, None].clamp_min(0)))
        value[:, t] = torch.where(t < length, total.min(1).values, 0.0)
    return value[:, 0] + profile.prefill_seconds(arrays.prompt_tokens)


def _sizes(arrays: TraceArrays, profile: Profile) -> tuple[Tensor, Tensor]:
    """Return [M] draft steps and [M] tokens verified: of trees, also every larger verification that may be cheaper."""
    k = torch.arange(arrays.depth + 1)
    if arrays.tree.is_chain:
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


def optimal_acceptance(p: Tensor, q: Tensor, candidates: int) -> Tensor:
    """Return [...], the largest chance that any verification accepts one of several independent candidates.

        alpha = min over sets H of tokens of p(H) + 1 - q(H)^n

    (Optimal transport with several drafts, arXiv 2502.18779.) The best set is a prefix of the tokens in falling order of
    q / p. This is the ceiling of what n candidates drawn with replacement can bring.

    Args:
        p, q: [..., V] target's and draft's probabilities.
        candidates: n.
    """
    ratio = torch.where(p > 0, q / p, torch.where(q > 0, torch.inf, 0.0))
    order = ratio.argsort(-1, descending=True)
    inside_p, inside_q = (values.gather(-1, order).cumsum(-1) for values in (p, q))
    alpha = (inside_p + 1.0 - inside_q.clamp_max(1.0) ** candidates).amin(-1)
    return alpha.clamp(0.0, 1.0)


def _cheapest_steps(profile: Profile) -> Profile:
    """Return the profile with no first step dearer than one that reads two tokens: noise can turn them round."""
    low, high = (
        dataclasses.replace(
            table, draft_s=(min(table.draft_s), table.draft_s[1]), tree_draft_s=_least_first(table.tree_draft_s)
        )
        for table in (profile.low, profile.high)
    )
    return dataclasses.replace(profile, low=low, high=high)


def _least_first(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """Return the points with none below the first one: a bound reads one row a step."""
    least = min((seconds for _, seconds in points), default=0.0)
    return tuple((rows, least if at == 0 else seconds) for at, (rows, seconds) in enumerate(points))
