"""Heads of linear layers on scalars: logistic regressions and a small network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import PolicyError
from ..typing import Array
from .base import Basis, Head, Layer, check_shape, size_of


class LayersHead(Head):
    """Linear layers on the columns of a basis, with SiLU between them.

    Attributes:
        basis: of the features.
        layers: on `Basis.expand`, from depth 1 on and at depth 0.
    """

    _kernel = "score_layers"
    basis: Basis
    layers: tuple[list[Layer], list[Layer]]

    def _set_layers(self, later: list[Layer], first: list[Layer]) -> None:
        self.layers = later, first
        self._arguments = (
            (self.bounds[0], self.basis.odds, *pack_layers(later), False),
            (self.bounds[1], self.basis.odds, *pack_layers(first), False),
        )


class LinearHead(LayersHead):
    """Three logistic regressions on the basis: accept, next, and next at depth 0.

    Args:
        names: features.
        tensors: `mean` and `scale` [F'], `weight` [3, F'], `bias` [3]; see `Head` for ranges.
    """

    kind = "logistic"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors, ("mean", "scale", "weight", "bias"))
        self.basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        weight, bias = check_shape(tensors, "weight", 3, self.basis.width), check_shape(tensors, "bias", 3)
        # At depth 0 accept has no meaning; its weights only fill the place.
        self._set_layers(
            [self.basis.fold(weight[:2], bias[:2], first=False)],
            [self.basis.fold(weight[[0, 2]], bias[[0, 2]], first=True)],
        )


class MLPHead(LayersHead):
    """A small network on the basis and a flag for depth 0, with two outputs.

    Args:
        names: features.
        tensors: `mean`, `scale`, and `weight.i` [out, in], `bias.i` [out] of layer i; see `Head` for ranges.
    """

    kind = "mlp"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        super().__init__(names, tensors, ("mean", "scale", *layer_names(tensors)))
        self.basis = basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        # The last input is the flag: 0 from depth 1 on, where it drops out; 1 at depth 0, where its weights join the bias.
        (weight, bias), *rest = check_layers(self._tensors, basis.width + 1, 2, self.kind)
        later = basis.fold(weight[:, :-1], bias, first=False)
        self._set_layers([later, *rest], [basis.fold(weight[:, :-1], bias + weight[:, -1], first=True), *rest])


def layer_names(tensors: Mapping[str, Array]) -> list[str]:
    """Return `weight.0`, `bias.0`, `weight.1`, ... for as many layers as there are weights."""
    count = sum(name.startswith("weight.") for name in tensors)
    return [f"{part}.{i}" for i in range(count) for part in ("weight", "bias")]


def check_layers(tensors: Mapping[str, Array], inputs: int, outputs: int, kind: str) -> list[Layer]:
    """Return the layers `weight.i`, `bias.i`; raise `PolicyError` unless they go from `inputs` to `outputs`."""
    layers, width = [], inputs
    for i in range(len(layer_names(tensors)) // 2):
        size = size_of(tensors[f"bias.{i}"])
        bias = check_shape(tensors, f"bias.{i}", size)
        layers.append((check_shape(tensors, f"weight.{i}", size, width), bias))
        width = size
    if width != outputs or not layers:
        raise PolicyError(
            f"{kind} head: expected {outputs} output{'s' * (outputs > 1)}, got {width if layers else 'no layer'}"
        )
    return layers


def pack_layers(layers: Sequence[Layer]) -> tuple[Array, Array]:
    """Return the sizes and weights of layers for `kernels.heads.score_layers`."""
    sizes = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
    weights = [part.reshape(-1) for weight, bias in layers for part in (bias, weight.T)]  # [inputs, outputs]
    return np.array(sizes, dtype=np.int64), np.concatenate(weights, dtype=np.float64)
