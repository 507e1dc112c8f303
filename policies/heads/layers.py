"""Heads on scalars that a CPU scores in microseconds: logistic regressions and a small network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PolicyError
from .base import NO_HIDDEN, Array, Basis, Hidden, Layer, TensorHead, expect, kernels


def packed(layers: Sequence[Layer]) -> tuple[Array, Array]:
    """Return sizes and weights of layers as `kernels.heads.score_layers` reads them."""
    sizes = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
    weights = [part.reshape(-1) for weight, bias in layers for part in (bias, weight.T)]  # [inputs, outputs]
    return np.array(sizes, dtype=np.int64), np.concatenate(weights, dtype=np.float64)


class LayersHead(TensorHead):
    """Linear layers on the columns of a basis, with SiLU between them; those from depth 1 on and those at depth 0.

    Attributes:
        basis: of the features.
    """

    basis: Basis

    def _place(self, later: Sequence[Layer], first: Sequence[Layer]) -> None:
        """Keep the layers that `scores` puts `Basis.expand` through."""
        self._layers = list(later), list(first)
        self._packed = [
            (bounds, self.basis.odds, *packed(layers), False)
            for bounds, layers in zip((self.bounds, self.first_bounds), self._layers, strict=True)
        ]

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], accept and next; see `Head`."""
        out = np.empty((len(features), 2))
        kernels().score_layers(features, *self._packed[0 if depth else 1], out)
        return out

    def folded(self, first: bool) -> list[Layer]:
        """Return the layers that `scores` puts `Basis.expand` through, at depth 0 if `first`."""
        return self._layers[first]


class LinearHead(LayersHead):
    """Three logistic regressions on the basis: accept, next, and next at depth 0.

    Args:
        names: features.
        tensors: `mean` and `scale` [F'], `weight` [3, F'], `bias` [3]; see `TensorHead` for ranges.
    """

    kind = "logistic"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors, ("mean", "scale", "weight", "bias"))
        self.basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        weight, bias = self._tensors["weight"], self._tensors["bias"]
        expect(weight, (3, self.basis.width), "weight")
        expect(bias, (3,), "bias")
        later = self.basis.fold(weight[:2], bias[:2], first=False)
        # At depth 0 accept means nothing; its weights only fill the place.
        self._place([later], [self.basis.fold(weight[[0, 2]], bias[[0, 2]], first=True)])


class MLPHead(LayersHead):
    """A small network on the basis and a flag for depth 0, with two outputs.

    Args:
        names: features.
        tensors: `mean`, `scale`, and `weight.i` [out, in], `bias.i` [out] of layer i; SiLU between layers; see `TensorHead`
            for ranges.
    """

    kind = "mlp"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        parts = layer_names(tensors)
        super().__init__(names, tensors, ("mean", "scale", *parts))
        self.basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        # The last input is the flag: 0 from depth 1 on, so it goes; 1 at depth 0, where its weights join the bias.
        (weight, bias), *rest = checked_layers(self._tensors, self.basis.width + 1, 2, "mlp head")
        later = self.basis.fold(weight[:, :-1], bias, first=False)
        self._place([later, *rest], [self.basis.fold(weight[:, :-1], bias + weight[:, -1], first=True), *rest])


def layer_names(tensors: Mapping[str, Array]) -> list[str]:
    """Return `weight.0`, `bias.0`, `weight.1`, ... for as many layers as there are weights."""
    count = sum(name.startswith("weight.") for name in tensors)
    return [f"{part}.{i}" for i in range(count) for part in ("weight", "bias")]


def checked_layers(tensors: Mapping[str, Array], width: int, outputs: int, who: str) -> list[Layer]:
    """Return the layers `weight.i`, `bias.i`.

    Args:
        tensors: all of the head.
        width: inputs of the first layer.
        outputs: of the last one.
        who: names the head in messages.

    Raises:
        PolicyError: layers that do not fit each other, or end otherwise.
    """
    layers = []
    for i in range(len(layer_names(tensors)) // 2):
        weight, bias = tensors[f"weight.{i}"], tensors[f"bias.{i}"]
        next_width = len(bias) if bias.ndim else 0
        expect(bias, (next_width,), f"bias.{i}")
        expect(weight, (next_width, width), f"weight.{i}")
        layers.append((weight, bias))
        width = next_width
    if width != outputs or not layers:
        found = width if layers else "no layer"
        raise PolicyError(f"{who}: expected {outputs} output{'s' * (outputs > 1)}, got {found}")
    return layers
