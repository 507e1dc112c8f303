"""Logits that are not rounded to half precision: near 16, bfloat16 knows steps of an eighth, and the best two tokens tie."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .placement import is_plain

_HAS_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b in float32 of tensors in half precision on CUDA."""
    out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), torch.float32)
    out = out if bias is None else out + bias
    wide: Tensor = out.view(*x.shape[:-1], len(weight))
    return wide


def can_widen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of such tensors can be had in float32."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and _HAS_OUT_DTYPE


def widen(view: PreTrainedModel) -> None:
    """Have a view of a model return its logits in float32 where they are rounded to half precision and need not be."""
    head = getattr(view, "get_output_embeddings", lambda: None)()
    if not can_widen(view.device, view.dtype):
        return
    # Others are quantised, adapted, or replaced.
    if type(head) is nn.Linear and is_plain(head.weight) and "forward" not in vars(head):
        # It hides the forward of the class, for this module. The weights are the model's, whatever becomes of the view.
        setattr(head, "forward", partial(wide_linear, weight=head.weight, bias=head.bias))  # noqa: B010
