"""The base class of heads, checks of their tensors, and the columns of linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import PolicyError
from ..features import TOKEN_FEATURES, Kind, feature
from ..kernels import on_first_use
from ..typing import Array

Hidden = Mapping[str, Array]
"""Hidden states [R, H] float32 by name."""

NO_HIDDEN: Hidden = MappingProxyType({})

Layer = tuple[Array, Array]
"""A linear layer: weight [out, in] and bias [out]."""

RANGES = ("low", "high")
_DTYPES = {"feature": np.int64, "missing_left": np.bool_, "order": np.int64, "strides": np.int64}  # others are float32
_FLOAT_MAX = float(np.finfo(np.float32).max)

kernels = on_first_use("heads")


class Head:
    """Scores decisions; consists of named tensors.

    `accept` scores x_j accepted, given the features at depth j and x_1..x_{j-1} accepted. `next` scores x_{j+1} accepted,
    given the same features and x_1..x_j accepted. At depth 0 only `next` has a meaning.

    With the tensors `low` and `high` [F] float32 each feature is clipped to its range in training. Tokens have no range, and
    at depth 0 PRE and POST features, which are 0 there, have none either. NaN (unknown) is kept.

    Args:
        names: F features.
        tensors: of the head.
        required: their names, except `RANGES`.

    Attributes:
        kind: name of the kind of head.
        sizes: H of each hidden state that it reads, by name.
        lag: `accept` at depth j refers to x_{j - lag}.
        bounds: [2, F] between which features are clipped, from depth 1 on and at depth 0.
    """

    kind: str
    sizes: Mapping[str, int] = MappingProxyType({})
    lag = 0
    _kernel: str
    _arguments: tuple[tuple[Any, ...], tuple[Any, ...]]  # of the kernel, from depth 1 on and at depth 0

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Array], required: Sequence[str]) -> None:
        ranged = any(name in tensors for name in RANGES)
        self._tensors = take_tensors(tensors, (*required, *RANGES) if ranged else required)
        self.bounds = _bounds(names, self._tensors)

    def tensors(self) -> dict[str, Array]:
        """Return everything that the head consists of."""
        return dict(self._tensors)

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """Return [R, 2] float64, the logits of accept and next, of rows at one depth.

        Args:
            features: [R, F] float32, C-contiguous; NaN = unknown.
            depth: of the decisions.
            hidden: [R, H] float32 of each hidden state that the head reads.
        """
        out = np.empty((len(features), 2))
        getattr(kernels(), self._kernel)(features, *self._arguments[depth == 0], out)
        return out


def with_ranges(tensors: Mapping[str, Array], low: Array, high: Array) -> dict[str, Array]:
    """Return the tensors of a head with ranges [F]; NaN or infinite = no bound. See `Head`."""
    sides = {
        name: np.nan_to_num(np.asarray(side, dtype=np.float32), nan=end, neginf=-_FLOAT_MAX, posinf=_FLOAT_MAX)
        for name, side, end in zip(RANGES, (low, high), (-_FLOAT_MAX, _FLOAT_MAX), strict=True)
    }
    return {**tensors, **sides}


def _bounds(names: Sequence[str], tensors: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return [2, F] float32 from depth 1 on, and at depth 0."""
    none = np.repeat(np.array([[-np.inf], [np.inf]], dtype=np.float32), len(names), axis=1)
    if RANGES[0] not in tensors:
        return none, none
    low, high = (check_shape(tensors, name, len(names)) for name in RANGES)
    if (low > high).any():
        raise PolicyError("weights: expected low to be at most high everywhere")
    is_token = np.array([name in TOKEN_FEATURES for name in names], dtype=bool)
    drafted = np.array([feature(name).kind in (Kind.PRE, Kind.POST) for name in names], dtype=bool)
    later = np.where(is_token, none, np.stack([low, high]))
    return later, np.where(drafted, none, later)


