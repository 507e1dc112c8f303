"""Recorded hidden states: read when they are first asked for, and kept on disk where they are too many for memory."""

from __future__ import annotations

import math
import tempfile
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ....collect.store import Trace
from ....policies.errors import TraceError
from ....policies.features import HIDDEN_STATES, Kind

MEMORY_BYTES = 1 << 30
"""A hidden state of a trace that takes more is decoded into a file without a name, which goes when it is no longer used."""

_BLOCK_BYTES = 1 << 25


class StoredHidden:
    """One hidden state of all rows of a trace, or of some of them.

    Args:
        trace: that holds it.
        name: of the hidden state.
        index: [N] by row, the row of the trace; None = they are the same.

    Attributes:
        width: H.
        of_nodes: whether each node has one, not each anchor.
    """

    def __init__(self, trace: Trace, name: str, index: Tensor | None = None) -> None:
        self.name, self._index = name, index
        self._source = _Source(trace, name)
        self.width = trace.header.hidden[name]
        self.of_nodes = HIDDEN_STATES[name] is not Kind.ANCHOR

    def at(self, row: Tensor, node: Tensor | None = None) -> Tensor:
        """Return [R, H] float16 of rows [R], and of nodes [R] unless it is the anchor's."""
        row = row if self._index is None else self._index[row]
        values = self._source.values
        return values[row, node] if self.of_nodes else values[row]

    def subset(self, row: Tensor) -> StoredHidden:
        """Return those of these rows alone; what was read is shared."""
        made = StoredHidden.__new__(StoredHidden)
        made.__dict__.update(self.__dict__)
        made._index = row if self._index is None else self._index[row]
        return made


def seen_states(stored: StoredHidden, row: Tensor, nodes: Tensor | None) -> np.ndarray[Any, Any]:
    """Return [R, B, H] float32, what a policy sees of a hidden state at nodes [B] of rows [R]; of None, before any node.

    There one of nodes is 0.
    """
    width = 1 if nodes is None else len(nodes)
    if nodes is None and stored.of_nodes:
        return np.zeros((len(row), width, stored.width), dtype=np.float32)
    where = None if nodes is None else nodes.repeat(len(row))
    found: np.ndarray[Any, Any] = stored.at(row.repeat_interleave(width), where).float().numpy()
    return found.reshape(len(row), width, stored.width)


class _Source:
    """The hidden state in the order of the trace."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    @cached_property
    def values(self) -> Tensor:
        """[rows, N, H] or [rows, H] float16.

        Raises:
            TraceError: it fits neither into memory nor on the disk for temporary files.
        """
        each = self._trace.header.hidden_shape(self._name)
        shape = (self._trace.row_count, *each)
        block = max(1, _BLOCK_BYTES // (2 * math.prod(each)))  # float16: two bytes each
        if 2 * math.prod(shape) <= MEMORY_BYTES:
            out = np.empty(shape, dtype=np.float16)
            start = 0
            for batch in self._trace.batches([self._name], block):
                out[start : start + len(batch)] = _numbers(batch.column(0)).reshape(-1, *each)
                start += len(batch)
            return torch.from_numpy(out)
        with tempfile.TemporaryFile(prefix="specstop-") as file:
            try:
                for batch in self._trace.batches([self._name], block):
                    file.write(_numbers(batch.column(0)).tobytes())
                file.flush()
            except OSError as error:
                raise TraceError(
                    f"--traces: {self._name} of {self._trace.folder} takes {2 * math.prod(shape) / 1e9:.1f} GB, which "
                    f"{tempfile.gettempdir()} cannot hold ({error.strerror}); set TMPDIR to a folder on a larger disk"
                ) from None
            # Copy-on-write: torch wants memory that could be written.
            # The mapping outlives the file, which has no name and goes with it.
            return torch.from_numpy(np.memmap(file, dtype=np.float16, mode="c", shape=shape))


def _numbers(column: pa.FixedSizeListArray) -> np.ndarray[Any, Any]:
    """Return the numbers of a column, one row after the other."""
    # Unlike `values`, `flatten` heeds that a block may be a slice.
    values: np.ndarray[Any, Any] = column.flatten().to_numpy(zero_copy_only=False)
    return values
