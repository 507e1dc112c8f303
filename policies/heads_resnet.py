"""The residual head: SpecDec++'s blocks x + SiLU(W x + b), on scalars, on hidden states of the models, or on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from .errors import PolicyError
from .features import Kind
from .heads_base import (
    NO_ARRAYS,
    NO_VECTORS,
    Arrays,
    Basis,
    OnDevice,
    TensorHead,
    array,
    expect,
    take,
    vector,
    width_of,
)
from .layers import Residual
from .vectors import VECTORS

_ENTER = "enter."


class ResNetHead(TensorHead):
    """Residual blocks with two outputs, behind a linear layer that brings everything to one width W.

    SpecDec++'s head (arXiv 2405.19715, code `wrap_model.py`: D blocks of the width of the hidden state, then a linear layer)
    on whatever is given. The published code repeats one block, `[ResBlock(h)] * D`, so that all share their weights (that is
    `heads_specdec`); here each has its own. At depth 0 no draft has been read: PRE and POST columns and the draft's hidden
    state count as their means, and a flag says so.

    Args:
        names: F scalar features; may be none.
        tensors: `mean`, `scale` [F'] of the basis; `enter.weight` [W, F' + 1], the last column for the flag of depth 0,
            `enter.bias` [W]; for each hidden state `enter.NAME` [W, H], `mean.NAME` and `scale.NAME` [H]; `block.weight`
            [D, W, W], `block.bias` [D, W]; `leave.weight` [2, W], `leave.bias` [2]. D may be 0.
    """

    kind = "resnet"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        read = [name for name in VECTORS if _ENTER + name in tensors]
        of_vectors = [f"{part}.{name}" for name in read for part in ("enter", "mean", "scale")]
        plain = (
            "mean",
            "scale",
            "enter.weight",
            "enter.bias",
            "block.weight",
            "block.bias",
            "leave.weight",
            "leave.bias",
        )
        self._tensors = t = take(tensors, (*plain, *of_vectors))
        if not names and not read:
            raise PolicyError("resnet head: expected scalar features, hidden states, or both")
        self.basis = Basis(names, t["mean"], t["scale"])
        enter, blocks = t["enter.weight"], t["block.weight"]
        width = len(enter) if enter.dim() else 0
        expect(enter, (width, self.basis.width + 1), "enter.weight")
        expect(t["enter.bias"], (width,), "enter.bias")
        expect(blocks, (len(blocks) if blocks.dim() else 0, width, width), "block.weight")
        expect(t["block.bias"], (len(blocks), width), "block.bias")
        expect(t["leave.weight"], (2, width), "leave.weight")
        expect(t["leave.bias"], (2,), "leave.bias")
        self.sizes = {name: width_of(t[_ENTER + name]) for name in read}
        for name, size in self.sizes.items():
            expect(t[_ENTER + name], (width, size), _ENTER + name)
            expect(t[f"mean.{name}"], (size,), f"mean.{name}")
            expect(t[f"scale.{name}"], (size,), f"scale.{name}")
            if not bool((t[f"scale.{name}"] > 0).all()):
                raise PolicyError(f"weights: scale.{name} must be above 0 everywhere")
        self._entries = [self._entry(first) for first in (False, True)]
        self._placed = [OnDevice(*entry) for entry in self._entries]
        self._body = OnDevice(blocks, t["block.bias"], t["leave.weight"], t["leave.bias"])
        middle = list(zip(blocks, t["block.bias"], strict=True))
        leave = (t["leave.weight"], t["leave.bias"])
        self._one = [Residual((e[0], e[1]), e[2:], middle, leave) for e in self._entries]

    def _entry(self, first: bool) -> tuple[Tensor, ...]:
        """Return the first layer on raw columns, at depth 0 if `first`: weight, bias, then a weight for each hidden state."""
        t = self._tensors
        flag = t["enter.weight"][:, -1] if first else 0.0
        weight, bias = self.basis.fold(t["enter.weight"][:, :-1], t["enter.bias"] + flag, first)
        scaled = []
        for name in self.sizes:
            part = t[_ENTER + name] / t[f"scale.{name}"]
            # What has not been read yet counts as its mean.
            part = torch.zeros_like(part) if first and VECTORS[name].kind is not Kind.ANCHOR else part
            bias = bias - part @ t[f"mean.{name}"]
            scaled.append(part)
        return (weight, bias, *scaled)

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], accept and next; see `Head`."""
        weight, bias, *scaled = self._placed[0 if depth else 1](features.device)
        blocks, biases, leave, beyond = self._body(features.device)
        x = linear(self.basis.expand(features), weight, bias)
        for (name, size), part in zip(self.sizes.items(), scaled, strict=True):
            x = x + linear(vector(vectors, name, size), part)
        for block, offset in zip(blocks, biases, strict=True):
            x = x + silu(linear(x, block, offset))
        return linear(x, leave, beyond)

    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row; see `Head`."""
        states = [array(vectors, name, size) for name, size in self.sizes.items()]
        return self._one[0 if depth else 1](self.basis.expand_one(features), states)
