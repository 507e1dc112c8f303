"""Survival that means what it says: the running product of `accept`, recalibrated at each depth.

Each factor may be calibrated and the product still be off: what is known at depth j also tells about the tokens before it,
and a product multiplies what its factors have in common. So the product is mapped at each depth, from the first one on,
S_j = g_j(S_{j-1} accept_j), each g_j fitted with those before it in place (sequential temperature scaling of the confidence
heads in DSpark, which searches a temperature, where any monotone table may stand here). A table is at most 32
straight pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import PolicyError
from .calibration import NO_PIECES, Array, Calibrator

KNOTS = 33
"""Knots of a table."""

STARTS = 3
"""First factors that tables are kept for: a policy that is asked from depth 3 on multiplies from there."""

MOST = 1 << 20


class SurvivalMaps:
    """A monotone table for each depth, by the depth at which the product begins.

    Args:
        tables: [L, K, 2, n] knots (probabilities before and after, neither decreasing) for products that begin at depth
            1..L, at depths 1..K. A table of equal rows changes nothing.

    Raises:
        PolicyError: another shape, or a table that is not monotone within [0, 1].
    """

    def __init__(self, tables: Array) -> None:
        ok = tables.ndim == 4 and tables.shape[2] == 2 and tables.shape[3] >= 2 and 0 < tables.size <= MOST
        if not ok or tables.dtype != np.float32:
            raise PolicyError(f"calibration: expected survival tables [L, K, 2, n], got {list(tables.shape)}")
        self.tables = tables
        self._pieces = [[_pieces(table) for table in row] for row in tables]

    @property
    def depth(self) -> int:
        """K."""
        return int(self.tables.shape[1])

    @property
    def changed(self) -> list[int]:
        """The depths at which the product from depth 1 on is changed."""
        return [depth for depth, table in enumerate(self._pieces[0], 1) if table.size]

    @property
    def changes(self) -> bool:
        """Whether any table does anything."""
        return any(table.size > 0 for row in self._pieces for table in row)

    def by_depth(self, first: int) -> Sequence[Array]:
        """Return the pieces [4, n] (`Calibrator.pieces`) that the product is mapped by at depths 0..K, none where it is left
        as it is, for a product that begins at depth `first` (0 is as good as 1)."""
        start = max(first, 1)
        return [NO_PIECES, *(self._pieces[start - 1] if start <= len(self._pieces) else [NO_PIECES] * self.depth)]


def _pieces(table: Array) -> Array:
    pieces = Calibrator("isotonic", knots=table).pieces  # refuses what is not monotone
    return NO_PIECES if np.array_equal(table[0], table[1]) else pieces


def unchanged(starts: int, depth: int) -> Array:
    """Return tables [L, K, 2, n] float32 that change nothing."""
    line = np.linspace(0.0, 1.0, KNOTS, dtype=np.float32)
    return np.broadcast_to(line, (starts, depth, 2, KNOTS)).copy()
