"""Attention masks: the form that a backend reads, windows of layers, hidden slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = (FULL, SLIDING, CHUNKED)
"""Layer types for which masks are computed here, with the names of `layer_types` in the configuration."""


def backend_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask [..., query, key] to an additive one. Boolean 4D masks are silently wrong under `eager`.

    sdpa also accepts a boolean mask, but converts it in every layer (measured: 3 to 4% of a small model's call). Masked
    entries are half of the lowest value: kernels multiply by log2(e), and an infinite value would give NaN for a query that
    sees none of the keys of a block.
    """
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min / 2)


def causal(start: int, count: int, device: torch.device) -> Tensor:
    """Return the causal mask [1, 1, n, start + n] bool of n tokens after `start` earlier ones."""
    slots = torch.arange(start + count, device=device)
    return (slots <= slots[start:, None])[None, None]


@dataclass(frozen=True)
class LayerMasks:
    """Restrictions of the mask for each layer type.

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

    def cut(self, mask: Tensor, positions: Tensor, position_at: Tensor, dtype: torch.dtype) -> Any:
        """Return the additive form of a mask [B, 1, n, slots] bool, as a dictionary by layer type if there are several.

        Windows count positions of queries [B, n] and keys [B, slots], which differ from slots for the candidates of a tree.
        """
        query, key = positions[:, None, :, None], position_at[:, None, None]
        masks = {}
        for kind in self.kinds:
            restricted = mask
            if kind == SLIDING:
                restricted = mask & (query - key < self.window)
            elif kind == CHUNKED:
                restricted = mask & (query // self.chunk == key // self.chunk)
            masks[kind] = backend_mask(restricted, dtype)
        return masks if len(masks) > 1 else masks[self.kinds[0]]


@dataclass
class SlotLayouts:
    """Hidden slots and shifted positions of the texts that have them.

    In all other texts, later tokens see every slot and the position of a token equals its slot.

    Attributes:
        by_stream: For each such stream [n] bool, True for the first n slots that later tokens do not see, and [D] int64,
            position minus slot of later tokens. D > 1 if a position has several coordinates.
    """

    by_stream: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def hide(self, mask: Tensor, first: int = 0) -> None:
        """Mask the hidden slots in a mask [B, 1, n, slots] bool of the streams from `first` on, in place."""
        for stream, (hidden, _) in self.by_stream.items():
            if 0 <= stream - first < len(mask):
                mask[stream - first, ..., : len(hidden)] &= ~hidden[: mask.shape[-1]]

    def positions(self, positions: Tensor, stream: Tensor) -> Tensor:
        """Return positions [1, n] or [D, 1, n] of tokens with positions [1, n] in their streams [n]."""
        if not self.by_stream:
            return positions
        depth = max(len(offset) for _, offset in self.by_stream.values())
        offsets = positions.new_zeros(depth, 1, positions.shape[1])
        for number, (_, offset) in self.by_stream.items():
            offsets += offset[:, None, None] * (stream == number)
        return positions + offsets[0] if depth == 1 else positions[None] + offsets
