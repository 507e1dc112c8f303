"""Linear layers of a few rows on a CPU, with weights reordered for oneDNN.

For 2 to 8 rows, stock matrix products on a CPU read the weights several times. A reordered weight is read once, so that
verifying costs little more than one step.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from .adapters import is_modified

_ROWS = 16
"""Number of rows for which oneDNN chooses the order; measured best or equal for 1 to 24."""

_NO_CODE = compile("", "", "exec")


def can_pack(device: torch.device, dtype: torch.dtype) -> str:
    """Return why weights of this kind cannot be reordered, or an empty string."""
    if device.type != "cpu":
        return f"weights are reordered for the CPU, not for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"oneDNN multiplies float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this build of torch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no fast bfloat16"
    return ""


class PackedLinear(nn.Module):
    """A linear layer, with a reordered weight if possible.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.is_packed = not can_pack(weight.device, weight.dtype)
        # Plain attributes: neither is a parameter, so the module has no state to save.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS) if self.is_packed else weight
        self.bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default if self.is_packed else None

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out]."""
        if self._product is None:
            return functional.linear(input, self.weight, self.bias)
        out: Tensor = self._product(input, self.weight, self.bias, "none", [], "")
        return out

    __call__ = forward  # hooks, which nobody sets here, take longer than a small product


def pack(module: nn.Module) -> None:
    """Replace every plain linear layer in a module, in place: it can no longer be saved, trained or moved."""
    # Some modules read the weights of their layers themselves, such as routers of experts.
    reads_weights = "weight" in getattr(inspect.unwrap(type(module).forward), "__code__", _NO_CODE).co_names
    for name, child in module.named_children():
        if is_modified(child) or (isinstance(child, nn.Linear) and type(child) is not nn.Linear):
            continue  # quantised, adapted or patched: it computes something else
        if not isinstance(child, nn.Linear | Conv1D):
            pack(child)
        elif not reads_weights:
            weight = child.weight.data.t().contiguous() if isinstance(child, Conv1D) else child.weight.data
            setattr(module, name, PackedLinear(weight, None if child.bias is None else child.bias.data))
