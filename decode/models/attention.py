"""Attention under a mask: of grouped queries without copying keys and values for each of them, and of packed streams."""

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

from .cuda.fused import fused
from .kv_cache import Packing

GROUPED, PACKED = "specstop_grouped", "specstop_packed"

DIVIDED, LEAST_PART, MOST_PARTS = 2048, 256, 32
"""Slots from which on the keys of a few queries are attended to in parts, side by side; slots of a part at least; parts."""


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

    Under a mask CUDA has no kernel for grouped queries, so the library repeats keys and values, the whole cache of them in
    every layer (eight heads for 32: four times the bytes).

    Args:
        module: the layer.
        query: [B, heads, n, width].
        key, value: [B, groups, slots, width].
        attention_mask: [1 or B, 1, n, slots] additive, or None: all is seen. (Boolean works too, undivided.)
        scaling: of the scores.
        kwargs: of other backends, without effect.
    """
    batch, heads, count, width = query.shape
    rows = query.reshape(batch, key.shape[1], -1, width)  # [B, groups, heads / groups x n, width]
    # n queries of each head, head by head; for a single query the mask's one row is broadcast.
    if attention_mask is not None and count > 1:
        attention_mask = attention_mask.repeat(1, 1, rows.shape[2] // count, 1)
    if attention_mask is not None and is_divided(rows, key, attention_mask):
        out = divided_attention(rows, key, value, attention_mask, scaling)
    else:
        out = functional.scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
    return out.reshape(batch, heads, count, -1).transpose(1, 2).contiguous(), None


def is_divided(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    """Whether a GPU would have too little to do side by side, as its kernel takes the keys of a head one after the other.

    Masks of parts must lie as the kernel reads them, as those of recorded calls do.
    """
    slots = key.shape[2]
    if query.device.type != "cuda" or query.dtype == torch.float64 or slots < DIVIDED or slots % LEAST_PART:
        return False
    if query.shape[-1] % 8 or torch.cuda.get_device_capability(query.device) < (8, 0):  # what the kernel asks for
        return False
    aligned = mask.is_floating_point() and mask.is_contiguous() and mask.data_ptr() % 16 == 0
    return aligned and len(key) == 1 and query.shape[2] <= LEAST_PART


def divided_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Return [1, heads, n, width]: softmax over all slots, put together of attention to parts of them (as Flash-Decoding).

    Args:
        query: [1, heads, n, width].
        key, value: [1, heads, slots, width].
        mask: [1, 1, 1 or n, slots] additive, no -inf.
        scaling: of the scores.
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
    return weighted(out, total[:, :, : query.shape[2]])


@fused
def weighted(out: Tensor, total: Tensor) -> Tensor:
    """Return [1, heads, n, width] of parts [parts, heads, n, width]: each is worth its share of the sum.

    Args:
        out: whose softmax sums to 1 in each part.
        total: [parts, heads, n] the logarithms of what it summed to before.
    """
    share = (total - total.amax(0)).exp()[..., None]
    return ((out * share).sum(0, keepdim=True) / share.sum(0, keepdim=True)).to(out.dtype)


@contextlib.contextmanager
def _attending(model: PreTrainedModel, backend: str) -> Iterator[None]:
    """Have a model attend by a backend of another name."""
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, backend
    try:
        yield
    finally:
        config._attn_implementation = before


def attending_grouped(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Have a model that attends by `sdpa` attend so; its masks must be four-dimensional and additive."""
    own = model.config.get_text_config()._attn_implementation
    return _attending(model, GROUPED if own == "sdpa" else own)


class _Call(threading.local):
    """The packed call that a thread is making; a model hands its attention no more than tensors."""

    packing: Packing
    eager = False


_CALL = _Call()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, heads, width]: each stream's tokens attend to its own row of the buffers.

    Args:
        module: the layer.
        query: [1, heads, T, width].
        key, value: [S, groups, slots, width].
        attention_mask: [S, 1, n, slots] additive.
        scaling, kwargs: as of the model's own attention.
    """
    packing, attend = _CALL.packing.on(query.device), grouped_attention
    if _CALL.eager:  # what a model adds to it, as a bound on the scores, it has in its own module
        attend = sys.modules[type(module).__module__].eager_attention_forward
    out, _ = attend(module, packing.spread(query), key, value, attention_mask, scaling=scaling, **kwargs)
    return packing.gather(out), None


def attending_packed(model: PreTrainedModel, packing: Packing) -> contextlib.AbstractContextManager[None]:
    """Have a model's attention take the streams of a packed call apart; a compact one does so by itself."""
    # Setting a config twice takes 40 us, a fifteenth of a small draft's step.
    if getattr(model, "attends_packed", False):
        return contextlib.nullcontext()
    _CALL.packing, _CALL.eager = packing, model.config.get_text_config()._attn_implementation == "eager"
    return _attending(model, PACKED)


class _WithoutCudnn(contextlib.AbstractContextManager[None]):
    """Keeps torch from attending by cuDNN, which plans each new shape for up to half a second; texts come in all lengths.

    The setting belongs to the process, so it is changed by the first thread that enters and put back by the last that leaves.
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
    """Return a context in which attention on a device is never cuDNN's; afterwards the setting is what it was."""
    return _WITHOUT_CUDNN if device.type == "cuda" else _UNCHANGED


AttentionInterface.register(GROUPED, grouped_attention)
AttentionInterface.register(PACKED, packed_attention)
