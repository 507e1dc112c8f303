"""Heads on scalars that a CPU scores in microseconds: logistic regressions and a small network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import mul

import torch
from torch import Tensor

from .errors import PolicyError
from .heads_base import NO_ARRAYS, NO_VECTORS, Arrays, Basis, OnDevice, TensorHead, expect, take
from .layers import Layers


class LinearHead(TensorHead):
    """Three logistic regressions on the basis: accept, next, and next at depth 0.

    Args:
        names: features.
        tensors: `mean` and `scale` [F'], `weight` [3, F'], `bias` [3].
    """

    kind = "logistic"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self._tensors = take(tensors, ("mean", "scale", "weight", "bias"))
        self.basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        weight, bias = self._tensors["weight"], self._tensors["bias"]
        expect(weight, (3, self.basis.width), "weight")
        expect(bias, (3,), "bias")
        self._later = self.basis.fold(weight[:2], bias[:2], first=False)
        self._first = self.basis.fold(weight[[0, 2]], bias[[0, 2]], first=True)
        self._one = [(*w.double().tolist(), *b.double().tolist()) for w, b in (self._later, self._first)]
        self._placed = OnDevice(*self._later), OnDevice(*self._first)

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], accept and next; see `Head`."""
        weight, bias = self._placed[0 if depth else 1](features.device)
        return torch.nn.functional.linear(self.basis.expand(features), weight, bias)

    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row; see `Head`. A few products are cheaper than one call of an array library."""
        accept, following, above, beyond = self._one[0 if depth else 1]
        x = self.basis.expand_one(features)
        return [sum(map(mul, accept, x), above), sum(map(mul, following, x), beyond)]

    def folded(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the layers that `logits` puts `Basis.expand` through, at depths from 1 on and at depth 0."""
        return [[self._later], [self._first]]


class MLPHead(TensorHead):
    """A small network on the basis and a flag for depth 0, with two outputs.

    Args:
        names: features.
        tensors: `mean`, `scale`, and `weight.i` [out, in], `bias.i` [out] of layer i; SiLU between layers.
    """

    kind = "mlp"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        count = sum(name.startswith("weight.") for name in tensors)
        layers = [f"{part}.{i}" for i in range(count) for part in ("weight", "bias")]
        self._tensors = take(tensors, ("mean", "scale", *layers))
        self.basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        pairs = [(self._tensors[f"weight.{i}"], self._tensors[f"bias.{i}"]) for i in range(count)]
        width = self.basis.width + 1
        for i, (weight, bias) in enumerate(pairs):
            expect(weight, (len(bias), width), f"weight.{i}")
            width = len(bias)
        if width != 2 or not pairs:
            raise PolicyError(f"mlp head: expected 2 outputs, got {width if pairs else 'no layer'}")
        (weight, bias), *self._rest = pairs
        self._later = self.basis.fold(weight[:, :-1], bias, first=False)
        self._first = self.basis.fold(weight[:, :-1], bias + weight[:, -1], first=True)
        self._one = [Layers(layers) for layers in self.folded()]
        self._placed = [OnDevice(*(t for layer in layers for t in layer)) for layers in self.folded()]

    def logits(self, features: Tensor, depth: int, vectors: Mapping[str, Tensor] = NO_VECTORS) -> Tensor:
        """Return [..., 2], accept and next; see `Head`."""
        weight, bias, *rest = self._placed[0 if depth else 1](features.device)
        x = torch.nn.functional.linear(self.basis.expand(features), weight, bias)
        for weight, bias in zip(rest[::2], rest[1::2], strict=True):
            x = torch.nn.functional.linear(torch.nn.functional.silu(x), weight, bias)
        return x

    def logits_one(self, features: Sequence[float], depth: int, vectors: Arrays = NO_ARRAYS) -> list[float]:
        """Return [accept, next] of one row; see `Head`."""
        return self._one[0 if depth else 1](self.basis.expand_one(features))

    def folded(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the layers that `logits` puts `Basis.expand` through, at depths from 1 on and at depth 0."""
        return [[self._later, *self._rest], [self._first, *self._rest]]
