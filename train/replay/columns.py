"""Columns and hidden states of a trace, read into memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ...collect.schema import arrow_schema
from ...collect.store import Trace
from ...policies.contract import Array
from ...policies.errors import TraceError
from ...policies.features import HIDDEN_STATES, Kind

BLOCK_ROWS = 1 << 15
"""Rows of scalar columns that are read at once."""

_BLOCK_BYTES = 1 << 25
"""Bytes of a hidden state that are read at once."""


def read_columns(
    trace: Trace,
    dtypes: Mapping[str, Any],
    position: Array | None = None,
    out: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """Return columns as arrays [N] or [N, K], by name.

    All columns are read in one pass, in blocks of rows, so that only the arrays themselves have to fit into memory.

    Args:
        trace: holds the columns.
        dtypes: of the arrays, by column; None = as stored.
        position: [N] index at which each row is stored; None = the order of the trace.
        out: arrays to write to, by column; others are allocated.

    Raises:
        TraceError: a row has no value in one of the columns.
    """
    schema, count = arrow_schema(trace.header), trace.row_count if position is None else len(position)
    columns: dict[str, Array] = {}
    for name, dtype in dtypes.items():
        kind = schema.field(name).type
        is_list = pa.types.is_fixed_size_list(kind)
        shape, scalar = ((count, kind.list_size), kind.value_type) if is_list else ((count,), kind)
        column = None if out is None else out.get(name)
        columns[name] = np.empty(shape, dtype or scalar.to_pandas_dtype()) if column is None else column
    start = 0
    for batch in trace.batches(list(dtypes), BLOCK_ROWS):
        block = slice(start, start + len(batch))
        target = block if position is None else position[block]
        for name, column in columns.items():
            values = batch.column(name)
            if values.null_count:
                raise TraceError(f"--traces: {trace.folder} has rows without {name}; collect it again")
            flat = values.flatten() if pa.types.is_fixed_size_list(values.type) else values
            # arrow packs booleans as bits, which numpy cannot view
            column[target] = flat.to_numpy(zero_copy_only=False).reshape(len(batch), *column.shape[1:])
        start += len(batch)
    return columns


def read_texts(trace: Trace, names: Sequence[str], rows: Array) -> list[list[str]]:
    """Return columns of strings at these rows [S] of the trace."""
    values: list[dict[int, str]] = [{} for _ in names]
    ascending, start = np.sort(rows), 0
    for batch in trace.batches(names, BLOCK_ROWS):
        block = ascending[np.searchsorted(ascending, start) : np.searchsorted(ascending, start + len(batch))]
        for name, column in zip(names, values, strict=True):
            column |= zip(block.tolist(), map(str, batch.column(name).take(block - start).to_pylist()), strict=True)
        start += len(batch)
    return [[column[row] for row in rows.tolist()] for column in values]


@dataclass(frozen=True)
class HiddenStates:
    """One hidden state of the rows of a trace, or of several traces. It is read on first use; subsets share the memory.

    Attributes:
        traces: hold the state.
        name: of the hidden state.
        index: [N] row in the traces, counted through all of them.
        load: returns the states of all rows of the traces, [rows, K, H] or [rows, H] float16.
    """

    traces: tuple[Trace, ...]
    name: str
    index: Tensor
    load: Callable[[], Tensor]

    @classmethod
    def of(cls, traces: Sequence[Trace], name: str, index: Tensor) -> HiddenStates:
        """Return a hidden state of these traces; arguments as of the class."""
        return cls(tuple(traces), name, index, functools.cache(functools.partial(_read_states, tuple(traces), name)))

    @property
    def width(self) -> int:
        """H."""
        return self.traces[0].header.hidden[self.name]

    @property
    def of_nodes(self) -> bool:
        """Whether each node has a state, rather than each anchor."""
        return HIDDEN_STATES[self.name] is not Kind.ANCHOR

    def at(self, row: Tensor, node: Tensor | None = None) -> Tensor:
        """Return [R, H] float16 of rows [R], and of nodes [R] unless it is a state of anchors."""
        values, index = self.load(), self.index[row]
        return values[index, node] if self.of_nodes else values[index]

    def subset(self, row: Tensor) -> HiddenStates:
        """Return the states of these rows."""
        return HiddenStates(self.traces, self.name, self.index[row], self.load)

    @staticmethod
    def concatenate(parts: Sequence[HiddenStates]) -> HiddenStates:
        """Return the states of all parts, one after the other."""
        starts = np.cumsum([0, *(sum(trace.row_count for trace in part.traces) for part in parts[:-1])]).tolist()
        index = torch.cat([part.index + start for part, start in zip(parts, starts, strict=True)])
        return HiddenStates.of([trace for part in parts for trace in part.traces], parts[0].name, index)


def _read_states(traces: Sequence[Trace], name: str) -> Tensor:
    shape = traces[0].header.hidden_shape(name)
    block = max(1, _BLOCK_BYTES // (2 * math.prod(shape)))  # float16: two bytes each
    states = np.empty((sum(trace.row_count for trace in traces), *shape), dtype=np.float16)
    start = 0
    for trace in traces:
        for batch in trace.batches([name], block):
            # Unlike `values`, `flatten` respects that a block may be a slice.
            numbers = batch.column(0).flatten().to_numpy(zero_copy_only=False)
            states[start : start + len(batch)] = numbers.reshape(-1, *shape)
            start += len(batch)
    return torch.from_numpy(states)


def policy_states(states: HiddenStates, row: Tensor, nodes: Tensor | None) -> np.ndarray[Any, Any]:
    """Return [R, B, H] float32, a hidden state as a policy receives it at nodes [B] of rows [R].

    Before any node (`nodes` None, B = 1) a state of nodes is 0.
    """
    width = 1 if nodes is None else len(nodes)
    if nodes is None and states.of_nodes:
        return np.zeros((len(row), width, states.width), dtype=np.float32)
    at = None if nodes is None else nodes.repeat(len(row))
    flat: np.ndarray[Any, Any] = states.at(row.repeat_interleave(width), at).float().numpy()
    return flat.reshape(len(row), width, states.width)
