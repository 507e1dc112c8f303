"""A model with a preallocated cache of keys and values. New tokens are appended, and roll-back only changes a length.

One stream is read in slices of the buffers. Several streams are read by one packed call (`attention.PackedCall`).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ...policies.errors import InputError
from .attention import (
    KVCache,
    KVLayer,
    LayerMasks,
    PackedCall,
    Part,
    attending_packed,
    backend_mask,
    causal,
    pack,
    split,
)
from .device import upload, widen
from .view import READS_ALL, Guard, Reading, long_rope, open_view, scored_tokens

_MAX_PACKED = 64
"""Maximum tokens of a stream in a packed call, which fills the rows of the other streams up to its length."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Largest RMS difference of logits due to rounding, relative to their standard deviation; 0.1 in half precision."""


def logit_difference(rows: Tensor, expected: Tensor) -> float:
    """Return the RMS difference of logits [n, V] over the standard deviation of the expected ones, the maximum over rows."""
    width = min(rows.shape[-1], expected.shape[-1])
    a, b = rows[..., :width].double(), expected[..., :width].double()
    finite = b.isfinite()
    if a.shape != b.shape or not torch.equal(a.isfinite(), finite):
        return torch.inf
    difference = torch.where(finite, a - b, 0.0).square().mean(-1).sqrt()
    spread = torch.where(finite, b, 0.0).std(-1, correction=0).clamp_min(1e-9 * float(b[finite].abs().max()) + 1e-30)
    return float((difference / spread).max())


@dataclass(frozen=True)
class ReadPrompt:
    """The prompt of one text after the model has read it as its own `generate` does (`hf.prefill`)."""

    ids: list[int]  # that drafters read
    logits: Tensor  # [1, V] after the last token
    states: Tensor | None  # [len(ids), layers x H], if they are kept
    layers: list[tuple[Tensor, Tensor] | None]  # states [1, heads, n, width] of the last n slots; `adopt` removes them
    slots: int  # in use
    hidden: Tensor  # [slots] bool, not seen by later tokens
    offset: Tensor  # [D] int64, position minus slot of later tokens
    next: tuple[int, Tensor]  # a token, and the model's own logits [V] after it
    arguments: tuple[str, ...]  # inputs besides the token ids, for messages


