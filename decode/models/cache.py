"""A model with a preallocated cache: a stream's tokens go in at its end, roll-back only moves a length.

Masks are boolean, built once and sliced; they become what the attention backend reads in one place (a boolean 4D mask is
silently wrong under `eager`).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..topology import Topology
from .attention import attending_packed
from .cuda.transfer import upload
from .kv_cache import KVCache, KVLayer, ReadPrompt, scored_tokens
from .masks import SlotLayouts, TreeMasks, causal
from .packed import PackedCall, Part, TreeRows, pack, split
from .reading.layer_masks import LayerMasks, backend_mask
from .view import READS_ALL, ModelView, Reading

_LONG = 64
"""Tokens of a stream that are read by themselves: beside a long text the others' rows would be filled up to its length."""

_SLICED = 64
"""Longest run of tokens that reads a slice of the causal mask kept here; longer ones let the library build theirs."""


class CachedModel:
    """A causal language model and what it has read.

    Sliding-window layers keep all keys as well: their window is part of the mask, so that any roll-back is exact.

    Args:
        model: that is read with, through a view (see `view`): it stays as it is.
        capacity: slots of a stream, a bound on the tokens in the cache at any time.
        vocabulary: width of the logits returned. Of a model that scores more tokens they are cut; one that knows fewer
            scores the others -inf and reads them as its first token.
        hidden: keep hidden states of each call in `states`: of these layers, as transformers counts them; True = the last.
        streams: S, texts that are read side by side.
        device: that it is called from; None = the model's.
        reading: how the model can be read (`self_check`).

    Attributes:
        states: of the last call, if asked for; of several layers one after the other in each row. After `read` and
            `read_tree` [1, n, H] of all its tokens, after `read_parts` [1, R, H] of those whose logits were wanted.
    """

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
        self.view = ModelView(model, self._device)
        self.capacity, self.vocabulary = capacity, vocabulary
        self.states: Tensor | None = None
        self._fewest = 2 if reading.side_by_side else sys.maxsize  # parts that are read as a packed call
        self._reads_beyond = streams > 1  # slots that a text does not fill are read too, behind a mask
        self._hidden = (-1,) if hidden is True else tuple(hidden or ())
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or [])
        # Layers of several kinds may differ in shape: then each has buffers of its own.
        self._kv = KVCache(capacity, config.num_hidden_layers if len(kinds) < 2 else 1, streams)
        self._layers = [KVLayer(self._kv) for _ in range(config.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._lacks = max(0, vocabulary - scored_tokens(model))  # tokens that it does not know
        self._windows = LayerMasks.of(model) if reading.masked else None
        self._omitted = _not_accepted(model, ("position_ids", "logits_to_keep"))
        self._unmasked = not reading.masked
        # Told nothing, sdpa has a faster kernel for a single token and for a prompt on a GPU: no mask is read.
        fast = self._device.type != "cpu" and model.config._attn_implementation == "sdpa" and self._windows is None
        self._maskless = fast or (getattr(model, "takes_no_mask", False) and self._windows is None)
        self._maskless_prompt = fast
        self._causal = self._after_prefix(torch.ones(_SLICED, _SLICED, dtype=torch.bool, device=self._device).tril_())
        self._trees: dict[Topology, TreeMasks] = {}  # by identity
        self._layouts: SlotLayouts | None = None  # where no text has one, nothing is computed for it
        self._positions = torch.arange(capacity, device=self._device)[None]
        self._position_at = torch.zeros(streams, capacity, dtype=torch.int64, device=self._device)  # by slot

    def _after_prefix(self, mask: Tensor) -> Tensor:
        """Return [1, 1, n, capacity + n]: `mask` [n, n] after a prefix that all see. A slice of it serves any length."""
        prefix = torch.ones(len(mask), self.capacity, dtype=torch.bool, device=mask.device)
        full = torch.cat([prefix, mask], 1)[None, None].to(self._device)
        # With windows it stays boolean: layers of each kind see another part of it.
        return full if self._windows else backend_mask(full, self.view.original)

    @property
    def model(self) -> PreTrainedModel:
        """The view that is called."""
        return self.view.model

    def refresh(self) -> None:
        """See `ModelView`; called before the first text of a run."""
        self.view.refresh()

    @property
    def streams(self) -> int:
        """S."""
        return self._kv.streams

    @property
    def is_used(self) -> bool:
        """Whether the model has written to its cache."""
        return any(layer.is_initialized for layer in self._layers)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens in the cache, by stream."""
        return self._kv.lengths

    @property
    def length(self) -> int:
        """Tokens of the first stream in the cache."""
        return self._kv.lengths[0]

    def roll_back(self, length: int, stream: int = 0) -> None:
        """Forget all tokens of a stream after the first `length`."""
        assert length <= self._kv.lengths[stream]
        self._kv.lengths[stream] = length

    def prepare(self, calls: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Do once what the first calls of (tokens, rows) after texts of these lengths would have to do."""

    def keep(self, base: int, slots: Sequence[int], stream: int = 0) -> None:
        """Forget all of a stream after the first `base` tokens but those in `slots`, rising, which move up in place."""
        # What lies where it belongs stays there: of a chain, everything.
        fixed = 0
        while fixed < len(slots) and slots[fixed] == base + fixed:
            fixed += 1
        if fixed < len(slots):
            moved = list(slots[fixed:])
            self._kv.move(stream, moved, base + fixed)
            if self._windows:
                own = self._position_at[stream]
                own[base + fixed : base + len(slots)] = own[moved]
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
            rows: how many of the last rows of logits are wanted; 0 = all n.
            mask: [1, 1, n, length + n], boolean or in the backend's form; None = causal.
            positions: [1, n]; None = after what is there.
            stream: its number.

        Returns:
            [1, rows, V] float32, or float64 for a float64 model.
        """
        kv = self._kv
        kv.stream = stream  # that the layers write to
        start, count = kv.lengths[stream], tokens.shape[1]
        end = start + count
        if start == 0 and self._reads_beyond:
            kv.clear(stream)  # the text before may have ended in numbers that are not finite
        layouts = self._layouts and self._layouts.of(stream, start)
        alone = (self._maskless and count == 1) or (self._maskless_prompt and start == 0)
        if layouts is not None:
            mask = layouts.hide(causal(start, count, self._device) if mask is None else mask, stream)
        elif mask is None and count <= _SLICED and not alone and not self._unmasked:
            # Cut from the left so that `start` columns of the prefix remain: [1, 1, n, start + n].
            mask = self._causal[:, :, :count, self.capacity - start : self.capacity + count]
        positions = self._positions[:, start:end] if positions is None else positions
        if self._windows:
            # A window counts tokens of the text, which differ from slots for the candidates of a tree.
            self._position_at[stream, start:end] = positions[0]
            mask = self._by_layer(mask, positions, self._position_at[stream : stream + 1, :end])
        elif mask is not None:
            mask = backend_mask(mask, self.model)
        if layouts is not None:
            positions = layouts.positions(positions, stream)
        logits, self.states = self._run(self._known(tokens), mask, positions, rows)
        kv.lengths[stream] = end  # once all layers have written
        return logits

    def adopt(self, prompt: ReadPrompt, stream: int = 0) -> None:
        """Replace a stream's text by a prompt that the model has read by itself, and check it (`ReadPrompt.check`)."""
        if self._unmasked and prompt.is_shifted:
            raise prompt.refusal(self.view.original)
        self._kv.clear(stream)
        for layer, states in zip(self._layers, prompt.layers, strict=False):  # layers that share states come last
            if states is not None:
                layer.fill(stream, prompt.slots, *states)
        prompt.layers.clear()
        if not self._unmasked:
            self._layouts = self._layouts or SlotLayouts(self._kv.streams, self.capacity, self._device)
            self._layouts.set(stream, prompt.hidden, prompt.offset)
        self._position_at[stream, : prompt.slots] = self._positions[0, : prompt.slots]
        self._kv.lengths[stream] = prompt.slots
        logits = self.read(upload([[prompt.next[0]]], self._device), 1, stream=stream)[0, -1]
        self.roll_back(prompt.slots, stream)
        prompt.check(logits, self.model)

    def _known(self, tokens: Tensor) -> Tensor:
        """Return the tokens as the model can read them."""
        return tokens.masked_fill(tokens >= self.vocabulary - self._lacks, 0) if self._lacks else tokens

    def _run(self, tokens: Tensor, mask: Any, positions: Tensor, rows: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores [1, rows, V] of the last or of certain `rows` and, if they are kept, all hidden states."""
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "logits_to_keep": rows}
        for name in self._omitted:
            del inputs[name]
        return self.answer(self.call(**inputs, past_key_values=self._cache, use_cache=True), rows)

    def call(self, **inputs: Any) -> Any:
        """Return what the model returns for these inputs, with the hidden states that are kept."""
        with self.view as model:
            return model(**inputs, **({"output_hidden_states": True} if self._hidden else {}))

    def answer(self, out: Any, rows: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scores and states, as `_run`, of what `call` returned."""
        states = None
        if self._hidden:
            layers = [out.hidden_states[layer] for layer in self._hidden]
            states = layers[0] if len(layers) == 1 else torch.cat(layers, -1)
        logits = out.logits
        # Some models return all rows whatever they are told.
        if isinstance(rows, Tensor):
            logits = logits if logits.shape[1] == len(rows) else logits[:, rows]
        elif 0 < rows < logits.shape[1]:
            logits = logits[:, -rows:]
        return self._scores(logits), states

    def _scores(self, logits: Tensor) -> Tensor:
        """Return a model's logits [1, rows, V] of the vocabulary, in the precision that is computed with."""
        if logits.shape[2] > self.vocabulary:
            logits = logits[..., : self.vocabulary]
        logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        return functional.pad(logits, (0, self._lacks), value=-math.inf) if self._lacks else logits

    def read_tree(self, tokens: Sequence[int] | Tensor, tree: TreeRows, stream: int = 0) -> Tensor:
        """Append the tokens of some rows of a tree to a stream and return their logits [1, n, V].

        Args:
            tokens: n.
            tree: the rows.
            stream: its number.
        """
        mask, depth = self._masks(tree.topology).part(tree.base, tree.before, tree.rows)
        return self.read(self._uploaded(tokens), 0, mask, tree.base + depth, stream)

    def _uploaded(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return tokens as a row of their own."""
        return tokens[None] if isinstance(tokens, Tensor) else upload([tokens], self._device)

    def _masks(self, topology: Topology) -> TreeMasks:
        if topology not in self._trees:
            self._trees[topology] = TreeMasks(topology, self.capacity, self._after_prefix)
        return self._trees[topology]

    def read_parts(self, parts: Sequence[Part]) -> Tensor:
        """Append what several streams read, each at most once, and return the logits that are wanted, [R, V], part by part.

        One packed call reads them, but for the beginnings of texts and other long parts.
        """
        if len(parts) == 1 and self._fewest > 1:
            return self._read_alone(parts[0])
        lengths = self._kv.lengths
        together = [p for p in parts if lengths[p.stream] and (p.tree is not None or len(p.tokens) <= _LONG)]
        together = together if len(together) >= self._fewest else []
        if len(together) == len(parts):
            return self._read_packed(parts)
        # A tuple is built from left to right: `states` are those of the call before it.
        found = {part.stream: (self._read_alone(part), self.states) for part in parts if part not in together}
        if together:
            logits, states = self._read_packed(together), self.states
            bounds = split(together)
            for part, first, end in zip(together, bounds[:-1], bounds[1:], strict=True):
                found[part.stream] = logits[first:end], None if states is None else states[:, first:end]
        every = [found[part.stream] for part in parts]
        kept = [states for _, states in every if states is not None]
        self.states = torch.cat(kept, 1) if kept else None
        return torch.cat([logits for logits, _ in every])

    def _read_alone(self, part: Part) -> Tensor:
        """Read a part by itself: written in slices, without a mask where the backend needs none."""
        if part.tree is not None:
            logits = self.read_tree(part.tokens, part.tree, part.stream)[0]
        else:
            logits = self.read(self._uploaded(part.tokens), part.wanted, stream=part.stream)[0]
        logits = logits[-part.wanted :] if part.wanted and part.tree is not None else logits
        if self.states is not None and self.states.shape[1] > len(logits):
            self.states = self.states[:, -len(logits) :]
        return logits

    def _read_packed(self, parts: Sequence[Part]) -> Tensor:
        kv = self._kv
        call = pack(parts, kv, self._rows_for(parts), self._device, self._sized)
        mask = call.mask() if self._windows else backend_mask(call.mask(), self.model)
        # A row of a tree sees the text before the tree, as `sees` says, and there its ancestors. Both masks are boolean
        # where windows are yet to be cut out, else in the backend's form.
        for part in parts:
            if (tree := part.tree) is not None:
                seen = self._masks(tree.topology).relation(tree.before, tree.rows)
                mask[part.stream, 0, : len(seen), tree.base : tree.base + seen.shape[1]] = seen
        if self._windows:
            self._position_at[call.packing.stream, call.packing.slot] = call.positions[0]
        if self._layouts is not None:
            mask, call.positions = (
                self._layouts.hide(mask),
                self._layouts.positions(call.positions, call.packing.stream),
            )
        logits, states = self._run_packed(call, mask)
        for stream, end in call.ends.items():
            kv.lengths[stream] = end
        rows = call.wanted
        states = states[:, rows] if states is not None and isinstance(rows, Tensor) else states
        self.states = None if states is None else states[:, : call.kept]
        return logits[0, : call.kept]

    def _rows_for(self, parts: Sequence[Part]) -> int:
        """Return how many rows of the buffers attention reads: up to the last stream that takes part."""
        return 1 + max(part.stream for part in parts)

    @staticmethod
    def _sized(count: int) -> int:
        """Return to how many tokens, queries or rows a packed call is filled up: to none more."""
        return count

    def _run_packed(self, call: PackedCall, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores [1, R, V] of the rows that are wanted and, if they are kept, all hidden states [1, T, .]."""
        position_at = self._position_at[: call.packing.rows, : call.packing.seen]
        by_layer = self._by_layer(mask, call.query_positions, position_at)
        self._kv.packing = call.packing
        try:
            with self.view as model, attending_packed(model, call.packing):
                return self._run(self._known(call.tokens), by_layer, call.positions, call.wanted)
        finally:
            self._kv.packing = None

    def _by_layer(self, mask: Tensor | None, positions: Tensor, position_at: Tensor) -> Any:
        """Return the mask as the model wants it: one for all layers, or one for each kind.

        Args:
            mask: [B, 1, n, slots].
            positions: [B, n] of the queries; `position_at` [B, slots] those in the slots.
        """
        if self._windows is None:
            return mask if mask is None else backend_mask(mask, self.model)
        if mask is None:
            return None
        if mask.dtype != torch.bool:
            mask = mask == 0
        return self._windows.cut(mask, positions, position_at, self.model)


def _not_accepted(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return those of the arguments that the forward of a model's class does not take."""
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    # Classes of the library drop positions that they do not name; a wrapper around a model hands all on.
    drops = isinstance(model, PreTrainedModel)
    return [
        name for name in names if name not in parameters and not (takes_any and (name != "position_ids" or not drops))
    ]
