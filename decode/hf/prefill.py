"""Prefill as in `generate` of the target: with masked tokens, position ids, an initial cache or images.

The first step uses `prepare_inputs_for_generation` of the model and one forward pass for all rows of a batch. The cached keys
and values are copied to the buffers of the loop. A second step of the model determines how `generate` would continue: which
slots later tokens see, and their positions. The loop continues a text only if it computes the same logits for the second
step (`CachedModel.adopt`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..models.cache import CachedModel, ReadPrompt
from ..texts import Request
from .arguments import refuse

_LOOP_INPUTS = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
"""Model inputs that the loop passes in each call."""


class Prefill:
    """The first step of `generate` for a batch of token ids [B, n], and other `inputs`, which are not modified.

    `mask_length` is the number of columns of an attention mask of ones, which `generate` removes; -1 if there was none.
    """

    def __init__(self, model: Any, input_ids: Tensor, inputs: Mapping[str, Any], mask_length: int = -1) -> None:
        cache, count = inputs.get("past_key_values"), input_ids.shape[1]
        cached = self._cached = 0 if cache is None else int(cache.get_seq_length())
        self._cache = copy_cache(cache) if cached else DynamicCache(config=model.config.get_text_config(decoder=True))
        self._ids, self._kwargs = input_ids, {**inputs, "past_key_values": self._cache}
        uncached = None  # all, as in `GenerationMixin._prefill`
        mask, embeds = inputs.get("attention_mask"), inputs.get("inputs_embeds")
        if cached and embeds is not None:
            uncached = int(embeds.shape[1]) - cached
        # If the mask has the same length, the ids are the whole text. If it is longer, the ids follow the cached tokens.
        elif cached and count == (mask_length if mask is None else mask.shape[1]):
            uncached = count - cached
        self.inputs: dict[str, Any] = dict(
            model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=uncached, is_first_iteration=True, **self._kwargs
            )
        )

    def requests(self, target: CachedModel, padded: bool) -> list[Request]:
        """Return a request for each row, without random keys. The target has read its prompt unless the loop can read it.

        `padded` is whether padding has no effect on the logits of the target (`Reading`).
        """
        prompts: list[list[int]] = self._ids.tolist()
        if (padding := self._left_padding(padded)) is not None:
            return [Request(ids[count:], padding=ids[:count]) for ids, count in zip(prompts, padding, strict=True)]
        return [Request(ids, read=read) for ids, read in zip(prompts, self._read(target), strict=True)]

    def _left_padding(self, padded: bool) -> list[int] | None:
        """Return the left padding of each row, or None if a prompt is not token ids at positions from 0 after the padding."""
        ids, count, device = self._ids, self._ids.shape[1], self._ids.device
        input_ids, mask, positions = (self.inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if _extra(self.inputs) or self._cached or self.inputs.get("past_key_values") is not self._cache:
            return None
        if input_ids is None or input_ids.shape != ids.shape or (mask is not None and not _has_shape(mask, ids.shape)):
            return None
        visible = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool().to(device)
        padding = count - visible.sum(1)  # [B]
        expected = torch.arange(count, device=device) - padding[:, None]  # [B, n] positions
        if not torch.equal(expected >= 0, visible) or bool((padding == count).any()):
            return None
        if (bool(padding.any()) and not padded) or (
            positions is not None and bool(((positions.to(device) != expected) & visible).any())
        ):
            return None
        return list(map(int, padding))

    @torch.no_grad()
    def _read(self, target: CachedModel) -> list[ReadPrompt]:
        """Read the prompts of all rows with the target, and one more token to determine how `generate` continues."""
        model: Any = target.model
        out = target.call(**self.inputs, return_dict=True)
        logits, states = target.read_outputs(out, 1)
        cache = self.inputs["past_key_values"]
        slots = int(cache.get_seq_length())
        # Now, because the second step drops the first token of a window.
        layers = [(layer.keys, layer.values) if layer.is_initialized else None for layer in cache.layers]
        tokens = logits[:, -1].argmax(-1)
        kwargs = model._update_model_kwargs_for_generation(out, dict(self._kwargs))
        kwargs["past_key_values"] = cache
        text = torch.cat([self._ids, tokens[:, None].to(self._ids)], 1)
        second = model.prepare_inputs_for_generation(text, next_sequence_length=1, **kwargs)
        hidden = self._hidden(second.get("attention_mask"), slots, logits.device)
        offsets = torch.zeros(len(text), 1, dtype=torch.int64, device=logits.device)  # [B, D] position minus slot
        if (positions := second.get("position_ids")) is not None:  # [B or 1, 1] or [D, B or 1, 1]
            last = positions[..., -1].to(logits.device).reshape(-1, positions.shape[-2])  # [D, B or 1]
            offsets = (last - slots).expand(-1, len(text)).T
        after, _ = target.read_outputs(target.call(**second, return_dict=True), 1)
        # For messages: inputs that the model needs again in later steps come first, because the loop does not pass them.
        arguments = tuple(_extra(second) or self._arguments())
        prompts = []
        for row in range(len(text)):
            ids, row_states = self._draft_prompt(row, hidden[row], states)
            row_layers = [pair and (pair[0][row : row + 1], pair[1][row : row + 1]) for pair in layers]
            step = int(tokens[row]), after[row, -1]
            prompts.append(
                ReadPrompt(
                    ids, logits[row, -1:], row_states, row_layers, slots, hidden[row], offsets[row], step, arguments
                )
            )
        return prompts

    def _arguments(self) -> list[str]:
        """Return the names of the inputs in addition to the token ids."""
        names = _extra(self.inputs) + (["past_key_values"] if self._cached else [])
        names = [name if self._kwargs.get(name) is not None else f"{name} (added by the model)" for name in names]
        return names + [name for name in ("attention_mask", "position_ids") if self._kwargs.get(name) is not None]

    def _hidden(self, mask: Any, slots: int, device: torch.device) -> Tensor:
        """Return [B, slots] bool, True for slots that the next token does not see, from its mask [B, slots + 1]."""
        if mask is None:
            return torch.zeros(len(self._ids), slots, dtype=torch.bool, device=device)
        if not _has_shape(mask, (len(self._ids), slots + 1)):
            expected = f"expected one column for each of the {slots} tokens, including cached ones"
            raise refuse("attention_mask", f"{expected}; leave it out if nothing is masked")
        hidden: Tensor = ~mask[:, :-1].to(device).bool()
        return hidden

    def _draft_prompt(self, row: int, hidden: Tensor, states: Tensor | None) -> tuple[list[int], Tensor | None]:
        """Return the unmasked token ids for the drafter and the hidden states of the target for these tokens."""
        ids = self._ids[row]
        if states is not None:
            ids = ids[-min(len(ids), states.shape[1]) :]
        visible = torch.ones(len(ids), dtype=torch.bool, device=hidden.device)
        masked = hidden[-len(ids) :]
        visible[len(ids) - len(masked) :] = ~masked
        visible[-1] = True  # the next token is sampled from its logits, masked or not
        row_states = None if states is None else states[row, -len(ids) :][visible]
        return ids[visible.to(ids.device)].tolist(), row_states


def copy_cache(cache: Any) -> DynamicCache:
    """Return a shallow copy of a cache; raise `InputError` if its tensors would be updated in place by later calls."""
    types = {type(layer) for layer in getattr(cache, "layers", [])}
    if type(cache) is not DynamicCache or not types <= {DynamicLayer, DynamicSlidingWindowLayer} or cache.offloading:
        raise refuse(
            "past_key_values",
            f"expected a DynamicCache, got a {type(cache).__name__}; build the prefix with "
            "DynamicCache(config=model.config), or give the whole text as input_ids",
        )
    clone = copy.copy(cache)
    clone.layers = [copy.copy(layer) for layer in cache.layers]
    return clone


def _extra(inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of model inputs that are set and that the loop does not pass."""
    return [name for name, value in inputs.items() if name not in _LOOP_INPUTS and value is not None and value != {}]


def _has_shape(mask: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(mask, Tensor) and tuple(mask.shape) == tuple(shape)
