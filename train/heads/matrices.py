"""What XGBoost reads: rows in memory, or in pieces from disk where they are too many."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb
from torch import Tensor

from ...policies.errors import InputError
from .rows import FitRows

OUT_OF_CORE = 20_000_000
"""Rows from which XGBoost reads pieces from disk unless told otherwise."""

PIECE = 1_000_000
"""Rows of a piece."""


@contextmanager
def matrices(
    parts: Sequence[FitRows], label: str, names: Sequence[str], outside: bool, piece: int = PIECE
) -> Iterator[list[xgb.DMatrix]]:
    """Yield a matrix of each part's rows that have this label, the first one to fit on.

    Args:
        parts: training rows, and held-out ones.
        label: "accepted" or "followed".
        names: features.
        outside: keep the quantised pages in files; at any time one of them is in memory.
        piece: rows of a page.

    Raises:
        InputError: the installed XGBoost has no external memory.
    """
    used = [part.has(label) for part in parts]
    if not outside:
        yield [
            xgb.DMatrix(
                part.features[use].numpy(), part.label(label)[use].float().numpy(), feature_names=_unique(names)
            )
            for part, use in zip(parts, used, strict=True)
        ]
        return
    if not hasattr(xgb, "ExtMemQuantileDMatrix"):
        raise InputError(f"--out-of-core: expected xgboost 3.0 or later, found {xgb.__version__}; upgrade it")
    with tempfile.TemporaryDirectory(prefix="specstop-xgboost-") as folder:
        made: list[xgb.DMatrix] = []
        for at, (part, use) in enumerate(zip(parts, used, strict=True)):
            pieces = Pieces(part, use, label, names, Path(folder) / f"{label}-{at}", piece)
            # `ref`: held-out rows are quantised at the cuts of the rows to fit on, as the trees' splits are.
            made.append(xgb.ExtMemQuantileDMatrix(pieces, ref=made[0] if made else None))
        yield made
        made.clear()  # the files go with the folder


class Pieces(xgb.DataIter):
    """Rows a piece at a time: only one is copied out of the rows at any time.

    Args:
        rows: all of them.
        use: [M] bool, those that have the label.
        label: name of the label.
        names: features.
        cache: prefix of the files that XGBoost writes.
        piece: rows of a piece.
    """

    def __init__(
        self, rows: FitRows, use: Tensor, label: str, names: Sequence[str], cache: Path, piece: int = PIECE
    ) -> None:
        # XGBoost goes through the pieces several times, and calls `reset` before each.
        super().__init__(cache_prefix=str(cache))
        self._rows, self._names, self._label = rows, _unique(names), label
        self._parts = use.nonzero()[:, 0].split(piece)
        self._next = 0

    def next(self, input_data: Callable[..., Any]) -> bool:
        """Hand over the next piece; False after the last one."""
        if self._next == len(self._parts):
            return False
        at = self._parts[self._next]
        labels = self._rows.label(self._label)[at].numpy().astype(np.float32)
        input_data(data=self._rows.features[at].numpy(), label=labels, feature_names=self._names)
        self._next += 1
        return True

    def reset(self) -> None:
        """Begin again."""
        self._next = 0


def _unique(names: Sequence[str]) -> list[str] | None:
    """Return the names; None where one repeats, which XGBoost refuses."""
    return list(names) if len(set(names)) == len(names) else None
