"""What heads are made of: the protocol, checks of their tensors, and scalars made fit for a linear layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from ..errors import PolicyError
from ..features import TOKEN_FEATURES, Kind, feature
from ..kernels import on_first_use

Array = np.ndarray[Any, Any]

Hidden = Mapping[str, Array]
"""Hidden states [R, H] float32 by name."""

NO_HIDDEN: Hidden = MappingProxyType({})

Layer = tuple[Array, Array]
"""A linear layer: weight [out, in] and bias [out]."""

RANGES = ("low", "high")
"""The tensors of a head that hold the range of each feature in training."""

_KINDS = {"feature": np.int64, "missing_left": np.bool_, "order": np.int64, "strides": np.int64}  # all others float32
_MOST = float(np.finfo(np.float32).max)


kernels = on_first_use("heads")


class Head(Protocol):
    """Scores a decision; what it needs travels as named tensors.

    Attributes:
        kind: its name in `HEADS`.
        sizes: H of each hidden state that it reads, by name; empty for a head of scalars.
        lag: its `accept` at depth j speaks of x_{j - lag}; 0 for all but SpecDec++'s, whose input has not seen x_j.
    """

    kind: str
    sizes: Mapping[str, int]
    lag: int

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2] float64, the logits of accept and next, of rows at one depth.

        Args:
            features: [R, F] float32, C-contiguous; NaN = unknown.
            depth: of the decision.
            hidden: [R, H] float32 of each hidden state that the head reads.
        """

    def tensors(self) -> dict[str, Array]:
        """Return everything that the head consists of."""


class TensorHead(ABC):
    """What heads that are made of tensors share; see `Head`.

    A head with the tensors `low` and `high` [F] float32 keeps each feature within that range before it scores: a number that
    training has never seen says nothing that a head has learned. Tokens have no range. At depth 0 what is not known yet has
    none either, since it is fed as 0. NaN, which is unknown, stays so.

    Args:
        names: F features.
        tensors: of the head.
        wanted: their names, but for the ranges.

    Attributes:
        bounds: [2, F] between which features are kept from depth 1 on.
        first_bounds: the same at depth 0.
    """

    kind: str
    sizes: Mapping[str, int] = MappingProxyType({})
    lag = 0

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array], wanted: Sequence[str]) -> None:
        ranged = any(name in tensors for name in RANGES)
        self._tensors = take(tensors, (*wanted, *RANGES) if ranged else wanted)
        self.bounds, self.first_bounds = _bounds(names, self._tensors)

    def tensors(self) -> dict[str, Array]:
        """Return the head's tensors."""
        return dict(self._tensors)

    @abstractmethod
    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2], accept and next; see `Head`."""


def with_ranges(tensors: Mapping[str, Array], low: Array, high: Array) -> dict[str, Array]:
    """Return a head's tensors with the range [low, high] of each feature; see `TensorHead`.

    Args:
        tensors: of the head.
        low, high: [F], least and largest in training; NaN or infinite = no bound.
    """
    # `take` wants every tensor finite, so the ends of single precision stand for no bound.
    sides = {
        name: np.nan_to_num(np.asarray(side, dtype=np.float32), nan=most, neginf=-_MOST, posinf=_MOST)
        for name, side, most in zip(RANGES, (low, high), (-_MOST, _MOST), strict=True)
    }
    return {**tensors, **sides}


def _bounds(names: Sequence[str], tensors: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return [2, F] float32 from depth 1 on, and at depth 0."""
    none = np.repeat(np.array([[-np.inf], [np.inf]], dtype=np.float32), len(names), axis=1)
    if RANGES[0] not in tensors:
        return none, none
    low, high = (tensors[name] for name in RANGES)
    for name in RANGES:
        expect(tensors[name], (len(names),), name)
    if (low > high).any():
        raise PolicyError("weights: expected low to be at most high everywhere")
    token = np.array([name in TOKEN_FEATURES for name in names], dtype=bool)
    drafted = np.array([feature(name).kind in (Kind.PRE, Kind.POST) for name in names], dtype=bool)
    later = np.where(token, none, np.stack([low, high]))
    return later, np.where(drafted, none, later)


