"""Calibration: monotone maps from a head's logits, and from products of its probabilities, to probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .contract import Array
from .errors import PolicyError
from .kernels import on_first_use

KINDS = ("identity", "temperature", "isotonic")
NO_PIECES: Array = np.zeros((4, 0))

_MAX_SIZE = 1 << 20

decisions = on_first_use("decisions")
trees = on_first_use("trees")


class Calibrator:
    """A monotone map from logits to probabilities.

    Args:
        kind: "identity", "temperature" (sigmoid of logit / T) or "isotonic" (piecewise linear in the logit).
        temperature: T.
        knots: [2, n] float32, the logits (increasing) and the probabilities (not decreasing) of an isotonic map.

    Attributes:
        pieces: float64; [1, 1] the factor of the logit in a sigmoid, or [4, n + 1] upper bound, start, value and slope of
            each piece of an isotonic map, which is constant outside its knots.
    """

    def __init__(self, kind: str = "identity", temperature: float = 1.0, knots: Array | None = None) -> None:
        if kind not in KINDS or not 0 < temperature < math.inf:
            raise PolicyError(
                f"calibration: expected {', '.join(KINDS)} at a temperature above 0, not {kind} at {temperature}"
            )
        self.kind, self.temperature = kind, temperature
        self.knots: Array = np.zeros((2, 0), dtype=np.float32) if knots is None else knots
        self.pieces = _pieces(self.knots) if kind == "isotonic" else np.array([[1.0 / temperature]])

    def __call__(self, logits: Array) -> Array:
        """Return the float64 probabilities, of the same shape as `logits`."""
        scores = np.ascontiguousarray(logits, dtype=np.float64)
        out = np.empty(scores.shape)
        decisions().calibrate(scores.reshape(-1), self.pieces, out.reshape(-1))
        return out


def _pieces(knots: Array) -> Array:
    """Return `Calibrator.pieces` of an isotonic map; raise `PolicyError` unless it is monotone within [0, 1]."""
    ok = knots.ndim == 2 and knots.shape[0] == 2 and knots.shape[1] >= 2 and bool(np.isfinite(knots).all())
    if not ok or (np.diff(knots, axis=1) < 0).any() or (knots[1] < 0).any() or (knots[1] > 1).any():
        raise PolicyError("calibration: expected knots [2, n], n of 2 or more, increasing, the second row in [0, 1]")
    x, y = knots.astype(np.float64)
    step = np.diff(x)
    slope = np.where(step > 0, np.diff(y) / np.maximum(step, 1e-12), 0.0)
    return np.stack(
        [np.append(x, np.inf), np.append(x[:1], x), np.append(y[:1], y), np.concatenate([[0.0], slope, [0.0]])]
    )


class SurvivalMaps:
    """Recalibrates the running product of `accept` by a monotone table at each depth: S_j = g_j(S_{j-1} accept_j).

    The product of calibrated factors is not calibrated, since the features at depth j also depend on the tokens before it.
    (Sequential temperature scaling of the confidence heads in DSpark, with tables instead of temperatures.)

    Args:
        tables: [L, K, 2, n] float32, knots (probabilities before and after, neither decreasing) for products that begin at
            depth 1..L, at depths 1..K. A table of equal rows changes nothing.
    """

    def __init__(self, tables: Array) -> None:
        ok = tables.ndim == 4 and tables.shape[2] == 2 and tables.shape[3] >= 2 and 0 < tables.size <= _MAX_SIZE
        if not ok or tables.dtype != np.float32:
            raise PolicyError(f"calibration: expected survival tables [L, K, 2, n], got {list(tables.shape)}")
        self.tables, self.depth = tables, int(tables.shape[1])
        self._pieces = [[NO_PIECES if np.array_equal(*table) else _pieces(table) for table in row] for row in tables]

    @property
    def changed(self) -> list[int]:
        """The depths at which a product that begins at depth 1 is changed."""
        return [depth for depth, piece in enumerate(self._pieces[0], 1) if piece.size]

    def by_depth(self, first: int) -> Sequence[Array]:
        """Return the maps at depths 0..K of a product that begins at depth `first`; `NO_PIECES` = unchanged."""
        start = max(first, 1)
        return [NO_PIECES, *(self._pieces[start - 1] if start <= len(self._pieces) else [NO_PIECES] * self.depth)]


class PathCalibrator(Calibrator):
    """Calibrates whole paths of a tree: P = sigmoid(scale_d logit(p sigmoid(l)) + tilt_d l + shift_{d,r}), at most p.

    p is the calibrated chance of the path to the parent, l the head's logit at depth d of a node of rank r. The plain product
    is wrong because the draft is often as confident after a wrong token as after a right one.

    Args:
        table: [D + 1, 2 + R] float32, by depth 0..D: scale, tilt, and the shifts of rank 0..R-1. The last row and the last
            shift apply to all deeper and lower nodes.
    """

    name = "path"

    def __init__(self, table: Array) -> None:
        super().__init__()
        if table.ndim != 2 or table.shape[0] < 1 or table.shape[1] < 3 or not np.isfinite(table).all():
            raise PolicyError("calibration: expected by depth a scale, a tilt and shifts by rank, all finite")
        self.kind, self.knots, self._table = self.name, table, table.astype(np.float64)

    def maps(self, depth: int, ranks: Array) -> Array:
        """Return [B, 3], scale, tilt and shift of the branches of a depth with these ranks [B]."""
        row = self._table[min(depth, len(self._table) - 1)]
        shift = row[2 + np.minimum(ranks, len(row) - 3)]
        return np.stack([np.full(len(shift), row[0]), np.full(len(shift), row[1]), shift], 1)

    def of(self, parent_chance: Array, logits: Array, depth: int, ranks: Array) -> Array:
        """Return [..., B] chances of whole paths, given p and l [..., B] and the ranks [B] of the branches of a depth."""
        pair = np.broadcast_arrays(parent_chance, logits)
        parents, scores = (np.ascontiguousarray(v, dtype=np.float64).reshape(-1, len(ranks)) for v in pair)
        out = np.empty(scores.shape)
        trees().path_chances(parents, scores, self.maps(depth, ranks), out)
        return out.reshape(pair[0].shape)
