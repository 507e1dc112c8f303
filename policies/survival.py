"""Survival that means what it says: the running product of `accept`, put right at each depth.

Each factor may be calibrated and the product still be off: what is known at depth j also tells about the tokens before it,
and a product multiplies what its factors have in common. So the product is mapped at each depth, from the first one on,
S_j = g_j(S_{j-1} accept_j), each g_j fitted with those before it in place (sequential temperature scaling of the confidence
heads in DSpark; METHODS of calibration there search a temperature, here any monotone table may stand). A table is at most 32
straight pieces: no logarithm, no loop, the same for one row as for thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .calibration import Calibrator
from .errors import PolicyError

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

    def __init__(self, tables: Tensor) -> None:
        ok = tables.dim() == 4 and tables.shape[2] == 2 and tables.shape[3] >= 2 and 0 < tables.numel() <= MOST
        if not ok or tables.dtype != torch.float32:
            raise PolicyError(f"calibration: expected survival tables [L, K, 2, n], got {list(tables.shape)}")
        self.tables = tables
        self._maps = [[_built(table) for table in row] for row in tables]

    @property
    def depth(self) -> int:
        """K."""
        return int(self.tables.shape[1])

    @property
    def changed(self) -> list[int]:
        """The depths at which the product from depth 1 on is changed."""
        return [depth for depth, table in enumerate(self._maps[0], 1) if table is not None]

    @property
    def changes(self) -> bool:
        """Whether any table does anything."""
        return any(table is not None for row in self._maps for table in row)

    def by_depth(self, first: int) -> Sequence[Calibrator | None]:
        """Return the tables at depths 0..K of a product that begins at depth `first` (0 is as good as 1); None = as it is."""
        start = max(first, 1)
        return [None, *(self._maps[start - 1] if start <= len(self._maps) else [None] * self.depth)]


def _built(table: Tensor) -> Calibrator | None:
    calibrator = Calibrator("isotonic", knots=table)  # refuses what is not monotone
    return None if torch.equal(table[0], table[1]) else calibrator


def unchanged(starts: int, depth: int) -> Tensor:
    """Return tables [L, K, 2, n] that change nothing."""
    line = torch.linspace(0.0, 1.0, KNOTS)
    return torch.stack([line, line]).expand(starts, depth, 2, KNOTS).clone()
