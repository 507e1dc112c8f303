"""A model with a preallocated cache: tokens go in at the end, roll-back only moves a length.

Masks are boolean, built once and sliced; they become what the attention backend reads in one place (a boolean 4D mask is
silently wrong under `eager`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..topology import Topology
from .kv_cache import SlotLayer, Slots
from .transfer import upload
from .tree_masks import TreeMasks
from .wide_head import wide_head

_SLICED = 64
"""Longest run of tokens that reads a slice of the causal mask kept here; longer ones let the library build theirs."""


def backend_mask(mask: Tensor, model: PreTrainedModel) -> Tensor:
    """Return the boolean mask [..., query, key] in the form that the model's attention backend reads correctly.

    That is numbers for sdpa too, which would make them of a boolean one in every layer (measured: 3 to 4% of a small
    model's call).
    """
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=model.dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(model.dtype).min)


def token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that a token takes in the cache of a model."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


class CachedModel:
    """A causal language model and what it has read.

    Sliding-window layers keep all keys as well: their window is part of the mask, so that any roll-back is exact.

    Args:
        model: in evaluation mode.
        capacity: slots, a bound on the tokens in the cache at any time.
        vocabulary: width of the logits returned. Of a model that scores more tokens they are cut; one that knows fewer
            scores the others -inf and reads them as its first token.
        hidden: keep hidden states of each call in `states`: of these layers, as transformers counts them; True = the last.

    Attributes:
        states: [B, n, H] of the last call, if asked for; of several layers [B, n, layers x H].
    """

    def __init__(
        self, model: PreTrainedModel, capacity: int, vocabulary: int, hidden: bool | Sequence[int] = False
    ) -> None:
        self.model, self._device = model, torch.device(model.device)
        self.capacity = capacity
        self.vocabulary = vocabulary
        self.states: Tensor | None = None
        self._hidden = (-1,) if hidden is True else tuple(hidden or ())
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or [])
        # Layers of several kinds may differ in shape: then each has buffers of its own.
        self._slots = Slots(capacity, config.num_hidden_layers if len(kinds) < 2 else 1)
        self._layers = [SlotLayer(self._slots) for _ in range(config.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._lacks = max(0, vocabulary - getattr(config, "vocab_size", vocabulary))
        self._windows = window_layers(model)
        # Told nothing, sdpa has a faster kernel for a single token and for a prompt on a GPU: no mask is read.
        fast = model.device.type != "cpu" and model.config._attn_implementation == "sdpa" and self._windows is None
        self._maskless = fast or (getattr(model, "takes_no_mask", False) and self._windows is None)
        self._maskless_prompt = fast
        self._wide = wide_head(model)
        self._causal = self._behind_prefix(torch.ones(_SLICED, _SLICED, dtype=torch.bool, device=model.device).tril_())
        self._trees: dict[Topology, TreeMasks] = {}  # by identity
        self._positions = torch.arange(capacity, device=model.device)[None]
        self._position_at = torch.zeros(1, capacity, dtype=torch.int64, device=model.device)  # by slot

    def _behind_prefix(self, mask: Tensor) -> Tensor:
        """Return [1, 1, n, capacity + n]: `mask` [n, n] behind a prefix that all see. A slice of it serves any length."""
        prefix = torch.ones(len(mask), self.capacity, dtype=torch.bool, device=mask.device)
        full = torch.cat([prefix, mask], 1)[None, None].to(self.model.device)
        return full if self._windows else backend_mask(full, self.model)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._layers[0].length

    def roll_back(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        assert length <= self.length
        for layer in self._layers:
            layer.length = length

    def prepare(self, calls: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Do once what the first calls of (tokens, rows) behind texts of these lengths would have to do."""

    def keep(self, base: int, slots: Sequence[int]) -> None:
        """Forget all tokens after the first `base` but those in `slots`, rising, which move up to it in place."""
        fixed = 0
        while fixed < len(slots) and slots[fixed] == base + fixed:
            fixed += 1
        if fixed < len(slots):
            moved = list(slots[fixed:])
            self._slots.move(moved, base + fixed)
            if self._windows:
                self._position_at[:, base + fixed : base + len(slots)] = self._position_at[:, moved]
        self.roll_back(base + len(slots))

    def read(
        self, tokens: Tensor, rows: int = 0, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Append `tokens` and return logits.

        Args:
            tokens: [B, n] int64; the batch size is fixed by the first call.
            rows: how many of the last rows of logits are wanted; 0 = all n.
            mask: [1 or B, 1, n, length + n], boolean or in the backend's form; None = causal.
            positions: [1 or B, n]; None = behind what is there.

        Returns:
            [B, rows, V] float32, or float64 for a float64 model.
        """
        start, count = self.length, tokens.shape[1]
        end = start + count
        alone = (self._maskless and count == 1) or (self._maskless_prompt and start == 0)
        if mask is None and count <= _SLICED and not alone:
            mask = self._causal[:, :, :count, self.capacity - start : self.capacity + count]
        if positions is None:
            positions = self._positions[:, start:end]
        if self._windows:
            if len(self._position_at) < len(positions):
                self._position_at = self._position_at.repeat(len(positions), 1)
            self._position_at[:, start:end] = positions
        mask = self._by_layer(mask, positions, end)
        logits, self.states = self._run(self._known(tokens), mask, positions, rows)
        return logits

    def _known(self, tokens: Tensor) -> Tensor:
        """Return the tokens as the model can read them."""
        return tokens.masked_fill(tokens >= self.vocabulary - self._lacks, 0) if self._lacks else tokens

    def _run(self, tokens: Tensor, mask: Any, positions: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
        """Return the scores of the last `rows` [B, rows, V] and, if they are kept, the last hidden states."""
        with self._wide:
            out = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=rows,
                **({"output_hidden_states": True} if self._hidden else {}),
            )
        states = None
        if self._hidden:
            layers = [out.hidden_states[layer] for layer in self._hidden]
            states = layers[0] if len(layers) == 1 else torch.cat(layers, -1)
        return self._scores(out.logits, rows or tokens.shape[1]), states

    def _scores(self, logits: Tensor, rows: int) -> Tensor:
        """Return the last `rows` of a model's logits [B, rows, V] in the precision that is computed with."""
        if (
            logits.shape[1] > rows or logits.shape[2] > self.vocabulary
        ):  # some models return all rows whatever they are told
            logits = logits[:, -rows:, : self.vocabulary]
        logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        return functional.pad(logits, (0, self._lacks), value=-math.inf) if self._lacks else logits

    def read_tree(
        self, tokens: Sequence[int], base: int, topology: Topology, before: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        """Append the tokens of some rows of a tree and return their logits [1, n, V].

        Args:
            tokens: n.
            base: length of the committed text; the tree's tokens lie in the slots behind it.
            topology: of the tree.
            before: rows of the tree that are in the cache, by slot.
            rows: n rows to append.
        """
        if topology not in self._trees:
            self._trees[topology] = TreeMasks(topology, self.capacity, self._behind_prefix)
        mask, depth = self._trees[topology].part(base, before, rows)
        return self.read(upload([list(tokens)], self._device), 0, mask, base + depth)

    def _by_layer(self, mask: Tensor | None, positions: Tensor, end: int) -> Any:
        """Return the mask of the first `end` slots as the model wants it: one for all layers, or one for each kind."""
        if self._windows is None:
            return mask if mask is None else backend_mask(mask, self.model)
        if mask is None:
            return None
        if mask.dtype != torch.bool:
            mask = mask == 0
        window, mixed = self._windows
        near = positions[:, None, :, None] - self._position_at[:, None, None, :end] < window
        sliding = backend_mask(mask & near, self.model)
        if not mixed:
            return sliding
        return {"full_attention": backend_mask(mask, self.model), "sliding_attention": sliding}


def window_layers(model: PreTrainedModel) -> tuple[int, bool] | None:
    """Return (window, whether other layers see everything) of a model with sliding-window layers, else None."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    if window is None or (kinds and "sliding_attention" not in kinds):
        return None
    return int(window), len(kinds) > 1
