"""Calibration of the nodes of a tree, on the product along the path: by depth, and by rank among siblings."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .calibration import Calibrator
from .errors import PolicyError
from .tree_rule import Array

_EDGE = 1e-6


class PathCalibrator(Calibrator):
    """P = sigmoid(scale_d logit(above sigmoid(l)) + tilt_d l + shift_{d,r}), never more than `above`.

    `above` is the calibrated chance of all that comes before, l the head's logit at depth d of a node of rank r. The bare
    product takes it that what is read at a node says nothing about the nodes above it. It does: behind a wrong token the
    draft is often as sure as behind a right one. So what is calibrated is the chance of the whole path.

    Args:
        table: [D + 1, 2 + R], by depth 0..D: scale, tilt, and the shifts of rank 0..R-1. What lies beyond is taken from its
            end.
    """

    name: ClassVar[str] = "path"

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        if table.dim() != 2 or table.shape[0] < 1 or table.shape[1] < 3 or not bool(table.isfinite().all()):
            raise PolicyError("calibration: expected by depth a scale, a tilt and shifts by rank, all finite")
        self.kind, self.knots = self.name, table
        self._table = table.double().numpy()

    @property
    def scale(self) -> float | None:
        """None: one number does not say it."""
        return None

    def of(self, above: Array, logits: Array, depth: int, ranks: Array) -> Array:
        """Return [..., B] chances of whole paths.

        Args:
            above: [..., B] chance of what comes before.
            logits: [..., B] of the head.
            depth: of the branches.
            ranks: [B] of the branches.
        """
        scale, tilt, *_ = row = self._table[min(depth, len(self._table) - 1)]
        shift = row[2 + np.minimum(ranks, len(row) - 3)]
        product = np.clip(above / (1.0 + np.exp(-np.clip(logits, -60.0, 60.0))), _EDGE, 1.0 - _EDGE)
        odds = scale * np.log(product / (1.0 - product)) + tilt * logits + shift
        out: Array = np.minimum(1.0 / (1.0 + np.exp(-np.clip(odds, -60.0, 60.0))), above)
        return out

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the chances [B] of first branches of rank 0, 1, ..."""
        values = logits.double().numpy()
        return torch.from_numpy(self.of(np.ones_like(values), values, 1, np.arange(logits.shape[-1])))
