"""The residual head: SpecDec++'s blocks x + SiLU(W x + b), on scalars, on hidden states of the models, or on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PolicyError
from ..features import Kind
from ..features.hidden_states import HIDDEN_STATES
from .base import NO_HIDDEN, Array, Basis, Hidden, TensorHead, expect, kernels, state_of, width_of

_ENTER = "enter."


def residual(x: Array, blocks: Sequence[tuple[Array, Array]]) -> None:
    """Put states [R, W] float32 through blocks x + SiLU(x W' + b), in place."""
    for weight, bias in blocks:
        kernels().add_silu(x, x @ weight.T + bias)  # BLAS: the last bits hang on the number of rows


class ResNetHead(TensorHead):
    """Residual blocks with two outputs, after a linear layer that brings everything to one width W.

    SpecDec++'s head (arXiv 2405.19715, code `wrap_model.py`: D blocks of the width of the hidden state, then a linear layer)
    on whatever is given. The published code repeats one block, `[ResBlock(h)] * D`, so that all share their weights (that is
    `specdec`); here each has its own. At depth 0 no draft has been read: PRE and POST columns and the draft's hidden
    state count as their means, and a flag says so.

    Args:
        names: F scalar features; may be none.
        tensors: `mean`, `scale` [F'] of the basis; `enter.weight` [W, F' + 1], the last column for the flag of depth 0,
            `enter.bias` [W]; for each hidden state `enter.NAME` [W, H], `mean.NAME` and `scale.NAME` [H]; `block.weight`
            [D, W, W], `block.bias` [D, W]; `leave.weight` [2, W], `leave.bias` [2]. D may be 0. See `TensorHead` for
            ranges.
    """

    kind = "resnet"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        read = [name for name in HIDDEN_STATES if _ENTER + name in tensors]
        of_states = [f"{part}.{name}" for name in read for part in ("enter", "mean", "scale")]
        layers = [f"{layer}.{part}" for layer in ("enter", "block", "leave") for part in ("weight", "bias")]
        super().__init__(names, tensors, ("mean", "scale", *layers, *of_states))
        t = self._tensors
        if not names and not read:
            raise PolicyError("resnet head: expected scalar features, hidden states, or both")
        self.basis = Basis(names, t["mean"], t["scale"])
        enter, blocks = t["enter.weight"], t["block.weight"]
        width = len(enter) if enter.ndim else 0
        expect(enter, (width, self.basis.width + 1), "enter.weight")
        expect(t["enter.bias"], (width,), "enter.bias")
        expect(blocks, (len(blocks) if blocks.ndim else 0, width, width), "block.weight")
        expect(t["block.bias"], (len(blocks), width), "block.bias")
        expect(t["leave.weight"], (2, width), "leave.weight")
        expect(t["leave.bias"], (2,), "leave.bias")
        self.sizes = {name: width_of(t[_ENTER + name]) for name in read}
        for name, size in self.sizes.items():
            expect(t[_ENTER + name], (width, size), _ENTER + name)
            expect(t[f"mean.{name}"], (size,), f"mean.{name}")
            expect(t[f"scale.{name}"], (size,), f"scale.{name}")
            if not (t[f"scale.{name}"] > 0).all():
                raise PolicyError(f"weights: scale.{name} must be above 0 everywhere")
        self._entries = [self._entry(first) for first in (False, True)]
        self._blocks = list(zip(blocks, t["block.bias"], strict=True))

    def _entry(self, first: bool) -> tuple[Array, Array, Array, list[Array]]:
        """Return the bounds of the features, and the first layer on raw columns, at depth 0 if `first`.

        That is weight and bias of the scalars' columns, then a weight for each hidden state; all float32.
        """
        t = self._tensors
        flag = t["enter.weight"][:, -1] if first else 0.0  # 1 at depth 0, else 0, so that it joins the bias
        weight, bias = self.basis.fold(t["enter.weight"][:, :-1], t["enter.bias"] + flag, first)
        scaled = []
        for name in self.sizes:
            part = t[_ENTER + name].astype(np.float64) / t[f"scale.{name}"]
            # What has not been read yet counts as its mean.
            part = np.zeros_like(part) if first and HIDDEN_STATES[name].kind is not Kind.ANCHOR else part
            bias = bias - part @ t[f"mean.{name}"]
            scaled.append(part.astype(np.float32))
        bounds = self.first_bounds if first else self.bounds
        return bounds, weight.astype(np.float32), bias.astype(np.float32), scaled

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], accept and next; see `Head`."""
        bounds, weight, bias, scaled = self._entries[0 if depth else 1]
        x = self.basis.expand(features, bounds) @ weight.T + bias
        for (name, size), part in zip(self.sizes.items(), scaled, strict=True):
            x += state_of(hidden, name, size) @ part.T
        residual(x, self._blocks)
        out: Array = x @ self._tensors["leave.weight"].T + self._tensors["leave.bias"]
        return out.astype(np.float64)
