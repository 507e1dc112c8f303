"""The residual head: blocks x + SiLU(W x + b) on scalars, hidden states, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..contract import Array
from ..errors import PolicyError
from ..features import HIDDEN_STATES, Kind
from .base import NO_HIDDEN, Basis, Head, Hidden, Layer, basis_shapes, hidden_of, kernels, size_of


def residual(x: Array, blocks: Sequence[Layer]) -> None:
    """Apply blocks x + SiLU(x W' + b) to x [R, W] float32, in place."""
    for weight, bias in blocks:
        kernels().add_silu(x, x @ weight.T + bias)  # BLAS: the last bits depend on the number of rows


class ResNetHead(Head):
    """Residual blocks with two outputs, after a linear layer of width W on all inputs.

    SpecDec++'s head (arXiv 2405.19715, `wrap_model.py`) on any inputs, each block with weights of its own. At depth 0, PRE
    and POST columns and the draft's hidden state count as their means, and a flag is set.

    Tensors: `mean`, `scale` [F'] of the basis; `enter.weight` [W, F' + 1], the last column for the flag, `enter.bias` [W];
    for each hidden state `enter.NAME` [W, H], `mean.NAME` and `scale.NAME` [H]; `block.weight` [D, W, W], `block.bias`
    [D, W]; `leave.weight` [2, W], `leave.bias` [2].
    """

    kind = "resnet"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        self.sizes = {n: size_of(tensors, f"enter.{n}") for n in HIDDEN_STATES if f"enter.{n}" in tensors}
        if not names and not self.sizes:
            raise PolicyError("resnet head: expected scalar features, hidden states, or both")
        shapes = basis_shapes(names)
        width, blocks = size_of(tensors, "enter.weight", 0), size_of(tensors, "block.weight", 0)
        shapes |= {"enter.weight": (width, shapes["mean"][0] + 1), "enter.bias": (width,)}
        shapes |= {"block.weight": (blocks, width, width), "block.bias": (blocks, width)}
        shapes |= {"leave.weight": (2, width), "leave.bias": (2,)}
        for name, size in self.sizes.items():
            shapes |= {f"enter.{name}": (width, size), f"mean.{name}": (size,), f"scale.{name}": (size,)}
        super().__init__(names, tensors, shapes)
        self.basis = Basis(names, tensors["mean"], tensors["scale"])
        self._blocks = list(zip(tensors["block.weight"], tensors["block.bias"], strict=True))
        self._entries = self._entry(first=False), self._entry(first=True)

    def _entry(self, first: bool) -> tuple[Array, Array, list[Array]]:
        """Return the first layer on raw inputs: weight and bias of the columns, and the weight of each hidden state."""
        t = self._tensors
        flag = t["enter.weight"][:, -1] if first else 0.0
        weight, bias = self.basis.fold(t["enter.weight"][:, :-1], t["enter.bias"] + flag, first)
        of_states = []
        for name in self.sizes:
            scaled = t[f"enter.{name}"].astype(np.float64) / t[f"scale.{name}"]
            if first and HIDDEN_STATES[name].kind is not Kind.ANCHOR:
                scaled = np.zeros_like(scaled)  # not known: counts as its mean
            bias = bias - scaled @ t[f"mean.{name}"]
            of_states.append(scaled.astype(np.float32))
        return weight.astype(np.float32), bias.astype(np.float32), of_states

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2]; see `Head`."""
        weight, bias, of_states = self._entries[depth == 0]
        x = self.basis.expand(features, self.bounds[depth == 0]) @ weight.T + bias
        for (name, size), part in zip(self.sizes.items(), of_states, strict=True):
            x += hidden_of(hidden, name, size) @ part.T
        residual(x, self._blocks)
        out: Array = x @ self._tensors["leave.weight"].T + self._tensors["leave.bias"]
        return out.astype(np.float64)
