"""Attention of grouped queries behind a mask, without copying keys and values once for each query head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

NAME = "specstop_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return [B, n, heads, width]: the queries that share a key head are rows of one attention.

    Under a mask CUDA has no kernel for grouped queries, so the library repeats keys and values, the whole cache of them in
    every layer (eight heads for 32: four times the bytes).

    Args:
        module: the layer.
        query: [B, heads, n, width].
        key, value: [B, groups, slots, width].
        attention_mask: [1 or B, 1, n, slots] additive, or None: all is seen.
        scaling: of the scores.
        kwargs: of other backends, without effect.
    """
    batch, heads, count, width = query.shape
    rows = query.reshape(batch, key.shape[1], -1, width)
    if attention_mask is not None and count > 1:
        attention_mask = attention_mask.repeat(1, 1, rows.shape[2] // count, 1)
    out = functional.scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
    return out.reshape(batch, heads, count, -1).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def attending_grouped(model: PreTrainedModel) -> Iterator[None]:
    """Have a model that attends by `sdpa` attend so; its masks must be four-dimensional and additive."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if before != "sdpa":
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


AttentionInterface.register(NAME, grouped_attention)
