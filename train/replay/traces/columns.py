"""Columns of a trace read into memory, in the order of its texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ....collect.schema import arrow_schema
from ....collect.store.folder import Trace
from ....policies.errors import TraceError

Array = np.ndarray[Any, Any]

BLOCK_ROWS = 1 << 15
"""Of a column, read at once."""


@dataclass(frozen=True)
class Order:
    """In which order the rows of a trace are kept: text by text, in each by anchor.

    Attributes:
        of: [N] row of the trace by place; `place` [N] the other way round.
        anchor: [N], in order.
        start, count: of each text, its first row and how many it has.
        key: [texts] number of each sequence.
        follows: every anchor of a text is there, one after the other.
    """

    of: Array
    place: Array
    anchor: Array
    start: Array
    count: Array
    key: Array
    follows: bool

    @classmethod
    def read(cls, trace: Trace) -> Order:
        """Return the order of a trace.

        Raises:
            TraceError: see `trace_arrays`.
        """
        sequence, anchor = (read_column(trace, name, np.int64) for name in ("sequence", "anchor"))
        order = np.lexsort((anchor, sequence))  # by the last key first
        sequence, anchor = sequence[order], anchor[order]
        key, start, count = np.unique(sequence, return_index=True, return_counts=True)
        within = np.arange(len(anchor)) - np.repeat(start, count)
        follows = np.array_equal(anchor - np.repeat(anchor[start], count), within)
        twice = bool(((np.diff(anchor) == 0) & (np.diff(sequence) == 0)).any())
        if twice or (trace.header.has_every_anchor and not follows):
            raise TraceError(f"--traces: {trace.folder} misses anchors of a text or has one twice; collect it again")
        return cls(order, np.argsort(order), anchor, start, count, key, follows)  # the second one is the inverse


def read_column(trace: Trace, name: str, kind: Any, place: Array | None = None, out: Array | None = None) -> Array:
    """Return a column as an array [N] or [N, K].

    It is read some rows at a time, so that no more than the array itself must fit into memory.

    Args:
        trace: that has it.
        name: of the column.
        kind: of the numbers; None = as stored.
        place: [N], where each row goes; None = they stay in their order.
        out: written to, in place of a new array.
    """
    of = arrow_schema(trace.header).field(name).type
    if pa.types.is_fixed_size_list(of):
        shape, each = [trace.row_count, of.list_size], of.value_type
    else:
        shape, each = [trace.row_count], of
    made = np.empty(shape, each.to_pandas_dtype() if kind is None else kind) if out is None else out
    start = 0
    for part in trace.blocks(name, BLOCK_ROWS):
        flat = part.flatten() if pa.types.is_fixed_size_list(of) else part
        values = flat.to_numpy(zero_copy_only=False)  # arrow packs booleans as bits
        here = slice(start, start + len(part))
        made[here if place is None else place[here]] = values.reshape(len(part), *shape[1:])
        start += len(part)
    return made


def read_texts(trace: Trace, name: str, rows: Array) -> list[str]:
    """Return a column of texts at these rows [S]."""
    found: dict[int, str] = {}
    wanted, start = np.sort(rows), 0
    for part in trace.blocks(name, BLOCK_ROWS):
        here = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, start + len(part))]
        found |= zip(here.tolist(), map(str, part.take(here - start).to_pylist()), strict=True)
        start += len(part)
    return [found[row] for row in rows.tolist()]
