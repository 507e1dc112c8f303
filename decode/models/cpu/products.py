"""Products of a few rows with a weight on the CPU, in the layout of the weight that is fastest for so many rows.

Which one that is depends on the machine: reordered for oneDNN a weight is read once whatever the rows, which halved a
verification on one processor and doubled a draft step on another (`layouts` measures it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LAYOUTS = ("reordered", "linear", "transposed")
"""Reordered for oneDNN; as torch keeps it; transposed."""

BOUNDS = (1, 3, 8, 24)
"""Rows up to which a class of products goes; more than the last count as the last."""

_ROWS = 16
"""For how many rows oneDNN's order is chosen; measured best or equal for 1 to 24."""


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


class Product:
    """x W^T + b, the weight reordered where that can be until `use` says otherwise.

    Args:
        weight: [out, in].
        bias: [out] or None.

    Attributes:
        weight, bias: as given; of a product that is settled no weight.
        layouts: by class of rows (`BOUNDS`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self.use(default_layouts(weight))

    @property
    def weights(self) -> Tensor:
        """The weight [out, in] of a product that is not settled."""
        assert self.weight is not None
        return self.weight

    def settle(self, layouts: Sequence[str]) -> None:
        """Use these layouts for good: no other form of the weight is kept."""
        self.use(layouts)
        self.weight = None

    def use(self, layouts: Sequence[str]) -> None:
        """Multiply in these layouts from now on, one for each class of rows."""
        # A product that is settled has no weight to make another form of.
        if self.weight is None or tuple(layouts) == getattr(self, "layouts", None):
            return
        packed = {layout: prepared(layout, self.weight, self.bias) for layout in dict.fromkeys(layouts)}
        self.layouts = tuple(layouts)
        classes = [next(i for i, most in enumerate(BOUNDS) if rows <= most) for rows in range(BOUNDS[-1] + 1)]
        self._by_rows = [packed[layouts[at]] for at in classes]  # by number of rows; more count as the last

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out]."""
        return self._by_rows[min(x.numel() // x.shape[-1], BOUNDS[-1])](x)


def default_layouts(weight: Tensor) -> tuple[str, ...]:
    """Return the layouts of a weight that nobody has measured."""
    return ("linear" if can_pack(weight.device, weight.dtype) else "reordered",) * len(BOUNDS)


def prepared(layout: str, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return the product in a layout, whose form of the weight [out, in] is made here."""
    if layout == "reordered":
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        product = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: product(x, reordered, bias, "none", [], "")  # no activation fused into it
    if layout == "linear":
        return lambda x: torch.nn.functional.linear(x, weight, bias)
    columns = weight.t().contiguous()

    def transposed(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.mm(rows, columns) if bias is None else torch.addmm(bias, rows, columns)
        return out.view(*x.shape[:-1], -1)

    return transposed