class CachedModel:
    """A causal language model and the texts that it has read.

    Sliding-window layers keep all keys: their window is part of the mask, so that any roll-back is exact.

    With LongRoPE, a call uses the factors of the last position that it reads. To give each text the same factors as decoding
    of that text alone, token by token, no call contains texts on both sides of the boundary, and no round spans it.

    Args:
        model: Model to call, through a view (see `view`); kept as `original`.
        capacity: Slots of a stream.
        vocabulary: Width of the logits returned. Additional scores are cut. Tokens that the model does not know get -inf, and
            are read as its first token.
        hidden: Layers with hidden states that are kept in `states`, as transformers counts them; True = the last.
        streams: S, texts that are read together.
        device: Device of the caller; None = the model's.
        reading: Calls that the model supports (`self_check`).

    Attributes:
        masked: Whether the model takes masks.
        skips: Whether recorded calls that are not needed are skipped (`read_parts`).
        states: Hidden states of the last call, if they are kept, those of several layers concatenated. After `read` [1, n, H]
            of all tokens, after `read_parts` [1, R, H] of the tokens for which logits are returned.
    """

    skips = False

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        vocabulary: int,
        hidden: bool | Sequence[int] = False,
        streams: int = 1,
        device: torch.device | None = None,
        reading: Reading = READS_ALL,
    ) -> None:
        self._device = torch.device(device or model.device)
        self.original = model
        self.capacity, self.vocabulary, self.streams = capacity, vocabulary, streams
        self.states: Tensor | None = None
        self._max_packed = _MAX_PACKED
        self._min_packed = 2 if reading.side_by_side else sys.maxsize
        self._hidden = (-1,) if hidden is True else tuple(hidden or ())
        config = model.config.get_text_config()
        layers = config.num_hidden_layers
        # Layers of several types may differ in shape.
        one_type = len(set(getattr(config, "layer_types", None) or [])) < 2
        self._kv = KVCache(capacity, layers if one_type else 1, streams)
        self._layers = [KVLayer(self._kv) for _ in range(layers)]
        self._cache = Cache(layers=list(self._layers))
        self._unknown = max(0, vocabulary - scored_tokens(model))
        self._windows = LayerMasks.of(model) if reading.masked else None
        self._omitted = _not_accepted(model, ("position_ids", "logits_to_keep"))
        self.masked = reading.masked
        self._reads_beyond = streams > 1  # whether attention reads slots behind the text, masked
        # Streams with hidden slots or shifted positions: `ReadPrompt.hidden` and `offset`.
        self._layouts: dict[int, tuple[Tensor, Tensor]] = {}
        self._positions = torch.arange(capacity, device=self._device)[None]
        self._position_at = torch.zeros(streams, capacity, dtype=torch.int64, device=self._device)  # by slot
        self._rope = long_rope(model)
        self._tokens = torch.zeros_like(self._position_at) if self._rope else None  # [S, capacity]

    @cached_property
    def _view(self) -> tuple[PreTrainedModel, Guard]:
        view, guard = open_view(self.original)
        if view is not self.original:
            widen(view)
        return view, guard

    @property
    def model(self) -> PreTrainedModel:
        """The view that is called."""
        return self._view[0]

    def refresh(self) -> None:
        """Use the current layers of the model; called before the first text of a run."""
        vars(self).pop("_view", None)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens in the cache, by stream."""
        return self._kv.lengths[: self.streams]

    def roll_back(self, length: int, stream: int = 0) -> None:
        """Remove all tokens of a stream after the first `length`."""
        assert length <= self._kv.lengths[stream]
        self._kv.lengths[stream] = length

    def prepare(self, calls: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Record calls of (tokens, rows) in texts of these lengths, if calls are recorded."""

    def keep(self, base: int, slots: Sequence[int], stream: int = 0) -> None:
        """Remove all tokens of a stream after `base` except those in `slots`, ascending, which move up."""
        # Those already in place: all of a chain.
        fixed = next((index for index, slot in enumerate(slots) if slot != base + index), len(slots))
        if fixed < len(slots):
            moved = list(slots[fixed:])
            self._kv.move(stream, moved, base + fixed)
            if self._windows:
                self._position_at[stream, base + fixed : base + len(slots)] = self._position_at[stream, moved]
            if self._tokens is not None:
                self._tokens[stream, base + fixed : base + len(slots)] = self._tokens[stream, moved]
        self.roll_back(base + len(slots), stream)

    def read(
        self,
        tokens: Tensor,
        rows: int = 0,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        stream: int = 0,
    ) -> Tensor:
        """Append `tokens` to a stream and return logits.

        Args:
            tokens: [1, n] int64.
            rows: Number of last rows of logits; 0 = all n.
            mask: [1, 1, n, length + n] bool; None = causal.
            positions: [1, n]; None = consecutive.
            stream: Index of the stream.

        Returns:
            [1, rows, V] float32, or float64 for a float64 model.
        """
        kv = self._kv
        kv.stream = stream
        start, count = kv.lengths[stream], tokens.shape[1]
        end = start + count
        if start == 0:
            self._layouts.pop(stream, None)
            if self._reads_beyond:  # the previous text may have ended with states that are not finite
                kv.clear(stream)
        positions = self._positions[:, start:end] if positions is None else positions
        if self._tokens is not None:
            self._tokens[stream, start:end] = tokens[0]
            self._change_factors(stream, 1 + int(positions.max()))
        if self._windows:
            self._position_at[stream, start:end] = positions[0]
        if stream in self._layouts:
            mask = causal(start, count, self._device) if mask is None else mask
            self._hide(mask, stream)
        # Without a mask the model is causal, which costs at most 1% more than a prepared mask.
        if mask is not None:
            mask = self._additive(mask, positions, self._position_at[stream : stream + 1, :end])
        if self._layouts:
            positions = self._shifted(positions, torch.full_like(tokens[0], stream))
        logits, self.states = self._run(tokens, mask, positions, rows)
        kv.lengths[stream] = end  # after all layers have written
        return logits

    def _change_factors(self, stream: int, end: int) -> None:
        """Read a text again, as `generate` of Phi-3 does, before a call that is the first to reach other LongRoPE factors."""
        start = self._kv.lengths[stream]
        if self._tokens is not None and self._rope and self._rope.rereads and 0 < start <= self._rope.original < end:
            # With the first new token, because the call must reach beyond the boundary.
            text = self._tokens[stream : stream + 1, : start + 1].clone()
            self._kv.lengths[stream] = 0
            self.read(text, 1, stream=stream)
            self._kv.lengths[stream] = start

    def _hide(self, mask: Tensor, first: int = 0) -> None:
        """Mask the hidden slots in a mask [B, 1, n, slots] bool of the streams from `first` on, in place."""
        for stream, (hidden, _) in self._layouts.items():
            if 0 <= stream - first < len(mask):
                mask[stream - first, ..., : len(hidden)] &= ~hidden[: mask.shape[-1]]

    def _shifted(self, positions: Tensor, stream: Tensor) -> Tensor:
        """Return positions [1, n] or [D, 1, n] of tokens with positions [1, n] in their streams [n]."""
        if not self._layouts:
            return positions
        shifts = (offset[:, None, None] * (stream == number) for number, (_, offset) in self._layouts.items())
        shifted = sum(shifts, positions)  # [D, 1, n]
        return shifted if len(shifted) > 1 else shifted[0]

    def adopt(self, prompt: ReadPrompt, stream: int = 0) -> None:
        """Replace a stream's text by a prompt that the model has read itself.

        Raises:
            InputError: The logits after the prompt's next token differ from the model's by more than rounding.
        """
        refusal = InputError(
            f"specstop_generate: {', '.join(prompt.arguments)}: {type(self.original).__name__} continues such a prompt in a "
            "form that the loop does not support; leave it out, or call generate without custom_generate"
        )
        if not self.masked and (prompt.hidden.any() or prompt.offset.any()):
            raise refusal
        kv = self._kv
        kv.clear(stream)
        kv.stream = stream
        for layer, states in zip(self._layers, prompt.layers, strict=False):  # layers that share states come last
            if states is not None:
                kv.lengths[stream] = prompt.slots - states[0].shape[2]
                layer.update(*states)
        prompt.layers.clear()
        if self.masked:
            self._layouts[stream] = prompt.hidden, prompt.offset
        self._position_at[stream, : prompt.slots] = self._positions[0, : prompt.slots]
        kv.lengths[stream] = prompt.slots
        token, expected = prompt.next
        logits = self.read(upload([[token]], self._device), 1, stream=stream)[0, -1]
        self.roll_back(prompt.slots, stream)
        if logit_difference(logits[None], expected[None]) > _TOLERANCE.get(self.model.dtype, 0.1):
            raise refusal

    def _run(self, tokens: Tensor, mask: Any, positions: Tensor, rows: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores [1, R, V] of the last or of certain `rows` and, if they are kept, all hidden states."""
        if self._unknown:
            tokens = tokens.masked_fill(tokens >= self.vocabulary - self._unknown, 0)
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "logits_to_keep": rows}
        for name in self._omitted:
            del inputs[name]
        return self.read_outputs(self.call(**inputs, past_key_values=self._cache, use_cache=True), rows)

    def call(self, **inputs: Any) -> Any:
        """Return the outputs of the model for these inputs, with the hidden states that are kept."""
        model, guard = self._view
        with guard(), attending_packed(model, self._kv.call, is_view=model is not self.original):
            return model(**inputs, **({"output_hidden_states": True} if self._hidden else {}))

    def read_outputs(self, out: Any, rows: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scores [1, R, V] and hidden states from the outputs of `call`."""
        states = torch.cat([out.hidden_states[layer] for layer in self._hidden], -1) if self._hidden else None
        logits = out.logits
        # Some models ignore `logits_to_keep`.
        if isinstance(rows, Tensor):
            logits = logits if logits.shape[1] == len(rows) else logits[:, rows]
        elif 0 < rows < logits.shape[1]:
            logits = logits[:, -rows:]
        logits = logits[..., : self.vocabulary]
        logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        return functional.pad(logits, (0, self._unknown), value=-math.inf) if self._unknown else logits, states

    def read_parts(self, parts: Sequence[Part], needed: Tensor | None = None) -> Tensor:
        """Append tokens to several streams, at most one part each, and return their logits [R, V].

        One packed call reads them, except the beginnings of texts and other long parts.

        If the model `skips`, recorded calls do nothing while `needed` [] bool on the device is false.
        """
        packed = self._packable(parts)
        packed = packed if len(packed) >= self._min_packed else []
        groups = [[part] for part in parts if part not in packed] + ([packed] if packed else [])
        outputs = {}
        for group in groups:
            logits = self._read_packed(group, needed) if group is packed else self._read_alone(group[0])
            if len(groups) == 1:
                return logits
            bounds, states = split(group), self.states
            for part, first, end in zip(group, bounds[:-1], bounds[1:], strict=True):
                outputs[part.stream] = logits[first:end], None if states is None else states[:, first:end]
        in_order = [outputs[part.stream] for part in parts]
        kept = [states for _, states in in_order if states is not None]
        self.states = torch.cat(kept, 1) if kept else None
        return torch.cat([logits for logits, _ in in_order])

    def _packable(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that one packed call may read."""
        lengths = self._kv.lengths
        parts = [p for p in parts if lengths[p.stream] and (p.tree is not None or len(p.tokens) <= self._max_packed)]
        if self._rope is None:
            return parts
        sides: dict[bool, list[Part]] = {True: [], False: []}
        for part in parts:
            last = lengths[part.stream] + len(part.tokens) - 1 if part.tree is None else part.tree.positions().max()
            is_long = bool(last >= self._rope.original)
            if not is_long or lengths[part.stream] > self._rope.original:
                sides[is_long].append(part)
        return max(sides.values(), key=len)

    def _read_alone(self, part: Part) -> Tensor:
        stream, tokens, tree, mask, positions = part.stream, part.tokens, part.tree, None, None
        if tree is not None:
            start, relation = self._kv.lengths[stream], upload(tree.relation(), self._device)
            mask = torch.ones(1, 1, len(relation), start + len(relation), dtype=torch.bool, device=self._device)
            mask[0, 0, :, tree.base :] = relation
            positions = upload(tree.positions()[None], self._device)
        line = tokens[None] if isinstance(tokens, Tensor) else upload([tokens], self._device)
        logits = self.read(line, part.rows, mask, positions, stream)[0]
        if self.states is not None:
            self.states = self.states[:, -len(logits) :]
        return logits

    def _read_packed(self, parts: Sequence[Part], needed: Tensor | None) -> Tensor:
        call = self._pack(parts)
        call.needed = None if needed is None else needed.clone()  # a recording keeps it as its input
        if self._tokens is not None:
            self._tokens[call.line[2], call.line[3]] = call.line[0]
        logits, states = self._run_packed(call)
        for part in parts:
            self._kv.lengths[part.stream] += len(part.tokens)
        count = int(split(parts)[-1])  # without the rows that fill the call up
        if states is not None and call.rows is not None:
            states = states[:, call.rows]
        self.states = None if states is None else states[:, :count]
        return logits[0, :count]

    def _pack(self, parts: Sequence[Part]) -> PackedCall:
        return pack(parts, self._kv.lengths, 1 + max(part.stream for part in parts), self._device)

    def _run_packed(self, call: PackedCall) -> tuple[Tensor, Tensor | None]:
        """Return the scores [1, R, V] of its rows and, if they are kept, all hidden states [1, T, H]."""
        mask, positions, stream, slot = call.mask(), call.line[1:2], call.line[2], call.line[3]
        if self._windows:
            self._position_at[stream, slot] = positions[0]
        self._hide(mask)
        key_positions = self._position_at[: len(call.base), : call.slots]
        mask = self._additive(mask, call.query_positions() if self._windows else positions, key_positions)
        self._kv.call = call
        try:
            rows = 0 if call.rows is None else call.rows
            return self._run(call.line[:1], mask, self._shifted(positions, stream), rows)
        finally:
            self._kv.call = None

    def _additive(self, mask: Tensor, positions: Tensor, key_positions: Tensor) -> Any:
        """Return the additive mask for all layers, or one for each type (see `LayerMasks.apply`)."""
        dtype = self.original.dtype
        return (
            self._windows.apply(mask, positions, key_positions, dtype) if self._windows else backend_mask(mask, dtype)
        )


def _not_accepted(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return those of the arguments that the forward of a model's class does not take."""
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    # Classes of the library ignore positions that they do not name. A wrapper passes all arguments on.
    ignored = isinstance(model, PreTrainedModel)
    return [
        name for name in names if name not in parameters and not (takes_any and (name != "position_ids" or not ignored))
    ]
