"""Row summaries of logits, wherever they lie: the compiled kernel on the host, torch operations on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...policies.errors import PolicyError
from ...policies.features import TOP, Columns, Drawn, Plan, Summary, summarise as summarise_arrays
from ...policies.features.summary import NO_SCORES, Array
from ..models.cuda.fused import fused
from ..models.cuda.transfer import upload

LEAST = -87.0
"""As in `kernels.rows`: what a masked token counts as below the largest."""


def summarise(
    plan: Plan,
    logits: Tensor,
    drawn: Drawn,
    temperature: float,
    sampled: Tensor | None = None,
    scores: Tensor | None = None,
    best: Sequence[Sequence[float]] | Tensor | None = None,
) -> Summary:
    """Return the summary of rows of logits [R, V] for these features; see `policies.features.summarise`.

    Args:
        plan, logits, drawn, temperature, sampled, scores: as there.
        best: [R, m] the largest scores in falling order, where they are known.

    Raises:
        PolicyError: noisy scores are needed, and there are none.
    """
    arrays = _arrays(plan, logits, sampled, scores, best)
    if arrays is None:
        return on_device(plan, logits, drawn, temperature, sampled, scores, _ranked(plan, best))
    rows, *others = arrays
    return summarise_arrays(plan, rows, drawn, temperature, *others)


def read_columns(
    columns: Columns,
    logits: Tensor,
    drawn: Drawn,
    temperature: float,
    out: Array,
    sampled: Tensor | None = None,
    scores: Tensor | None = None,
    best: Sequence[Sequence[float]] | Tensor | None = None,
) -> Array:
    """Write the columns of drawn tokens to `out` [B, .] float32; return the log-probability of each path (`Columns.read`).

    Args:
        columns: of the features.
        logits, drawn, temperature, sampled, scores, best: see `summarise`.

    Raises:
        PolicyError: noisy scores are needed, and there are none.
    """
    arrays = _arrays(columns.plan, logits, sampled, scores, best)
    if arrays is None:
        ranked = _ranked(columns.plan, best)
        summary = on_device(columns.plan, logits, drawn, temperature, sampled, scores, ranked)
        columns.write(summary, drawn, temperature, out)
        return summary.path
    rows, *others = arrays
    return columns.read(rows, drawn, temperature, out, *others)


def _arrays(
    plan: Plan,
    logits: Tensor,
    sampled: Tensor | None,
    scores: Tensor | None,
    best: Sequence[Sequence[float]] | Tensor | None,
) -> tuple[Array, Array | None, Array | None, Array | None] | None:
    """Return logits on the host, sampled, scores and best as arrays, as far as they are wanted; None on a device."""
    if not logits.is_cpu:
        return None
    rows = _array(logits)
    shaped = None if sampled is None or not plan.sampled else _array(sampled)
    if not plan.noisy:
        return rows, shaped, None, None
    # The very same array where scores are the logits: then one ranking serves both (`features.summary.wanted`).
    noisy = None if scores is None else rows if scores is logits else _array(scores)
    return rows, shaped, noisy, _ranked(plan, best)


def _ranked(plan: Plan, best: Sequence[Sequence[float]] | Tensor | None) -> Array | None:
    if best is None or not plan.noisy:
        return None
    return _array(best) if isinstance(best, Tensor) else np.array(best, dtype=np.float32)


def lead_over_truncated(untruncated: Tensor, sampled: Tensor, drawn: Drawn) -> Array:
    """Return [B] float64, the lead of each drawn token over the likeliest token that was left out; infinite where none was.

    Args:
        untruncated: [R, V] log-weights before tokens were left out for being unlikely.
        sampled: [R, V] after it, -inf where a token was left out.
    """
    best = untruncated.masked_fill(sampled > -torch.inf, -torch.inf).amax(-1)  # [R], -inf where none was left out
    ids = torch.from_numpy(drawn.ids).to(sampled.device)
    lead: Array = (untruncated[ids[:, 0], ids[:, 1]] - best[ids[:, 0]]).double().cpu().numpy()
    return lead


def _array(values: Tensor) -> Array:
    """Return a tensor as float32 numbers in one piece on the host; without a copy where it is that already."""
    if values.dtype is not torch.float32 or not values.is_contiguous() or values.requires_grad:
        values = values.detach().float().cpu().contiguous()
    array: Array = values.numpy()
    return array


@fused
def _spread(rows: Tensor, weights: Tensor, owner: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Return [R, 2] what sums and entropies rows have, and [B, 2] the log-probabilities of tokens [B] of rows `owner` [B].

    Args:
        rows: [R, V] raw logits.
        weights: [R, V] those of the distribution which is sampled from.
    """
    # With d = logit - largest and Z = sum of e^d: log Z, and the entropy log Z - sum of e^d d / Z.
    below = (rows - rows.amax(-1, keepdim=True)).clamp_min(LEAST)
    weight = below.exp()
    total = weight.sum(-1)
    entropy = total.log() - (weight * below).sum(-1) / total
    # A token that is masked has probability 0, whatever it counts as in the sums.
    plain = rows[owner, token] - (rows.amax(-1) + total.log())[owner]
    shaped = weights[owner, token] - weights.logsumexp(-1)[owner]
    return torch.stack([total.log(), entropy.clamp_min(0.0)], -1), torch.stack([plain, shaped], -1)


