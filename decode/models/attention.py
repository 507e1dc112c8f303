"""Attention of grouped queries without copies of keys and values, in parts for long texts, and of packed streams."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from .device import fused
from .packing import PackedCall

PACKED = "specstop_packed"

DIVIDED, LEAST_PART, MOST_PARTS = 2048, 256, 32
"""Minimum number of slots for attention in parts; minimum slots per part; maximum number of parts."""


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
        module, scaling, kwargs: See `AttentionInterface`; of `kwargs` nothing is used.
        query: [B, heads, n, width].
        key, value: [B, groups, slots, width].
        attention_mask: [B, 1, n, slots] additive, or None if all is seen.
    """
    batch, heads, count, width = query.shape
    rows = query.reshape(batch, key.shape[1], -1, width)  # [B, groups, heads / groups x n, width]
    # n queries of each head, head by head. The mask's one row of a single query is broadcast.
    if attention_mask is not None and count > 1:
        attention_mask = attention_mask.repeat(1, 1, rows.shape[2] // count, 1)
    if attention_mask is not None and is_divided(rows, key, attention_mask):
        out = divided_attention(rows, key, value, attention_mask, scaling)
    else:
        out = functional.scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
    return out.reshape(batch, heads, count, -1).transpose(1, 2).contiguous(), None


def is_divided(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    """Whether to attend in parts: a GPU kernel reads the keys of one head sequentially, which uses little of the GPU."""
    slots = key.shape[2]
    if query.device.type != "cuda" or query.dtype == torch.float64 or slots < DIVIDED or slots % LEAST_PART:
        return False
    if query.shape[-1] % 8 or torch.cuda.get_device_capability(query.device) < (8, 0):  # required by the kernel
        return False
    aligned = mask.is_floating_point() and mask.is_contiguous() and mask.data_ptr() % 16 == 0
    return aligned and len(key) == 1 and query.shape[2] <= LEAST_PART


def divided_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Return [1, heads, n, width], combined from attention to parts of the slots (Flash-Decoding).

    `query` is [1, heads, n, width], `key` and `value` [1, heads, slots, width], `mask` [1, 1, 1 or n, slots], without -inf.
    """
    slots = key.shape[2]
    parts = next(number for number in range(min(slots // LEAST_PART, MOST_PARTS), 0, -1) if slots % number == 0)
    keys, values = (states[0].unflatten(1, (parts, -1)).transpose(0, 1) for states in (key, value))
    queries = query.expand(parts, -1, -1, -1)
    masks = mask[0, 0].unflatten(1, (parts, -1)).transpose(0, 1)[:, None]  # [parts, 1, 1 or n, slots of a part]
    masks = masks.expand(parts, query.shape[1], query.shape[2], -1)
    if query.device.type == "cpu":
        cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, total = cpu(queries, keys, values, attn_mask=masks, scale=scaling)
    else:
        gpu = torch.ops.aten._scaled_dot_product_efficient_attention
        out, total = gpu(queries, keys, values, masks, True, scale=scaling)[:2]
    return _combined(out, total[:, :, : query.shape[2]])


@fused
def _combined(out: Tensor, total: Tensor) -> Tensor:
    """Return [1, heads, n, width] of parts [parts, heads, n, width] and log sums [parts, heads, n]."""
    share = (total - total.amax(0)).exp()[..., None]
    return ((out * share).sum(0, keepdim=True) / share.sum(0, keepdim=True)).to(out.dtype)


class _Current(threading.local):
    """The packed call of a thread. A model passes nothing but tensors to its attention."""

    call: PackedCall
    eager = False


_CURRENT = _Current()


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return [1, T, heads, width]: each stream's tokens attend to its row of the buffers.

    `query` is [1, heads, T, width], `key` and `value` [S, groups, slots, width], the mask [S, 1, n, slots] additive.
    """
    call, attend = _CURRENT.call, grouped_attention
    if _CURRENT.eager:  # its module adds what the model needs, such as a bound on the scores
        attend = sys.modules[type(module).__module__].eager_attention_forward
    out, _ = attend(module, call.spread(query), key, value, attention_mask, **kwargs)
    return call.gather(out), None


@contextlib.contextmanager
def attending_packed(model: PreTrainedModel, call: PackedCall) -> Iterator[None]:
    """Let a view attend as a packed call needs. A compact model does so by itself."""
    if getattr(model, "attends_packed", False):  # setting a config twice takes 40 us
        yield
        return
    config = model.config.get_text_config()
    before = config._attn_implementation
    _CURRENT.call, _CURRENT.eager = call, before == "eager"
    config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation = before


class _WithoutCudnn(contextlib.AbstractContextManager[None]):
    """Disables attention by cuDNN, which plans each new shape for up to half a second.

    The setting belongs to the process: the first thread that enters changes it and the last that leaves restores it.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


_WITHOUT_CUDNN = _WithoutCudnn()
_UNCHANGED: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def without_cudnn(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which attention on a device does not use cuDNN."""
    return _WITHOUT_CUDNN if device.type == "cuda" else _UNCHANGED


AttentionInterface.register(PACKED, packed_attention)
