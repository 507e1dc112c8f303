"""Weights in the order in which oneDNN multiplies a few rows fastest."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 16
"""For how many rows the order is chosen; measured best or equal for 1 to 24."""


def can_pack(device: torch.device, dtype: torch.dtype) -> str:
    """Return why weights of this kind cannot be reordered, or nothing."""
    if device.type != "cpu":
        return f"weights are reordered for the CPU, not for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"oneDNN multiplies float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this build of torch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no fast bfloat16"
    return ""


class Packed:
    """x W^T + b with a reordered W (or as it is where that cannot be).

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._reordered = not can_pack(weight.device, weight.dtype)
        self._weight = weight
        if self._reordered:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out]."""
        if self._reordered:
            out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
            return out
        return torch.nn.functional.linear(x, self._weight, self._bias)
