"""Calibration of the nodes of a tree, on the product along the path: by depth, and by rank among siblings."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import PolicyError
from ..tree_rules import kernels
from .calibration import Array, Calibrator


class PathCalibrator(Calibrator):
    """P = sigmoid(scale_d logit(parent_chance sigmoid(l)) + tilt_d l + shift_{d,r}), never more than `parent_chance`.

    `parent_chance` is the calibrated chance of all that comes before, l the head's logit at depth d of a node of rank r. The
    bare product takes it that what is read at a node says nothing about the nodes before it. It does: after a wrong token the
    draft is often as sure as after a right one. So what is calibrated is the chance of the whole path.

    Args:
        table: [D + 1, 2 + R] float32, by depth 0..D: scale, tilt, and the shifts of rank 0..R-1. What lies beyond is taken
            from its end.
    """

    name: ClassVar[str] = "path"

    def __init__(self, table: Array) -> None:
        super().__init__()
        if table.ndim != 2 or table.shape[0] < 1 or table.shape[1] < 3 or not np.isfinite(table).all():
            raise PolicyError("calibration: expected by depth a scale, a tilt and shifts by rank, all finite")
        self.kind, self.knots = self.name, table
        self._table = table.astype(np.float64)

    def maps(self, depth: int, ranks: Array) -> Array:
        """Return [B, 3], scale, tilt and shift of the branches of a depth, given their ranks [B]."""
        row = self._table[min(depth, len(self._table) - 1)]
        shift = row[2 + np.minimum(ranks, len(row) - 3)]  # ranks beyond the table count as its last
        return np.stack([np.full(len(shift), row[0]), np.full(len(shift), row[1]), shift], 1)

    def of(self, parent_chance: Array, logits: Array, depth: int, ranks: Array) -> Array:
        """Return [..., B] chances of whole paths.

        Args:
            parent_chance: [..., B] chance of what comes before.
            logits: [..., B] of the head.
            depth: of the branches.
            ranks: [B] of the branches.
        """
        both = np.broadcast_arrays(parent_chance, logits)
        parents, scores = (np.ascontiguousarray(v, dtype=np.float64).reshape(-1, len(ranks)) for v in both)
        out = np.empty(scores.shape)
        kernels().path_chances(parents, scores, self.maps(depth, ranks), out)
        return out.reshape(both[0].shape)

    def __call__(self, logits: Array) -> Array:
        """Return the chances [B] of first branches of rank 0, 1, ..."""
        return self.of(np.ones(logits.shape), logits, 1, np.arange(logits.shape[-1]))
