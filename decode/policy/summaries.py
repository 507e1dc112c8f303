"""Row summaries of logits, wherever they lie: by the compiled kernel on the host, by `on_device` elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...policies.features import Columns, DrawnTokens, Needs, RowSummary, summarise as summarise_arrays
from ...policies.typing import Array
from .on_device import on_device


def summarise(
    needs: Needs,
    logits: Tensor,
    drawn: DrawnTokens,
    temperature: float,
    sampled: Tensor | None = None,
    scores: Tensor | None = None,
    best: Sequence[Sequence[float]] | Tensor | None = None,
) -> RowSummary:
    """Return the summary of rows of logits [R, V] for these features; see `policies.features.summarise`.

    Args:
        needs, logits, drawn, temperature, sampled, scores: as there.
        best: [R, m] the largest scores in falling order, where they are known.

    Raises:
        PolicyError: noisy scores are needed, and there are none.
    """
    arrays = _arrays(needs, logits, sampled, scores, best)
    if arrays is None:
        return on_device(needs, logits, drawn, temperature, sampled, scores, _ranked(needs, best))
    rows, shaped, noisy, ranked = arrays
    return summarise_arrays(needs, rows, drawn, temperature, shaped, noisy, ranked)


def read_columns(
    columns: Columns,
    logits: Tensor,
    drawn: DrawnTokens,
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
    arrays = _arrays(columns.needs, logits, sampled, scores, best)
    if arrays is None:
        ranked = _ranked(columns.needs, best)
        summary = on_device(columns.needs, logits, drawn, temperature, sampled, scores, ranked)
        columns.write(summary, drawn, temperature, out)
        return summary.path
    rows, *others = arrays
    return columns.read(rows, drawn, temperature, out, *others)


def _arrays(
    needs: Needs,
    logits: Tensor,
    sampled: Tensor | None,
    scores: Tensor | None,
    best: Sequence[Sequence[float]] | Tensor | None,
) -> tuple[Array, Array | None, Array | None, Array | None] | None:
    """Return logits on the host, sampled, scores and best as arrays, as far as they are wanted; None on a device."""
    if not logits.is_cpu:
        return None
    rows = _array(logits)
    shaped = None if sampled is None or not needs.sampled else _array(sampled)
    if not needs.noisy:
        return rows, shaped, None, None
    # The very same array where scores are the logits: then one ranking serves both (`features.summary.wanted`).
    noisy = None if scores is None else rows if scores is logits else _array(scores)
    return rows, shaped, noisy, _ranked(needs, best)


def _ranked(needs: Needs, best: Sequence[Sequence[float]] | Tensor | None) -> Array | None:
    if best is None or not needs.noisy:
        return None
    return _array(best) if isinstance(best, Tensor) else np.array(best, dtype=np.float32)


def lead_over_truncated(untruncated: Tensor, sampled: Tensor, drawn: DrawnTokens) -> Array:
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
