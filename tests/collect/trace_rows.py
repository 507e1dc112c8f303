"""The rows of a trace as tests look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from specstop.collect.prompts import Prompt
from specstop.collect.schema import PromptTask
from specstop.collect.store import Trace
from specstop.decode.verify.noise import stream_key


def numpy_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return rows by column name, as numpy has them; made of whole columns, since a row of a set takes a millisecond."""
    columns = trace.rows.with_format("numpy")[:]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def by_anchor(trace: Trace) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the rows by (sequence, anchor), hidden states in their shapes."""
    rows = {}
    for row in numpy_rows(trace):
        for name in trace.header.hidden:
            row[name] = np.asarray(row[name], dtype=np.float16).reshape(trace.header.hidden_shape(name))
        rows[int(row["sequence"]), int(row["anchor"])] = row
    return rows


def tasks(prompts: Sequence[Prompt], ids: Sequence[list[int]]) -> list[PromptTask]:
    """Return the prompts as tasks of a collector."""
    return [PromptTask(i, p.id, p.group, ids[i], stream_key(0, p.id)) for i, p in enumerate(prompts)]


def assert_close(
    chunks: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], near: float = 2e-6, half: float = 2e-3
) -> None:
    """Assert that chunks of columns are equal, floating point numbers up to `near`, half precision up to `half`."""
    assert len(chunks) == len(others) > 0
    for one, other in zip(chunks, others, strict=True):
        assert set(one) == set(other)
        for name, values in one.items():
            if getattr(values, "dtype", None) in (np.float16, np.float32, np.float64):
                tolerance = half if values.dtype == np.float16 else near
                np.testing.assert_allclose(values, other[name], rtol=tolerance, atol=tolerance, err_msg=name)
            else:
                np.testing.assert_array_equal(values, other[name], err_msg=name)
