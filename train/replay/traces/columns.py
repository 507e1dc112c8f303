"""Columns of a trace read into memory, in the order of its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ....collect.schema import arrow_schema
from ....collect.store import Trace
from ....policies.contract import Array
from ....policies.errors import TraceError

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
        sequence, anchor = read_columns(trace, {"sequence": np.int64, "anchor": np.int64}).values()
        order = np.lexsort((anchor, sequence))  # by the last key first
        sequence, anchor = sequence[order], anchor[order]
        key, start, count = np.unique(sequence, return_index=True, return_counts=True)
        within = np.arange(len(anchor)) - np.repeat(start, count)
        follows = np.array_equal(anchor - np.repeat(anchor[start], count), within)
        twice = bool(((np.diff(anchor) == 0) & (np.diff(sequence) == 0)).any())
        if twice or (trace.header.has_every_anchor and not follows):
            raise TraceError(f"--traces: {trace.folder} misses anchors of a text or has one twice; collect it again")
        return cls(order, np.argsort(order), anchor, start, count, key, follows)  # the second one is the inverse


def read_columns(
    trace: Trace, kinds: Mapping[str, Any], place: Array | None = None, into: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Return columns as arrays [N] or [N, K], by name.

    They are read some rows at a time, so that no more than the arrays themselves must fit into memory, and all of them in one
    pass: to open a file takes as long as to read a column of a thousand rows.

    Args:
        trace: that has them.
        kinds: of the numbers, by column; None = as stored.
        place: [N], where each row goes; None = they stay in their order.
        into: what columns are written to, in place of new arrays.

    Raises:
        TraceError: a row lacks one.
    """
    schema, given = arrow_schema(trace.header), into or {}
    rows = trace.row_count if place is None else len(place)
    made: dict[str, Array] = {}
    for name, kind in kinds.items():
        of = schema.field(name).type
        shape, each = ((rows, of.list_size), of.value_type) if pa.types.is_fixed_size_list(of) else ((rows,), of)
        made[name] = given[name] if name in given else np.empty(shape, each.to_pandas_dtype() if kind is None else kind)
    start = 0
    for batch in trace.batches(list(kinds), BLOCK_ROWS):
        rows_here = slice(start, start + len(batch))
        here = rows_here if place is None else place[rows_here]
        for name, out in made.items():
            part = batch.column(name)
            if part.null_count:
                raise TraceError(f"--traces: {trace.folder} has rows without {name}; collect it again")
            flat = part.flatten() if pa.types.is_fixed_size_list(part.type) else part
            values = flat.to_numpy(zero_copy_only=False)  # arrow packs booleans as bits
            out[here] = values.reshape(len(batch), *out.shape[1:])
        start += len(batch)
    return made


def read_texts(trace: Trace, names: Sequence[str], rows: Array) -> list[list[str]]:
    """Return columns of texts at these rows [S]."""
    found: list[dict[int, str]] = [{} for _ in names]
    wanted, start = np.sort(rows), 0
    for batch in trace.batches(names, BLOCK_ROWS):
        here = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, start + len(batch))]
        for name, texts in zip(names, found, strict=True):
            texts |= zip(here.tolist(), map(str, batch.column(name).take(here - start).to_pylist()), strict=True)
        start += len(batch)
    return [[texts[row] for row in rows.tolist()] for texts in found]
