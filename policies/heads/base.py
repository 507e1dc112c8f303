"""The base class of heads, the validation of their tensors, and the columns of linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..contract import Array
from ..errors import PolicyError
from ..features import TOKEN_FEATURES, Kind, feature
from ..kernels import on_first_use

Hidden = Mapping[str, Array]  # [R, H] float32 by name
Layer = tuple[Array, Array]  # weight [out, in] and bias [out]
Shapes = Mapping[str, tuple[int, ...]]

Reduction = Sequence[tuple[str, Array, Array]]
"""Layers that read nothing but a hidden state: (kind, weight [out, in], bias [out]). The kinds are `linear`, `relu` (linear
after ReLU) and `residual` (x + SiLU of linear)."""

NO_HIDDEN: Hidden = MappingProxyType({})
_DTYPES = {"feature": np.int64, "missing_left": np.bool_, "order": np.int64, "strides": np.int64}  # others are float32

kernels = on_first_use("heads")


class Head:
    """Scores decisions; consists of named tensors.

    `accept` scores x_j accepted, given the features at depth j and x_1..x_{j-1} accepted; `next` scores x_{j+1} accepted,
    given the same features and x_1..x_j accepted. At depth 0 only `next` has a meaning. With the optional tensors `low` and
    `high` [F] float32 each feature is clipped to its range in training; tokens have no range, nor have PRE and POST features
    at depth 0, where they are 0.

    Args:
        names: F features.
        tensors: of the head.
        shapes: of the tensors, except `low` and `high`.

    Attributes:
        kind: name of the kind of head.
        sizes: H of each hidden state that it reads, by name.
        reductions: by name of a hidden state, the layers that a caller may apply where the state is, as on a GPU. It then
            passes their output [R, W] under the name `reduced(name)` instead of the state.
        lag: `accept` at depth j refers to x_{j - lag}.
        bounds: [2, F] between which features are clipped, from depth 1 on and at depth 0.
        arguments: of the kernel, from depth 1 on and at depth 0.
    """

    kind: str
    sizes: Mapping[str, int] = MappingProxyType({})
    reductions: Mapping[str, Reduction] = MappingProxyType({})
    lag = 0
    arguments: tuple[tuple[Any, ...], tuple[Any, ...]] = (), ()
    _kernel: str

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array], shapes: Shapes) -> None:
        if has_ranges := not tensors.keys().isdisjoint(("low", "high")):
            shapes = {**shapes, "low": (len(names),), "high": (len(names),)}
        _validate_tensors(tensors, shapes)
        self._tensors = dict(tensors)
        later = first = unbounded = _unbounded(len(names))
        if has_ranges:
            if (tensors["low"] > tensors["high"]).any():
                raise PolicyError("weights: expected low to be at most high everywhere")
            is_token = np.array([name in TOKEN_FEATURES for name in names], dtype=bool)
            later = np.where(is_token, unbounded, np.stack([tensors["low"], tensors["high"]]))
            first = np.where(_is_drafted(names), unbounded, later)
        self.bounds = later, first

    def tensors(self) -> dict[str, Array]:
        """Return the tensors of the head by name."""
        return dict(self._tensors)

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return the logits of accept and next [R, 2] float64 of rows at one depth.

        Args:
            features: [R, F] float32, C-contiguous; NaN = unknown.
            depth: of the decisions.
            hidden: [R, H] float32 of each hidden state that the head reads.
        """
        out = np.empty((len(features), 2))
        getattr(kernels(), self._kernel)(features, *self.arguments[depth == 0], out)
        return out

    def _states(self, hidden: Hidden, name: str) -> Array:
        """Return the hidden states [R, H] called `name`; raise `PolicyError` if they are missing or of another size."""
        states = np.asarray(hidden.get(name, _NO_STATES), dtype=np.float32)
        if states.shape[-1] != self.sizes[name]:
            size = states.shape[-1] or "none"
            raise PolicyError(f"the head reads {name} of size {self.sizes[name]}, but this model's is {size}")
        return states


def reduced(name: str) -> str:
    """Return the name under which a head receives the output of `Head.reductions` for a hidden state."""
    return f"{name} reduced"


_NO_STATES = np.zeros((0, 0), dtype=np.float32)


def _is_drafted(names: Sequence[str]) -> Array:
    """Return [F] bool, whether features are unknown at depth 0."""
    return np.array([feature(name).kind in (Kind.PRE, Kind.POST) for name in names], dtype=bool)


def _unbounded(width: int) -> Array:
    return np.repeat(np.array([[-np.inf], [np.inf]], dtype=np.float32), width, axis=1)


class Basis:
    """Columns of linear layers: the features, and the log-odds of the probabilities among them, standardised.

    Args:
        names: F features.
        mean, scale: [F'] float32 of the columns, F' = F + number of probabilities.

    Attributes:
        odds: int64, indices of the probabilities.
        first_mask: [F'] float32, 1 for the columns that are known at depth 0.
    """

    def __init__(self, names: Sequence[str], mean: Array, scale: Array) -> None:
        self.odds = np.array([i for i, name in enumerate(names) if feature(name).is_probability], dtype=np.int64)
        known = (~_is_drafted(names)).astype(np.float32)
        self.first_mask: Array = np.concatenate([known, known[self.odds]])
        self.mean, self.scale, self.width, self._unbounded = mean, scale, len(mean), _unbounded(len(names))

    def expand(self, features: Array, bounds: Array | None = None) -> Array:
        """Return the columns [R, F'] float32, not standardised, of features [R, F] clipped to `bounds` [2, F]."""
        out = np.empty((len(features), self.width), dtype=np.float32)
        kernels().expand(features, self._unbounded if bounds is None else bounds, self.odds, out)
        return out

    def fold(self, weight: Array, bias: Array, first: bool) -> Layer:
        """Return the float64 layer on `expand` that equals this layer on the basis, at depth 0 if `first`."""
        # w (x - mean) / scale + b on raw x. A column that is masked at depth 0 has weight 0, so its mean leaves the bias too.
        scaled = weight.astype(np.float64) / self.scale * (self.first_mask if first else 1.0)
        return scaled, bias - scaled @ self.mean


def basis_shapes(names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors `mean` and `scale` of a basis."""
    width = len(names) + sum(feature(name).is_probability for name in names)
    return {"mean": (width,), "scale": (width,)}


def size_of(tensors: Mapping[str, Array], name: str, axis: int = -1) -> int:
    """Return the size of an axis of a tensor; 0 if there is none."""
    shape: tuple[int, ...] = getattr(tensors.get(name), "shape", ())
    return shape[axis] if shape and axis < len(shape) else 0


def _validate_tensors(tensors: Mapping[str, Array], shapes: Shapes) -> None:
    """Raise `PolicyError` unless these are the tensors, of these shapes and their types, finite, and scales above 0."""
    if different := sorted(set(tensors) ^ set(shapes)):
        raise PolicyError(
            f"weights: expected the tensors {', '.join(shapes)}; missing or unknown: {', '.join(different)}"
        )
    for name, shape in shapes.items():
        tensor, dtype = np.asarray(tensors[name]), np.dtype(_DTYPES.get(name, np.float32))
        if tensor.dtype != dtype or tensor.shape != shape:
            actual = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise PolicyError(f"weights: expected {name} as {dtype} of shape {list(shape)}, got {actual}")
        is_scale = name.partition(".")[0] == "scale"
        if not np.isfinite(tensor).all() or (is_scale and not (tensor > 0).all()):
            raise PolicyError(f"weights: expected finite numbers in {name}{', above 0' * is_scale}")
