"""Attention masks in the form that a model expects: by attention backend and by layer type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = (FULL, SLIDING, CHUNKED)
"""Layer types for which masks are computed here, with the names of `layer_types` in the configuration."""


def backend_mask(mask: Tensor, model: PreTrainedModel) -> Tensor:
    """Convert the boolean mask [..., query, key] to an additive mask. Return other masks unchanged.

    sdpa also accepts a boolean mask, but converts it in every layer (measured: 3 to 4% of a small model's call). Masked
    entries are half of the lowest value: kernels multiply by log2(e), and an infinite value would give NaN for a query that
    sees none of the keys of a block.
    """
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=model.dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(model.dtype).min / 2)


@dataclass(frozen=True)
class LayerMasks:
    """Restrictions of the causal mask for each layer type.

    Attributes:
        window: Size in tokens of the sliding window.
        chunk: Size in tokens of a chunk of chunked attention.
        kinds: Layer types of the model, a subset of `KINDS`.
    """

    window: int
    chunk: int
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerMasks | None:
        """Return the masks of a model; None if all its layers use full attention."""
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or [])
        window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        if window is None or (kinds and SLIDING not in kinds):
            kinds.discard(SLIDING)
        elif not kinds:
            kinds = {SLIDING}
        if chunk is None:
            kinds.discard(CHUNKED)
        supported = tuple(kind for kind in KINDS if kind in kinds)
        return None if supported in ((), (FULL,)) else cls(int(window or 0), int(chunk or 0), supported)

    def cut(self, mask: Tensor, positions: Tensor, position_at: Tensor, model: PreTrainedModel) -> Any:
        """Return the mask for the attention backend, or a dictionary by layer type if the model has several types.

        Args:
            mask: [B, 1, n, slots] bool.
            positions: [B, n] positions of the queries.
            position_at: [B, slots] positions of the keys in the slots.
            model: Model that receives the masks.
        """
        query, key = positions[:, None, :, None], position_at[:, None, None]
        masks = {}
        for kind in self.kinds:
            if kind == SLIDING:
                masks[kind] = backend_mask(mask & (query - key < self.window), model)
            elif kind == CHUNKED:
                masks[kind] = backend_mask(mask & (query // self.chunk == key // self.chunk), model)
            else:
                masks[kind] = backend_mask(mask, model)
        return masks if len(masks) > 1 else masks[self.kinds[0]]
