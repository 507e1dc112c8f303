"""From summaries to the columns that a policy reads, in its order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..kernels import on_first_use
from .definitions import FEATURES, Kind, feature
from .history import history_columns
from .summary import NONE, Array, Drawn, Need, Plan, Summary, wanted

kernels = on_first_use("rows")

_UNKNOWN = np.zeros((0, 1), dtype=np.float32)  # no row: the kernel ranks the scores itself


class Columns:
    """Computes the named ANCHOR, PRE and POST features of drawn tokens (of the anchor, for ANCHOR ones).

    Args:
        names: of the features.
        at: [F] the column that each fills; by default they follow one another.

    Attributes:
        plan: what is read of their rows.
    """

    def __init__(self, names: Sequence[str], at: Sequence[int] | None = None) -> None:
        self.names = tuple(names)
        need = Need.NOTHING
        for name in names:
            need |= feature(name).need
        self.plan = Plan(need)
        self._codes = np.array([FEATURES[name].code for name in names], dtype=np.int64)
        self._at = np.array(range(len(names)) if at is None else at, dtype=np.int64)

    def read(
        self,
        logits: Array,
        drawn: Drawn,
        temperature: float,
        out: Array,
        sampled: Array | None = None,
        scores: Array | None = None,
        best: Array | None = None,
    ) -> Array:
        """Write the columns of tokens to `out` [B, .] float32 from the rows themselves, without keeping a summary.

        Args:
            logits, drawn, temperature, sampled, scores, best: see `summarise`.

        Returns:
            [B] float64, the log-probability of each path, where a feature follows it; else none.

        Raises:
            PolicyError: noisy scores are needed, and there are none.
        """
        plan = self.plan
        ranks, most, shared, scale = wanted(plan, temperature, drawn, logits, sampled, scores, best)
        path = np.empty(len(drawn.ids)) if plan.path else NONE
        # Compiled code takes no None: an array that stands for nothing is of no length, or one that is not looked at.
        kernels().read_columns(
            logits,
            ranks,
            plan.spread,
            logits if scores is None else scores,
            most,
            shared,
            _UNKNOWN if best is None else best,
            logits if sampled is None else sampled,
            scale,
            drawn.ids,
            NONE if drawn.parent_path is None else drawn.parent_path,
            NONE if drawn.lead is None else drawn.lead,
            self._codes,
            self._at,
            temperature,
            path,
            out,
        )
        return path

    def write(self, summary: Summary, drawn: Drawn, temperature: float, out: Array) -> None:
        """Write the columns to `out` [B, .] float32."""
        if len(self._codes):
            kernels().write_columns(
                self._codes,
                self._at,
                summary.top,
                summary.stats,
                summary.best,
                drawn.ids,
                summary.numbers,
                temperature,
                out,
            )

    def __call__(self, summary: Summary, drawn: Drawn, temperature: float) -> Array:
        """Return [B, F] float32."""
        out = np.empty((len(drawn.ids), len(self._codes)), dtype=np.float32)
        self.write(summary, drawn, temperature, out)
        return out


class Layout:
    """Which columns of a policy's features each kind fills.

    Attributes:
        names: all of them, in the policy's order.
        anchor, node, history: names of that kind, in the same order (`node` = PRE and POST).
        anchor_at, node_at: their columns.
        anchor_columns, node_columns: what computes them.
        history_at, history_columns: [n] int64, theirs, and where they stand in `History.record`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        kinds = [feature(name).kind for name in names]
        node_at = [i for i, kind in enumerate(kinds) if kind in (Kind.PRE, Kind.POST)]
        anchor_at = [i for i, kind in enumerate(kinds) if kind is Kind.ANCHOR]
        history_at = [i for i, kind in enumerate(kinds) if kind is Kind.HISTORY]
        self.names = tuple(names)
        self.node = tuple(names[i] for i in node_at)
        self.anchor = tuple(names[i] for i in anchor_at)
        self.history = tuple(names[i] for i in history_at)
        self.anchor_at, self.node_at = anchor_at, node_at
        self.anchor_columns, self.node_columns = Columns(self.anchor, anchor_at), Columns(self.node, node_at)
        self.history_at = np.array(history_at, dtype=np.int64)
        self.history_columns = history_columns(self.history)

    def base(self, anchor: Array, history: Array) -> Array:
        """Return [S, F] float32 with the ANCHOR [S, .] and HISTORY [S, .] columns, the rest 0: what is known at depth 0."""
        out = np.zeros((len(anchor), len(self.names)), dtype=np.float32)
        out[:, self.anchor_at] = anchor
        out[:, self.history_at] = history
        return out
