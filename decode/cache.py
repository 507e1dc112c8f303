"""A model with a preallocated cache: tokens go in at the end, roll-back only moves a length.

Masks are boolean, built once and sliced; they become what the attention backend reads in one place (a boolean 4D mask is
silently wrong under `eager`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer in a buffer of `capacity` slots, written in place."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for the shape, dtype and device of the first states."""
        batch, heads, _, width = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(batch, heads, self.capacity, width)
        self.values = value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states and return views of all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys' length with `query_length` more tokens, and their offset."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the slots in use."""
        return self.length

    def get_max_length(self) -> int:
        """Return the slots there are."""
        return self.capacity


def backend_mask(mask: Tensor, model: PreTrainedModel) -> Tensor:
    """Return the boolean mask [..., query, key] in the form that the model's attention backend reads correctly."""
    if model.config._attn_implementation == "sdpa":
        return mask
    zero = torch.zeros((), dtype=model.dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(model.dtype).min)


class CachedModel:
    """A causal language model and what it has read.

    Args:
        model: in evaluation mode.
        capacity: slots, a bound on the tokens in the cache at any time.
        vocabulary: width of the logits returned; a model's padding rows beyond it are dropped.
    """

    def __init__(self, model: PreTrainedModel, capacity: int, vocabulary: int) -> None:
        self.model = model
        self.capacity = capacity
        self.vocabulary = vocabulary
        self._layers = [SlotLayer(capacity) for _ in range(model.config.get_text_config().num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        causal = torch.ones(capacity, capacity, dtype=torch.bool, device=model.device).tril_()
        self._causal = backend_mask(causal, model)[None, None]
        self._positions = torch.arange(capacity, device=model.device)[None]

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._layers[0].length

    def roll_back(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        assert length <= self.length
        for layer in self._layers:
            layer.length = length

    def read(
        self, tokens: Tensor, rows: int = 0, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Append `tokens` and return logits.

        Args:
            tokens: [B, n] int64; the batch size is fixed by the first call.
            rows: how many of the last rows of logits are wanted; 0 = all n.
            mask: [1 or B, 1, n, length + n] in the backend's form; None = causal.
            positions: [1 or B, n]; None = behind what is there.

        Returns:
            [B, rows, V] float32, or float64 for a float64 model.
        """
        start, end = self.length, self.length + tokens.shape[1]
        if mask is None:
            mask = self._causal[:, :, start:end, :end]
        if positions is None:
            positions = self._positions[:, start:end]
        logits: Tensor = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=rows,
        ).logits[..., : self.vocabulary]
        return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
