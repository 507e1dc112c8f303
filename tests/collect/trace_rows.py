"""The rows of a trace as tests look at them."""

from __future__ import annotations

from typing import Any

from specstop.collect.store import Trace


def numpy_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return rows by column name, as numpy has them; made of whole columns, since a row of a set takes a millisecond."""
    columns = trace.rows.with_format("numpy")[:]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
