"""Heads of linear layers: logistic regressions, a small network, and DynaSD's two heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..contract import Array
from ..errors import PolicyError
from ..features import DRAFT_HIDDEN, TOP
from .base import NO_HIDDEN, Basis, Head, Hidden, Layer, Shapes, basis_shapes, reduced, size_of

HARD_FEATURES = ("entropy", *(f"top{rank}" for rank in range(1, TOP + 1)))


class BasisHead(Head):
    """Linear layers on the columns of `basis`, with SiLU between them; `layers` from depth 1 on and at depth 0."""

    _kernel = "score_layers"
    basis: Basis
    layers: tuple[list[Layer], list[Layer]]

    def _set_layers(
        self, names: Sequence[str], layers: Sequence[Layer], first_weight: Array, first_bias: Array
    ) -> None:
        """Fold the basis into the first layer, which has other weights and another bias at depth 0."""
        (weight, bias), *rest = layers
        self.basis = Basis(names, self._tensors["mean"], self._tensors["scale"])
        entries = self.basis.fold(weight, bias, first=False), self.basis.fold(first_weight, first_bias, first=True)
        self.layers = [entries[0], *rest], [entries[1], *rest]
        later, first = ((self.bounds[i], self.basis.odds, *_pack(self.layers[i]), False) for i in (0, 1))
        self.arguments = later, first


class LinearHead(BasisHead):
    """Three logistic regressions on the basis: accept, next, and next at depth 0.

    Tensors: `mean` and `scale` [F'], `weight` [3, F'], `bias` [3].
    """

    kind = "logistic"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        shapes = basis_shapes(names)
        super().__init__(names, tensors, {**shapes, "weight": (3, *shapes["mean"]), "bias": (3,)})
        weight, bias = tensors["weight"], tensors["bias"]
        self._set_layers(names, [(weight[:2], bias[:2])], weight[[0, 2]], bias[[0, 2]])  # accept is unused at depth 0


class MLPHead(BasisHead):
    """A small network on the basis and a flag for depth 0, with two outputs.

    Tensors: `mean`, `scale`, and `weight.i` [out, in], `bias.i` [out] of layer i.
    """

    kind = "mlp"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        shapes = basis_shapes(names)
        super().__init__(names, tensors, {**shapes, **_layer_shapes(tensors, shapes["mean"][0] + 1, 2, self.kind)})
        (weight, bias), *rest = _layers(tensors)
        # The last input is the flag: 0 from depth 1 on, where it drops out; 1 at depth 0, where its weights join the bias.
        self._set_layers(names, [(weight[:, :-1], bias), *rest], weight[:, :-1], bias + weight[:, -1])


class SoftHead(Head):
    """DynaSD's soft model: from the draft's last hidden state to the chance min(1, p/q) of the token drawn from it.

    Linear layers with ReLU between them and one output, for `accept` and `next` alike; at depth 0 a constant. Inputs are not
    standardised. DynaSD (arXiv 2409.10644; code JackZeng0208/DynaSD, `inference/decision_models.py`: `DecisionModelV1`,
    `DecisionModelV1_Tinyllama`, `DecisionModelVTopk`).

    Tensors: `weight.i` [out, in], `bias.i` [out] of layer i; `first` [1], the logit at depth 0.
    """

    kind = "dynasd-soft"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        if names:
            raise PolicyError(f"{self.kind} head: expected no scalar features, got {', '.join(names)}")
        self.sizes = {DRAFT_HIDDEN: size_of(tensors, "weight.0")}
        shapes = _layer_shapes(tensors, self.sizes[DRAFT_HIDDEN], 1, self.kind)
        super().__init__(names, tensors, {**shapes, "first": (1,)})
        self._layers = _layers(tensors)
        kinds = ("linear", *["relu"] * (len(self._layers) - 1))
        self.reductions = {DRAFT_HIDDEN: [(kind, *layer) for kind, layer in zip(kinds, self._layers, strict=True)]}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], twice the same; see `Head`."""
        values = hidden.get(reduced(DRAFT_HIDDEN))
        x = self._states(hidden, DRAFT_HIDDEN) if values is None else values
        if depth == 0:
            return np.full((len(x), 2), float(self._tensors["first"][0]))
        if values is None:
            for i, (weight, bias) in enumerate(self._layers):
                x = (np.maximum(x, 0.0) if i else x) @ weight.T + bias
        return np.repeat(x.astype(np.float64), 2, axis=1)


class HardHead(Head):
    """DynaSD's hard model: from entropy and top-10 probabilities to whether the drawn token is accepted; see `SoftHead`."""

    kind = "dynasd-hard"
    _kernel = "score_layers"

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array]) -> None:
        if tuple(names) != HARD_FEATURES:
            raise PolicyError(
                f"{self.kind} head: expected the features {', '.join(HARD_FEATURES)}, got {', '.join(names)}"
            )
        super().__init__(names, tensors, {**_layer_shapes(tensors, len(names), 1, self.kind), "first": (1,)})
        *rest, (weight, bias) = _layers(tensors)
        later = [*rest, (weight.repeat(2, 0), bias.repeat(2, 0))]  # the kernel has two outputs
        first = [(np.zeros((2, len(names))), tensors["first"].repeat(2))]
        no_odds = np.zeros(0, dtype=np.int64)
        self.arguments = (
            (self.bounds[0], no_odds, *_pack(later), True),
            (self.bounds[1], no_odds, *_pack(first), True),
        )


def _layers(tensors: Mapping[str, Array]) -> list[Layer]:
    """Return the layers `weight.i`, `bias.i`."""
    count = sum(name.startswith("weight.") for name in tensors)
    return [(tensors[f"weight.{i}"], tensors[f"bias.{i}"]) for i in range(count)]


def _layer_shapes(tensors: Mapping[str, Array], inputs: int, outputs: int, kind: str) -> Shapes:
    """Return the shapes of `weight.i` and `bias.i` from `inputs` to `outputs`, the inner widths as in `tensors`."""
    shapes: dict[str, tuple[int, ...]] = {}
    count, width = sum(name.startswith("weight.") for name in tensors), inputs
    for i in range(count):
        size = outputs if i == count - 1 else size_of(tensors, f"bias.{i}")
        shapes |= {f"weight.{i}": (size, width), f"bias.{i}": (size,)}
        width = size
    if not count:
        raise PolicyError(f"{kind} head: expected the tensors weight.0 and bias.0 of a layer")
    return shapes


def _pack(layers: Sequence[Layer]) -> tuple[Array, Array]:
    """Return the sizes and weights of layers for `kernels.heads.score_layers`."""
    sizes = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
    weights = [part.reshape(-1) for weight, bias in layers for part in (bias, weight.T)]  # [inputs, outputs]
    return np.array(sizes, dtype=np.int64), np.concatenate(weights, dtype=np.float64)