def on_device(
    plan: Plan,
    logits: Tensor,
    drawn: Drawn,
    temperature: float,
    sampled: Tensor | None = None,
    scores: Tensor | None = None,
    best: Array | None = None,
) -> Summary:
    """Return the summary of rows that lie on a device: a few operations there, and one copy to the host."""
    rows, count = logits.float(), len(logits)
    # The largest alone is had in a pass; ten take a sort.
    top = rows.topk(min(TOP, rows.shape[-1]), -1).values if plan.ranks > 1 else rows.amax(-1, keepdim=True)
    found, numbers = rows.new_zeros(count, 2), rows.new_zeros(len(drawn.ids), 2)
    if plan.spread:
        weights = rows
        if plan.sampled and (sampled is not None or temperature not in (0.0, 1.0)):
            weights = rows / temperature if sampled is None else sampled.float()
        owner, token = upload(drawn.ids, logits.device)[:, :2].unbind(-1)
        found, numbers = _spread(rows, weights, owner, token)
    noisy = rows.new_zeros(count, 0)
    if plan.noisy and best is None:
        if scores is None:
            raise PolicyError(NO_SCORES)
        # One more than the most siblings: margins are to the best score that was not drawn.
        width = min(max(int(drawn.ids[:, 4].max()) + 1, 2), scores.shape[-1])
        noisy = scores.float().topk(width, -1).values
    packed = torch.cat([part.flatten() for part in (top, found, noisy, numbers)]).cpu().numpy()
    parts = np.split(packed, np.cumsum([part.numel() for part in (top, found, noisy)]))
    ranked = np.full((count, TOP), -np.inf, dtype=np.float32)
    ranked[:, : top.shape[1]] = parts[0].reshape(count, -1)
    if best is None:
        best = np.full((count, max(noisy.shape[1], 2)), -np.inf, dtype=np.float32)
        best[:, : noisy.shape[1]] = parts[2].reshape(count, -1)
    logprob = parts[3].reshape(-1, 2).astype(np.float64)
    path = logprob[:, :1] if drawn.parent_path is None else logprob[:, :1] + drawn.parent_path[:, None]
    lead = np.full_like(path, np.inf) if drawn.lead is None else drawn.lead[:, None]
    packed_numbers = np.concatenate([logprob, path, lead], 1)
    return Summary(ranked, parts[1].reshape(count, 2).astype(np.float64), best, packed_numbers)
