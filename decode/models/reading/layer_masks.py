"""Masks as a model reads them: in the form of its attention backend, and of each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = (FULL, SLIDING, CHUNKED)
"""Layers whose masks are made here, as `layer_types` of a configuration calls them."""


def backend_mask(mask: Tensor, model: PreTrainedModel) -> Tensor:
    """Return the boolean mask [..., query, key] in the form that the model's attention backend reads correctly.

    That is numbers for sdpa too, which would make them of a boolean one in every layer (measured: 3 to 4% of a small model's
    call). Half of the lowest: kernels multiply by log2 e, and infinite it leaves NaN where nothing of some keys is seen.
    """
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=model.dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(model.dtype).min / 2)


@dataclass(frozen=True)
class LayerMasks:
    """What layers of each kind see of what a causal mask lets them see.

    Attributes:
        window: tokens that sliding-window layers see.
        chunk: tokens of a chunk, within which layers of chunked attention see.
        kinds: of `KINDS`, that the model has.
    """

    window: int
    chunk: int
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerMasks | None:
        """Return those of a model; None where all its layers see everything."""
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or [])
        window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        if window is None or (kinds and SLIDING not in kinds):
            kinds.discard(SLIDING)
        elif not kinds:
            kinds = {SLIDING}
        if chunk is None:
            kinds.discard(CHUNKED)
        known = tuple(kind for kind in KINDS if kind in kinds)
        return None if known in ((), (FULL,)) else cls(int(window or 0), int(chunk or 0), known)

    def cut(self, mask: Tensor, positions: Tensor, position_at: Tensor, model: PreTrainedModel) -> Any:
        """Return the mask of the backend, one for each kind if there are several.

        Args:
            mask: [B, 1, n, slots] bool.
            positions: [B, n] of the queries; `position_at` [B, slots] those in the slots.
            model: that reads them.
        """
        query, key = positions[:, None, :, None], position_at[:, None, None]
        made = {}
        for kind in self.kinds:
            if kind == SLIDING:
                made[kind] = backend_mask(mask & (query - key < self.window), model)
            elif kind == CHUNKED:
                made[kind] = backend_mask(mask & (query // self.chunk == key // self.chunk), model)
            else:
                made[kind] = backend_mask(mask, model)
        return made if len(made) > 1 else made[self.kinds[0]]
