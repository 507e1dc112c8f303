"""Logits that are not rounded to half precision: near 16, bfloat16 knows steps of an eighth, and the best two tokens tie."""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .placement import is_plain

_HAS_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


class WideHead(contextlib.AbstractContextManager[None]):
    """While it is entered, an output layer in half precision answers in float32: what it summed, before it is rounded.

    Args:
        head: a linear layer on CUDA, whose matrix products can do so.
    """

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def __enter__(self) -> None:
        setattr(self._head, "forward", self._forward)  # noqa: B010 - it hides the class's own, for this instance

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._head.forward

    def _forward(self, x: Tensor) -> Tensor:
        return wide_linear(x, self._head.weight, self._head.bias)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b in float32 of tensors in half precision on CUDA."""
    out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), torch.float32)
    out = out if bias is None else out + bias
    wide: Tensor = out.view(*x.shape[:-1], len(weight))
    return wide


def can_widen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of such tensors can be had in float32."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and _HAS_OUT_DTYPE


def wide_head(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Return what makes a model's logits float32 while it is entered; nothing where they are, or where that cannot be."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not can_widen(model.device, model.dtype):
        return contextlib.nullcontext()
    # Others are quantised, adapted, or moved about by accelerate.
    if type(head) is not nn.Linear or not is_plain(head.weight) or "forward" in vars(head):
        return contextlib.nullcontext()
    return WideHead(head)