class Basis:
    """Columns of linear layers: the features, and the log-odds of the probabilities among them, standardised.

    Args:
        names: F features.
        mean, scale: [F'] of the columns, F' = F + number of probabilities.

    Attributes:
        odds: int64, indices of the probabilities.
        first_mask: [F'] float32, 1 for the columns that are known at depth 0.
    """

    def __init__(self, names: Sequence[str], mean: Array, scale: Array) -> None:
        kinds = [feature(name) for name in names]
        self.odds = np.array([i for i, f in enumerate(kinds) if f.is_probability], dtype=np.int64)
        known = np.array([f.kind not in (Kind.PRE, Kind.POST) for f in kinds], dtype=np.float32)
        self.first_mask: Array = np.concatenate([known, known[self.odds]])
        self.width = len(self.first_mask)
        self.mean, self.scale = (
            check_shape({"mean": mean, "scale": scale}, name, self.width) for name in ("mean", "scale")
        )
        if not (scale > 0).all():
            raise PolicyError("weights: scale must be above 0 everywhere")
        self._unbounded = _bounds(names, {})[0]

    def expand(self, features: Array, bounds: Array | None = None) -> Array:
        """Return the columns [R, F'] float32, not standardised, of features [R, F] clipped to `bounds` [2, F]."""
        out = np.empty((len(features), self.width), dtype=np.float32)
        kernels().expand(features, self._unbounded if bounds is None else bounds, self.odds, out)
        return out

    def __call__(self, features: Array, depth: Array | int) -> Array:
        """Return [R, F'] float32 of features [R, F] at depths [R]; at depth 0 the columns that are not known are 0."""
        columns: Array = (self.expand(features) - self.mean) / self.scale
        columns[np.broadcast_to(np.asarray(depth) == 0, len(columns))] *= self.first_mask
        return columns

    def fold(self, weight: Array, bias: Array, first: bool) -> Layer:
        """Return the float64 layer on `expand` that equals this layer on the basis, at depth 0 if `first`."""
        # w (x - mean) / scale + b on raw x. A column that is masked at depth 0 has weight 0, so its mean leaves the bias too.
        scaled = weight.astype(np.float64) / self.scale * (self.first_mask if first else 1.0)
        return scaled, bias - scaled @ self.mean


def take_tensors(tensors: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """Return exactly the named tensors; raise `PolicyError` if one is missing, unknown, not finite or of another type."""
    if odd := sorted(set(tensors) ^ set(names)):
        raise PolicyError(f"weights: expected the tensors {', '.join(names)}; missing or unknown: {', '.join(odd)}")
    for name in names:
        dtype, found = np.dtype(_DTYPES.get(name, np.float32)), getattr(tensors[name], "dtype", type(tensors[name]))
        if found != dtype:
            raise PolicyError(
                f"weights: expected {name} as an array of {dtype}, got {getattr(found, '__name__', found)}"
            )
        if dtype == np.float32 and not np.isfinite(tensors[name]).all():
            raise PolicyError(f"weights: {name} has values that are not finite")
    return {name: tensors[name] for name in names}


def check_shape(tensors: Mapping[str, Array], name: str, *shape: int) -> Array:
    """Return a tensor; raise `PolicyError` unless it has this shape."""
    if tensors[name].shape != shape:
        raise PolicyError(f"weights: expected {name} of shape {list(shape)}, got {list(tensors[name].shape)}")
    return tensors[name]


def size_of(tensor: Array, axis: int = -1) -> int:
    """Return the size of an axis; 0 if the tensor is a number."""
    return int(tensor.shape[axis]) if tensor.ndim else 0


def hidden_of(hidden: Hidden, name: str, size: int) -> Array:
    """Return the hidden states [R, H] called `name`; raise `PolicyError` if they are missing or of another size."""
    if name not in hidden:
        raise PolicyError(f"the head reads {name}, which it was not given")
    states: Array = np.asarray(hidden[name], dtype=np.float32)
    if states.shape[-1] != size:
        raise PolicyError(f"the head reads {name} of size {size}, but this model's is {states.shape[-1]}")
    return states
