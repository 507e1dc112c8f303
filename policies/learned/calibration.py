"""From a head's logit to a probability that means what it says: identity, temperature or isotonic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import PolicyError
from ..kernels import on_first_use

Array = np.ndarray[Any, Any]

KINDS = ("identity", "temperature", "isotonic")

NO_PIECES: Array = np.zeros((4, 0))
"""Of a map that is no piecewise linear one."""


kernels = on_first_use("decisions")


class Calibrator:
    """A monotone map from logits to probabilities.

    Args:
        kind: "identity", "temperature" (sigmoid of logit / T) or "isotonic" (piecewise linear in the logit).
        temperature: T.
        knots: [2, n] float32, the logits (increasing) and the probabilities (not decreasing) of an isotonic map.

    Attributes:
        scale: what a sigmoid multiplies the logit with; 1 for an isotonic map, which reads it as it is.
        pieces: [4, n + 1] float64 of an isotonic map; see `kernels.decisions.calibrate`.
    """

    def __init__(self, kind: str = "identity", temperature: float = 1.0, knots: Array | None = None) -> None:
        if kind not in KINDS:
            raise PolicyError(f"unknown calibration {kind!r}; expected one of {', '.join(KINDS)}")
        if not 0 < temperature < math.inf:
            raise PolicyError(f"calibration: expected a temperature above 0, not {temperature}")
        self.kind, self.temperature = kind, temperature
        self.knots: Array = np.zeros((2, 0), dtype=np.float32) if knots is None else knots
        isotonic = kind == "isotonic"
        if isotonic and not _is_isotonic(self.knots):
            raise PolicyError(
                "calibration: expected knots [2, n], n of 2 or more, increasing, the second row in [0, 1]"
            )
        self.scale = 1.0 if isotonic else 1.0 / temperature
        self.pieces = _pieces(self.knots) if isotonic else NO_PIECES

    def __call__(self, logits: Array) -> Array:
        """Return the float64 probabilities, of the same shape as `logits`."""
        scores = np.ascontiguousarray(logits, dtype=np.float64)
        out = np.empty(scores.shape)
        kernels().calibrate(scores.reshape(-1), self.scale, self.pieces, out.reshape(-1))  # into `out`, by a view
        return out


def _is_isotonic(knots: Array) -> bool:
    """Whether both rows of the knots [2, n] rise, the second one within [0, 1]."""
    if knots.ndim != 2 or knots.shape[0] != 2 or knots.shape[1] < 2 or not np.isfinite(knots).all():
        return False
    return bool((np.diff(knots, axis=1) >= 0).all() and (knots[1] >= 0).all() and (knots[1] <= 1).all())


def _pieces(knots: Array) -> Array:
    """Return [4, n + 1]: upper bound, start, level and slope of each piece of the map, which is level outside its knots."""
    x, y = knots.astype(np.float64)
    step = np.diff(x)
    slope = np.where(step > 0, np.diff(y) / np.maximum(step, 1e-12), 0.0)  # numpy computes both sides
    return np.stack(
        [np.append(x, np.inf), np.append(x[:1], x), np.append(y[:1], y), np.concatenate([[0.0], slope, [0.0]])]
    )
