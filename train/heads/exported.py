"""From what was fitted to the arrays of the head that runs, with the range that each scalar had in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from ...policies.contract import Array
from ...policies.features import TOKEN_FEATURES, Kind, feature
from .rows import FitRows

UNBOUNDED = (*TOKEN_FEATURES, "depth")
"""Features that are held within no range: an id is no amount, and depths beyond the trace are what heads extrapolate to."""


_FLOAT_MAX = float(np.finfo(np.float32).max)


def exported(
    tensors: Mapping[str, Tensor | Array], names: Sequence[str] = (), rows: FitRows | None = None
) -> dict[str, Array]:
    """Return the arrays of a head: what was fitted, and the ranges of its scalars where the rows are known.

    Args:
        tensors: what was fitted.
        names: F scalar features.
        rows: that the head was fitted on.
    """
    arrays = {name: np.ascontiguousarray(np.asarray(values)) for name, values in tensors.items()}
    return with_ranges(arrays, *ranges(names, rows.features, rows.depth)) if names and rows is not None else arrays


def ranges(names: Sequence[str], features: Tensor, depth: Tensor) -> tuple[Array, Array]:
    """Return the least and the greatest value [F] that each feature had in some rows, NaN where it is not bounded.

    Args:
        names: F features.
        features: [M, F] of the rows.
        depth: [M] of the rows: at depth 0 PRE and POST features are not known.
    """
    values, drawn = features.numpy(), depth.numpy() > 0
    sides = np.full((2, len(names)), np.nan, dtype=np.float32)
    for at, name in enumerate(names):
        # At depth 0 such columns hold zeros that stand for nothing, which must not widen a range.
        known = drawn if feature(name).kind in (Kind.PRE, Kind.POST) else slice(None)
        column = values[known, at]
        column = column[np.isfinite(column)]
        if name not in UNBOUNDED and len(column):
            sides[:, at] = column.min(), column.max()
    return sides[0], sides[1]


def with_ranges(tensors: Mapping[str, Array], low: Array, high: Array) -> dict[str, Array]:
    """Return the tensors of a head with ranges [F]; NaN or infinite = no bound. See `Head`."""
    ends = ((low, -_FLOAT_MAX), (high, _FLOAT_MAX))  # tensors are finite
    sides = [np.nan_to_num(side, nan=end).clip(-_FLOAT_MAX, _FLOAT_MAX).astype(np.float32) for side, end in ends]
    return {**tensors, "low": sides[0], "high": sides[1]}
