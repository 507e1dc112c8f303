"""The residual head: blocks x + SiLU(W x + b) on scalars, hidden states, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PolicyError
from ..features import HIDDEN_STATES, Kind
from ..typing import Array
from .base import NO_HIDDEN, Basis, Head, Hidden, Layer, check_shape, hidden_of, kernels, size_of


def residual(x: Array, blocks: Sequence[Layer]) -> None:
    """Apply blocks x + SiLU(x W' + b) to x [R, W] float32, in place."""
    for weight, bias in blocks:
        kernels().add_silu(x, x @ weight.T + bias)  # BLAS: the last bits depend on the number of rows


class ResNetHead(Head):
    """Residual blocks with two outputs, after a linear layer of width W on all inputs.

    SpecDec++'s head (arXiv 2405.19715, `wrap_model.py`: D blocks of the width of the hidden state, then a linear layer) on
    any inputs. The published code shares the weights of all blocks (`specdec`); here each block has its own. At depth 0, PRE
    and POST columns and the draft's hidden state count as their means, and a flag is set.

    Args:
        names: F scalar features; may be none.
        tensors: `mean`, `scale` [F'] of the basis; `enter.weight` [W, F' + 1], the last column for the flag of depth 0,
            `enter.bias` [W]; for each hidden state `enter.NAME` [W, H], `mean.NAME` and `scale.NAME` [H]; `block.weight`
            [D, W, W], `block.bias` [D, W]; `leave.weight` [2, W], `leave.bias` [2]. D may be 0. See `Head` for ranges.
    """

    kind = "resnet"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        states = [name for name in HIDDEN_STATES if f"enter.{name}" in tensors]
        of_states = [f"{part}.{name}" for name in states for part in ("enter", "mean", "scale")]
        layers = [f"{layer}.{part}" for layer in ("enter", "block", "leave") for part in ("weight", "bias")]
        super().__init__(names, tensors, ("mean", "scale", *layers, *of_states))
        t = self._tensors
        if not names and not states:
            raise PolicyError("resnet head: expected scalar features, hidden states, or both")
        self.basis = Basis(names, t["mean"], t["scale"])
        width, count = size_of(t["enter.weight"], 0), size_of(t["block.weight"], 0)
        check_shape(t, "enter.weight", width, self.basis.width + 1)
        check_shape(t, "enter.bias", width)
        blocks = check_shape(t, "block.weight", count, width, width)
        self._blocks = list(zip(blocks, check_shape(t, "block.bias", count, width), strict=True))
        self._leave = check_shape(t, "leave.weight", 2, width), check_shape(t, "leave.bias", 2)
        self.sizes = {name: size_of(t[f"enter.{name}"]) for name in states}
        for name, size in self.sizes.items():
            check_shape(t, f"enter.{name}", width, size)
            check_shape(t, f"mean.{name}", size)
            if not (check_shape(t, f"scale.{name}", size) > 0).all():
                raise PolicyError(f"weights: scale.{name} must be above 0 everywhere")
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
        out: Array = x @ self._leave[0].T + self._leave[1]
        return out.astype(np.float64)
