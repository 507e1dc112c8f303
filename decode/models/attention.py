"""Attention to cached keys and values: masks, packed calls of several streams, buffers, and kernels for long texts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ...policies.contract import Array
from ..topology import Topology
from .device import fused, upload

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types for which masks are computed here, as in `layer_types` of a configuration."""

PACKED = "specstop_packed"
MIN_DIVIDED_SLOTS, MIN_PART_SLOTS, MAX_DIVIDED_QUERIES, MAX_BLOCKS = 512, 128, 256, 512
"""Of attention in parts: minimum slots, minimum slots of a part, maximum queries of a key head, and maximum number of blocks
(parts x heads x texts), which is a few for each processor of a large GPU."""


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
    """Restrictions of the mask by layer type: a sliding window or chunks, both in tokens."""

    window: int
    chunk: int
    layer_types: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerMasks | None:
        """Return the masks of a model; None if all its layers use full attention."""
        config = model.config.get_text_config()
        full, sliding, chunked = LAYER_TYPES
        window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        types = set(getattr(config, "layer_types", None) or [sliding])
        unrestricted = {name for name, size in ((sliding, window), (chunked, chunk)) if size is None}
        layer_types = tuple(name for name in LAYER_TYPES if name in types - unrestricted)
        return None if layer_types in ((), (full,)) else cls(int(window or 0), int(chunk or 0), layer_types)

    def apply(self, mask: Tensor, positions: Tensor, key_positions: Tensor, dtype: torch.dtype) -> Any:
        """Return the additive form of a mask [B, 1, n, slots] bool, as a dictionary by layer type if there are several.

        Windows count positions of queries [B, n] and keys [B, slots], which differ from slots for the candidates of a tree.
        """
        query, key = positions[:, None, :, None], key_positions[:, None, None]
        masks = {}
        for name in self.layer_types:
            restricted = mask
            if name == LAYER_TYPES[1]:
                restricted = mask & (query - key < self.window)
            elif name == LAYER_TYPES[2]:
                restricted = mask & (query // self.chunk == key // self.chunk)
            masks[name] = backend_mask(restricted, dtype)
        return masks if len(masks) > 1 else masks[self.layer_types[0]]


@dataclass(slots=True)
class TreeRows:
    """Rows of a tree to read. Its rows `before` are in the slots from `base` on."""

    topology: Topology
    base: int
    before: Sequence[int]
    rows: Sequence[int]

    def relation(self) -> Array:
        """Return [n, m + n] bool: which of the rows `before` and `rows` each of `rows` sees."""
        out: Array = self.topology.sees.numpy()[np.ix_(self.rows, [*self.before, *self.rows])]
        return out

    def positions(self) -> Array:
        """Return [n] int64. Candidates of one depth share a position."""
        return self.base + self.topology.depths[list(self.rows)]


@dataclass(slots=True)
class Part:
    """Tokens for one stream to read.

    Attributes:
        stream: Index of the stream.
        tokens: n token ids, a sequence or int64 on the model's device.
        rows: Number of last tokens for which logits are returned; 0 = all.
        tree: Rows of the tokens; None = a chain.
    """

    stream: int
    tokens: Sequence[int] | Tensor
    rows: int = 0
    tree: TreeRows | None = None


def split(parts: Sequence[Part]) -> Array:
    """Return [parts + 1]: the bounds of each part's rows of logits."""
    return np.cumsum([0, *(part.rows or len(part.tokens) for part in parts)])


@dataclass(slots=True)
class PackedCall:
    """T tokens of several streams, one after another as if they were one text.

    Everything but attention computes T rows. Attention computes a rectangle of queries, one row per stream, on S rows of
    `slots` slots of the cache.

    Attributes:
        data: int64, holds the values of the next four, so that one copy moves all.
        line: [5, T] int64: token, position, stream, slot and index in the rectangle [S, n] of queries.
        base: [S] int64, slots of each stream that all its tokens see.
        rows: [R] int64, tokens for which logits are returned; None = all.
        relation: [S, n, W] bool, which slots from `base` on each query sees.
        is_full: Whether the tokens fill the rectangle in their order.
        needed: [] bool on the device; see `CachedModel.read_parts`.
    """

    data: Tensor
    line: Tensor
    base: Tensor
    rows: Tensor | None
    relation: Tensor
    slots: int
    is_full: bool
    needed: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The inputs."""
        return (self.data,) if self.needed is None else (self.data, self.needed)

    @property
    def shape(self) -> tuple[object, ...]:
        """A key that is equal for calls that can share a recording."""
        rows = None if self.rows is None else len(self.rows)
        return self.line.shape[1], self.relation.shape, rows, self.needed is None, self.slots, self.is_full

    def mask(self) -> Tensor:
        """Return [S, 1, n, slots] bool."""
        _, count, width = self.relation.shape
        slots = torch.arange(self.slots + width, device=self.base.device)
        mask = (slots < self.base[:, None])[:, None].repeat(1, count, 1)
        new = (self.base[:, None] + slots[:width])[:, None].expand(-1, count, -1)  # may pass `slots`
        return mask.scatter_(2, new, self.relation)[:, None, :, : self.slots]

    def query_positions(self) -> Tensor:
        """Return [S, n]; 0 for places without a token."""
        size = self.relation.shape[:2]
        return self.line.new_zeros(size.numel()).index_copy_(0, self.line[4], self.line[1]).view(size)

    def write(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Write states [1, heads, T, width] into buffers and return the slots that attention reads."""
        rows = len(self.base)
        _store(keys, values, self.line.to(keys.device), new_keys, new_values)
        return keys[:rows, :, : self.slots], values[:rows, :, : self.slots]

    def spread(self, queries: Tensor) -> Tensor:
        """Return queries [1, heads, T, width] as the rectangle [S, heads, n, width], 0 where there is no token."""
        rows, (streams, count, _) = queries[0].transpose(0, 1), self.relation.shape  # [T, heads, width]
        if not self.is_full:
            place = self.line[4].to(rows.device)
            rows = rows.new_zeros(streams * count, *rows.shape[1:]).index_copy_(0, place, rows)
        return rows.reshape(streams, count, *rows.shape[1:]).transpose(1, 2)

    def gather(self, out: Tensor) -> Tensor:
        """Return [1, T, heads, width] from a rectangle [S, n, heads, width]."""
        rows = out.reshape(1, -1, *out.shape[2:])
        return rows if self.is_full else rows.index_select(1, self.line[4].to(rows.device))


@fused
def _store(keys: Tensor, values: Tensor, line: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    # Indices with a slice between them put their own dimension first: [T, heads, width].
    keys[line[2], :, line[3]] = new_keys[0].transpose(0, 1)
    values[line[2], :, line[3]] = new_values[0].transpose(0, 1)


def pack(
    parts: Sequence[Part],
    lengths: Sequence[int],
    streams: int,
    device: torch.device,
    round_up: Callable[[int], int] = int,
) -> PackedCall:
    """Return the call that reads `parts`, one per stream.

    Args:
        parts: Parts of streams below `streams`.
        lengths: Slots in use, by stream.
        streams: S.
        device: Device of the model.
        round_up: Rounds T, n, W and R up. The last token is then repeated in the same slot, which changes nothing.
    """
    sizes = [len(part.tokens) for part in parts]
    total, kept = sum(sizes), sum(part.rows or size for part, size in zip(parts, sizes, strict=True))
    tokens, count = round_up(total), round_up(max(sizes))
    width = round_up(max(n + (len(part.tree.before) if part.tree else 0) for n, part in zip(sizes, parts, strict=True)))
    # R = T would mean all rows.
    row_count = 0 if kept == total else round_up(kept) if round_up(kept) < tokens else kept
    pairs = streams * count * width
    line_end, base_end = 5 * tokens, 5 * tokens + streams
    rows_end = base_end + row_count
    data = np.zeros(rows_end + (pairs + 7) // 8, dtype=np.int64)
    line, base, rows = data[:line_end].reshape(5, tokens), data[line_end:base_end], data[base_end:rows_end]
    relation = data[rows_end:].view(bool)[:pairs].reshape(streams, count, width)
    end = read = 0
    for part, size in zip(parts, sizes, strict=True):
        first, start, tree = end, lengths[part.stream], part.tree
        end += size
        slots = np.arange(start, start + size)
        sees = np.tri(size, dtype=bool) if tree is None else tree.relation()
        if not isinstance(part.tokens, Tensor):
            line[0, first:end] = part.tokens
        line[1, first:end] = slots if tree is None else tree.positions()
        line[2, first:end], line[3, first:end] = part.stream, slots
        line[4, first:end] = np.arange(size) + part.stream * count
        base[part.stream] = start if tree is None else tree.base
        relation[part.stream, :size, : sees.shape[1]] = sees
        if row_count:
            last = part.rows or size
            rows[read : read + last] = np.arange(end - last, end)
            read += last
    line[:, total:] = line[:, total - 1 : total]
    rows[read:] = total - 1
    is_full = tokens == total == streams * count and [part.stream for part in parts] == list(range(streams))
    if device.type == "cpu":  # views of arrays cost half of those of tensors
        inputs, *views = map(torch.from_numpy, (data, line, base, rows, relation))
    else:
        inputs = upload(data, device)
        seen = inputs[rows_end:].view(torch.bool)[:pairs].view(relation.shape)
        views = [inputs[:line_end].view(5, tokens), inputs[line_end:base_end], inputs[base_end:rows_end], seen]
    lines, bases, kept_rows, relations = views
    if on_device := [part.tokens for part in parts if isinstance(part.tokens, Tensor)]:  # then all are tensors
        lines[0] = torch.cat([*on_device, on_device[-1][-1:].expand(tokens - total)])
    most = max(lengths[part.stream] + size for part, size in zip(parts, sizes, strict=True))
    return PackedCall(inputs, lines, bases, kept_rows if row_count else None, relations, most, is_full)


class KVCache:
    """Buffers of `capacity` slots for each of S streams.

    Groups of `layers` layers share memory, so that a move is one operation for all.

    Attributes:
        lengths: Slots in use, by stream.
        stream: Stream that a call reads.
        call: The packed call that is read; None if it is one of `stream`.
    """

    def __init__(self, capacity: int, layers: int, streams: int = 1) -> None:
        self.capacity, self._layers, self.streams = capacity, layers, streams
        self.lengths = [0] * streams
        self.stream = 0
        self.call: PackedCall | None = None
        self.shared: list[Tensor] = []  # each [layers, S, heads, capacity, width]
        self._free: dict[Any, list[Tensor]] = {}

    def allocate(self, kind: str, states: Tensor) -> Tensor:
        """Return a buffer [S, heads, capacity, width] for a layer's states [1, heads, n, width] of a kind."""
        _, heads, _, width = states.shape
        free = self._free.setdefault((kind, heads, width, states.dtype, states.device), [])
        if not free:
            self.shared.append(states.new_zeros(self._layers, self.streams, heads, self.capacity, width))
            # By index: in-place writes into views made by unpacking are refused outside of `no_grad`.
            free.extend(self.shared[-1][layer] for layer in range(self._layers))
        return free.pop()

    def clear(self, stream: int) -> None:
        """Overwrite a stream's states. Masked states have weight 0, but 0 times NaN is NaN."""
        for shared in self.shared:
            shared[:, stream].zero_()

    def move(self, stream: int, slots: Sequence[int], to: int) -> None:
        """Copy a stream's states in `slots`, ascending and none below `to`, to the slots from `to` on."""
        for shared in self.shared:
            states = shared[:, stream]
            moved = states.index_select(2, upload(list(slots), shared.device))  # source and destination may overlap
            states.narrow(2, to, len(slots)).copy_(moved)


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, written in place where the cache says."""

    is_sliding = False  # all keys are kept; a window is part of the mask

    def __init__(self, kv: KVCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kv = kv

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for the shape, dtype and device of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self.kv.allocate("keys", key_states), self.kv.allocate("values", value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states and return views of all that attention reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kv, keys, values = self.kv, self.keys, self.values
        assert keys is not None and values is not None
        if kv.call is not None:
            return kv.call.write(keys, values, key_states, value_states)
        start, count = kv.lengths[kv.stream], key_states.shape[-2]
        if kv.streams > 1:
            keys, values = keys.narrow(0, kv.stream, 1), values.narrow(0, kv.stream, 1)
        # The length is updated after all layers (`CachedModel.read`).
        keys.narrow(2, start, count).copy_(key_states)
        values.narrow(2, start, count).copy_(value_states)
        return keys.narrow(2, 0, start + count), values.narrow(2, 0, start + count)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys with `query_length` more tokens, and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the slots in use."""
        return self.kv.lengths[self.kv.stream]

    def get_max_length(self) -> int:
        """Return the capacity."""
        return self.kv.capacity


def grouped_mask(mask: Tensor, heads: int, groups: int) -> Tensor:
    """Repeat an additive mask [B, 1, n, slots] once for all layers that call `grouped_attention`.

    Returns:
        [1, 1, rows, slots], or [B, groups, rows, slots] for several texts. The rows are those of a group, or 1 for one query.
    """
    if mask.shape[2] > 1:
        mask = mask.repeat(1, 1, heads // groups, 1)
    return mask if len(mask) == 1 else mask.repeat(1, groups, 1, 1)


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

    CUDA has no kernel for grouped queries under a mask, so the library repeats keys and values in every layer.

    Args:
        module, scaling, kwargs: See `AttentionInterface`; `kwargs` are ignored.
        query: [B, heads, n, width].
        key, value: [B, groups, slots, width].
        attention_mask: [B, 1, n, slots] additive, or that of `grouped_mask`; None = no mask.
    """
    batch, heads, count, width = query.shape
    rows = query.reshape(batch, key.shape[1], -1, width)  # [B, groups, heads / groups x n, width]
    # n queries of each head, head by head. The mask's one row of a single query is broadcast.
    if attention_mask is not None and attention_mask.shape[2] not in (1, rows.shape[2]):
        attention_mask = attention_mask.repeat(1, 1, rows.shape[2] // count, 1)
    if attention_mask is not None and is_divided(rows, key, attention_mask):
        return divided_attention(rows, key, value, attention_mask, scaling, count), None
    out = attend(rows, key, value, attention_mask, scaling)
    return out.reshape(batch, heads, count, -1).transpose(1, 2).contiguous(), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return `scaled_dot_product_attention`, on a GPU by a kernel other than cuDNN's.

    cuDNN plans each new shape for up to half a second. Torch's settings that exclude it belong to the process. So the
    kernel is called directly, if it supports the arguments.

    Args:
        query: [B, heads, n, width].
        key, value: [B, heads, slots, width], or fewer heads, which divide the heads of queries.
        mask: [B, 1 or heads, 1 or n, slots] additive; None = no mask.
        scaling: see `scaled_dot_product_attention`.
        is_causal: whether queries see the keys up to their own index.
    """
    if has_kernel(query, key, value, mask):
        if mask is None:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, 0.0, is_causal, False, scale=scaling)[0]  # type: ignore[no-any-return]
        if mask.stride(-1) != 1 or mask.shape[-1] % 16 or mask.data_ptr() % 16:  # rows must be aligned
            mask = functional.pad(mask, (0, -mask.shape[-1] % 16))[..., : key.shape[2]]
        bias = mask.expand(*query.shape[:3], key.shape[2])
        gpu = torch.ops.aten._scaled_dot_product_efficient_attention
        return gpu(query, key, value, bias, False, scale=scaling)[0]  # type: ignore[no-any-return]
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether Flash (without a mask, half precision) or the memory-efficient kernel (additive mask) supports these."""
    if query.device.type != "cuda" or query.dtype == torch.float64:
        return False
    if torch.cuda.get_device_capability(query.device) < (8, 0) or query.shape[-1] != value.shape[-1]:
        return False
    if mask is None:
        return query.dtype != torch.float32 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    is_simple = query.shape[1] == key.shape[1] and all(states.stride(-1) == 1 for states in (query, key, value))
    return is_simple and mask.dtype == query.dtype and query.shape[-1] % 8 == 0


def is_divided(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    """Whether to attend in parts: a GPU kernel reads the keys of one head sequentially, which uses little of the GPU."""
    slots, streams = key.shape[2], len(key)
    if query.device.type != "cuda" or query.dtype == torch.float64 or query.shape[2] > MAX_DIVIDED_QUERIES:
        return False
    if slots < MIN_DIVIDED_SLOTS or slots % MIN_PART_SLOTS or 2 * streams * key.shape[1] > MAX_BLOCKS:
        return False
    if streams > 1 and (mask.shape[1] != key.shape[1] or key.stride(0) != key.shape[1] * key.stride(1)):
        return False
    # Required by the kernel.
    aligned = mask.is_floating_point() and mask.is_contiguous() and mask.data_ptr() % 16 == 0
    return aligned and query.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def divided_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, count: int = 1
) -> Tensor:
    """Return [B, count, groups x rows / count, width], combined from attention to parts of the slots (Flash-Decoding).

    Args:
        query: [B, groups, rows, width]; the rows are `count` queries of each head, head by head.
        key, value: [B, groups, slots, width]; texts and groups can be merged without a copy.
        mask: [B, 1 or groups, 1 or rows, slots] without -inf.
        scaling: see `scaled_dot_product_attention`.
        count: number of queries of a head.
    """
    batch, groups, rows, _ = query.shape
    heads, slots = batch * groups, key.shape[2]
    most = min(slots // MIN_PART_SLOTS, max(1, MAX_BLOCKS // heads))
    parts = next(n for n in range(most, 0, -1) if slots % (n * MIN_PART_SLOTS) == 0)
    keys, values = (states.flatten(0, 1).unflatten(1, (parts, -1)).transpose(0, 1) for states in (key, value))
    queries = query.flatten(0, 1).expand(parts, -1, -1, -1)
    masks = mask.flatten(0, 1).unflatten(2, (parts, -1)).permute(2, 0, 1, 3)  # [parts, 1 or heads, 1 or rows, part]
    masks = masks.expand(parts, heads, rows, -1)
    if query.device.type == "cpu":
        cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sums = cpu(queries, keys, values, attn_mask=masks, scale=scaling)
    else:
        gpu = torch.ops.aten._scaled_dot_product_efficient_attention
        out, log_sums = gpu(queries, keys, values, masks, True, scale=scaling)[:2]
    return _combined(out, log_sums[:, :, :rows], batch, count)


@fused
def _combined(out: Tensor, log_sums: Tensor, batch: int, count: int) -> Tensor:
    """Return [B, count, heads, width] of parts [parts, B x groups, rows, width] and log sums [parts, B x groups, rows]."""
    wide = log_sums[..., None].expand_as(out)  # so that one kernel computes all sums
    share = (wide - wide.amax(0)).exp()
    mixed = ((out * share).sum(0) / share.sum(0)).to(out.dtype)
    by_head = mixed.unflatten(1, (-1, count)).unflatten(0, (batch, -1))  # [B, groups, heads / groups, count, width]
    result: Tensor = by_head.permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()
    return result


class _Current(threading.local):
    """The packed call of a thread. A model passes nothing but tensors to its attention."""

    call: PackedCall | None = None
    is_eager = False


_CURRENT = _Current()


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return [1, T, heads, width]: each stream's tokens attend to its row of the buffers.

    `query` is [1, heads, T, width], `key` and `value` [S, groups, slots, width], the mask [S, 1, n, slots] additive. Without
    a packed call it is `sdpa` with the kernels of `attend`.
    """
    call, compute = _CURRENT.call, grouped_attention
    if call is None:
        return _plain_attention(module, query, key, value, attention_mask, **kwargs)
    if _CURRENT.is_eager:  # its module adds what the model needs, such as a bound on the scores
        compute = sys.modules[type(module).__module__].eager_attention_forward
    out, _ = compute(module, call.spread(query), key, value, attention_mask, **kwargs)
    return call.gather(out), None


def _plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return [B, n, heads, width] as `sdpa` of transformers does."""
    if kwargs.get("position_bias") is not None or kwargs.get("dropout"):
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return out, None
    scaling = kwargs.get("scaling")
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            attention_mask = backend_mask(attention_mask, query.dtype)
        repeats = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
    is_causal = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    is_causal = is_causal and query.shape[2] > 1 and attention_mask is None
    return attend(query, key, value, attention_mask, scaling, is_causal).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def attending_packed(model: PreTrainedModel, call: PackedCall | None, is_view: bool) -> Iterator[None]:
    """Let a model attend as a packed call needs, or without one by the kernels of `attend` on a GPU.

    Only the config of the view changes. A compact model does without.
    """
    if getattr(model, "attends_packed", False) or (call is None and not (is_view and model.device.type == "cuda")):
        yield
        return
    config = model.config.get_text_config()
    before = config._attn_implementation
    if call is None and before != "sdpa":
        yield
        return
    _CURRENT.call, _CURRENT.is_eager = call, before == "eager"
    config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation, _CURRENT.call = before, None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)  # prompts, for which the model computes the mask