class Basis:
    """Scalars made fit for a linear layer: probabilities also as log-odds, all standardised, unknown ones 0.

    Args:
        names: F features.
        mean, scale: [F'] of the expanded columns, F' = F + number of probabilities.

    Attributes:
        odds: [.] int64, places of the probabilities among the features.
        first_mask: [F'] float32, 1 for the columns that are known at depth 0.
    """

    def __init__(self, names: Sequence[str], mean: Array, scale: Array) -> None:
        kinds = [feature(name) for name in names]
        self.odds = np.array([i for i, f in enumerate(kinds) if f.is_probability], dtype=np.int64)
        known = np.array([f.kind not in (Kind.PRE, Kind.POST) for f in kinds], dtype=np.float32)
        self.first_mask: Array = np.concatenate([known, known[self.odds]])
        self.mean, self.scale = mean, scale
        expect(mean, self.first_mask.shape, "mean")
        expect(scale, self.first_mask.shape, "scale")
        if not (scale > 0).all():
            raise PolicyError("weights: scale must be above 0 everywhere")
        self._open, _ = _bounds(names, {})

    @property
    def width(self) -> int:
        """F', the number of columns."""
        return len(self.mean)

    def expand(self, features: Array, bounds: Array | None = None) -> Array:
        """Return [R, F'] float32, the features [R, F] and the log-odds of the probabilities among them.

        Args:
            features: float32, C-contiguous.
            bounds: [2, F] float32, between which they are kept; None = as they are.
        """
        out = np.empty((len(features), self.width), dtype=np.float32)
        kernels().expand(features, self._open if bounds is None else bounds, self.odds, out)
        return out

    def __call__(self, features: Array, depth: int) -> Array:
        """Return [R, F'] float32 for features [R, F]; at depth 0 the columns that are not known yet are 0."""
        columns: Array = (self.expand(features) - self.mean) / self.scale
        return columns * self.first_mask if depth == 0 else columns

    def fold(self, weight: Array, bias: Array, first: bool) -> Layer:
        """Return the float64 layer that does on `expand` what this one does on the basis, at depth 0 if `first`."""
        # w (x - mean) / scale + b on raw x. A column that is masked at depth 0 has weight 0, so its mean leaves the bias too.
        scaled = weight.astype(np.float64) / self.scale * (self.first_mask if first else 1.0)
        return scaled, bias - scaled @ self.mean


def take(tensors: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """Return exactly the named tensors, all finite; a missing, unknown or non-finite one is a `PolicyError`."""
    if set(tensors) != set(names):
        odd = sorted(set(tensors) ^ set(names))
        raise PolicyError(f"weights: expected the tensors {', '.join(names)}; missing or unknown: {', '.join(odd)}")
    for name in names:
        kind = np.dtype(_KINDS.get(name, np.float32))
        if not isinstance(tensors[name], np.ndarray) or tensors[name].dtype != kind:
            raise PolicyError(f"weights: expected {name} as an array of {kind}, got {_kind_of(tensors[name])}")
        if kind == np.float32 and not np.isfinite(tensors[name]).all():
            raise PolicyError(f"weights: {name} has values that are not finite")
    return {name: tensors[name] for name in names}


def _kind_of(value: Any) -> str:
    return str(value.dtype) if isinstance(value, np.ndarray) else type(value).__name__


def expect(tensor: Array, shape: tuple[int, ...], name: str) -> None:
    """Raise `PolicyError` unless `tensor` has this shape."""
    if tensor.shape != shape:
        raise PolicyError(f"weights: expected {name} of shape {list(shape)}, got {list(tensor.shape)}")


def width_of(weight: Array) -> int:
    """Return the inputs of a layer: the last dimension of its weight [out, in]; 0 of a number."""
    return int(weight.shape[-1]) if weight.ndim else 0


def state_of(hidden: Hidden, name: str, size: int) -> Array:
    """Return the hidden states [R, H] called `name` as float32.

    Raises:
        PolicyError: there are none, or they are of another size: the head was fitted for another model.
    """
    if name not in hidden:
        raise PolicyError(f"the head reads {name}, which it was not given")
    states: Array = np.asarray(hidden[name], dtype=np.float32)
    if states.shape[-1] != size:
        raise PolicyError(f"the head reads {name} of size {size}, but this model's is {states.shape[-1]}")
    return states
