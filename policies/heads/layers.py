"""Heads of linear layers on scalars: logistic regressions and a small network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..contract import Array
from ..errors import PolicyError
from .base import Basis, Head, Layer, Shapes, basis_shapes, size_of


class LayersHead(Head):
    """Linear layers on the columns of `basis`, with SiLU between them; `layers` from depth 1 on and at depth 0."""

    _kernel = "score_layers"
    basis: Basis
    layers: tuple[list[Layer], list[Layer]]

    def _set_layers(
        self, names: Sequence[str], layers: Sequence[Layer], first_weight: Array, first_bias: Array
    ) -> None:
        """Fold the basis into the first layer, whose weight and bias are others at depth 0."""
        (weight, bias), *rest = layers
        self.basis = basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        later, first = basis.fold(weight, bias, first=False), basis.fold(first_weight, first_bias, first=True)
        self.layers = [later, *rest], [first, *rest]
        both = zip(self.bounds, self.layers, strict=True)
        later_arguments, first_arguments = ((bounds, basis.odds, *pack_layers(stack), False) for bounds, stack in both)
        self._arguments = later_arguments, first_arguments


class LinearHead(LayersHead):
    """Three logistic regressions on the basis: accept, next, and next at depth 0.

    Tensors: `mean` and `scale` [F'], `weight` [3, F'], `bias` [3].
    """

    kind = "logistic"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        shapes = basis_shapes(names)
        super().__init__(names, tensors, {**shapes, "weight": (3, *shapes["mean"]), "bias": (3,)})
        weight, bias = tensors["weight"], tensors["bias"]
        # At depth 0 accept has no meaning; its weights only fill the place.
        self._set_layers(names, [(weight[:2], bias[:2])], weight[[0, 2]], bias[[0, 2]])


class MLPHead(LayersHead):
    """A small network on the basis and a flag for depth 0, with two outputs.

    Tensors: `mean`, `scale`, and `weight.i` [out, in], `bias.i` [out] of layer i.
    """

    kind = "mlp"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        shapes = basis_shapes(names)
        super().__init__(names, tensors, {**shapes, **layer_shapes(tensors, shapes["mean"][0] + 1, 2, self.kind)})
        (weight, bias), *rest = layers_of(tensors)
        # The last input is the flag: 0 from depth 1 on, where it drops out; 1 at depth 0, where its weights join the bias.
        self._set_layers(names, [(weight[:, :-1], bias), *rest], weight[:, :-1], bias + weight[:, -1])


def layer_shapes(tensors: Mapping[str, Array], inputs: int, outputs: int, kind: str) -> Shapes:
    """Return the shapes of `weight.i` and `bias.i` from `inputs` to `outputs`, the inner widths as in `tensors`."""
    shapes: dict[str, tuple[int, ...]] = {}
    width = inputs
    for i in range(sum(name.startswith("weight.") for name in tensors)):
        shapes[f"weight.{i}"] = size, _ = size_of(tensors, f"bias.{i}"), width
        shapes[f"bias.{i}"] = (size,)
        width = size
    if width != outputs or not shapes:
        plural, found = "s" * (outputs > 1), width if shapes else "no layer"
        raise PolicyError(f"{kind} head: expected {outputs} output{plural}, got {found}")
    return shapes


def layers_of(tensors: Mapping[str, Array]) -> list[Layer]:
    """Return the layers `weight.i`, `bias.i`."""
    count = sum(name.startswith("weight.") for name in tensors)
    return [(tensors[f"weight.{i}"], tensors[f"bias.{i}"]) for i in range(count)]


def pack_layers(layers: Sequence[Layer]) -> tuple[Array, Array]:
    """Return the sizes and weights of layers for `kernels.heads.score_layers`."""
    sizes = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
    weights = [part.reshape(-1) for weight, bias in layers for part in (bias, weight.T)]  # [inputs, outputs]
    return np.array(sizes, dtype=np.int64), np.concatenate(weights, dtype=np.float64)
