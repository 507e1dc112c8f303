"""Validation of the values of a trace: bounds of columns, and consistency of the rows of each text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from ..policies.contract import Array
from ..policies.errors import TraceError
from ..policies.features import FEATURES, TOKEN_FEATURES
from .schema import MAX_COUNT, NO_TOKEN, TIMES, Header

TEXT_COLUMNS = ("sequence", "anchor", "text_tokens", "prompt_tokens", "accepted_length", "accepted")
"""Columns that `check_texts` reads."""

_ROUNDING = 1e-3
"""Tolerance for sums of float32 probabilities that exceed 1."""


def column_array(column: pa.ChunkedArray) -> Array:
    """Return a column as an array [N], or [N, nodes] for fixed-size lists."""
    if not pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.to_numpy())
    width = column.type.list_size
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return np.concatenate(parts).reshape(-1, width) if parts else np.zeros((0, width))


def check_values(header: Header, rows: pa.Table | pa.RecordBatch, where: str) -> None:
    """Check that columns have no nulls and that their numbers are finite and in range.

    Args:
        header: header of the trace.
        rows: any rows and columns of the trace.
        where: file name for messages.

    Raises:
        TraceError: a value is invalid; the message names the column, its bounds and the value.
        pa.ArrowInvalid: a text is not valid UTF-8.
    """
    for name in rows.schema.names:
        column = rows.column(name)
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            flat = chunk.flatten() if pa.types.is_fixed_size_list(chunk.type) else chunk
            if chunk.null_count or flat.null_count:
                raise TraceError(
                    f"traces: {where}: expected a value in each row of {name}, got a null; collect it again"
                )
            if pa.types.is_string(flat.type):
                flat.validate(full=True)  # raises ArrowInvalid for invalid UTF-8
            elif len(flat) and not pa.types.is_boolean(flat.type):
                _check_numbers(header, name, flat.to_numpy(zero_copy_only=False), where)


def _check_numbers(header: Header, name: str, values: Array, where: str) -> None:
    if values.dtype == np.float16:  # comparisons of float16 are emulated and slow: compare the bits of the exponent
        if ((values.view(np.uint16) & 0x7C00) == 0x7C00).any():
            raise TraceError(f"traces: {where}: expected finite numbers in {name}; collect it again")
        return
    largest = float(np.finfo(np.float32).max)
    bounds = {
        **dict.fromkeys(("prompt_tokens", "anchor", "committed", "decisions", "backlog"), (0, MAX_COUNT)),
        **dict.fromkeys(("draft_prob", "target_prob", "overlap", "accept_chance", "next_chance"), (0, 1 + _ROUNDING)),
        **dict.fromkeys(("accepted_length", "depth"), (0, header.depth)),
        **dict.fromkeys(TOKEN_FEATURES, (NO_TOKEN, MAX_COUNT)),
        **dict.fromkeys(TIMES, (-1.0, 1e9)),
        "sequence": (0, header.prompts * header.draws - 1),
        "text_tokens": (1, MAX_COUNT),
        "tokens": (NO_TOKEN, (header.vocabulary or MAX_COUNT) - 1),
        "branch_rank": (0, len(header.topology)),
    }
    least, most = bounds.get(name, (-largest, largest))
    low, high = values.min(), values.max()  # NaN if any value is NaN
    if not (least <= low and high <= most):
        kind = "finite numbers" if name in FEATURES and name not in bounds else "numbers"
        invalid = low if not least <= low else high
        raise TraceError(
            f"traces: {where}: expected {kind} from {least:g} to {most:g} in {name}, got {invalid:g}; collect it again"
        )


def check_texts(header: Header, columns: Mapping[str, Array], where: str) -> None:
    """Check that the rows of each text are consistent.

    Args:
        header: header of the trace.
        columns: `TEXT_COLUMNS` as arrays [N], and `accepted` as [N, nodes].
        where: folder name for messages.

    Raises:
        TraceError: an anchor is out of range, missing or duplicated, or `accepted` is not a path of the tree.
    """
    sequence, anchor, text, prompt, length, accepted = (columns[name] for name in TEXT_COLUMNS)
    order = np.lexsort((anchor, sequence))  # by sequence, then by anchor
    sequence, anchor, text, prompt = sequence[order], anchor[order], text[order], prompt[order]
    same = np.diff(sequence) == 0
    step = np.diff(anchor)[same]
    first, last = np.append(True, ~same), np.append(~same, True)
    path = np.concatenate([np.ones((len(accepted), 1), dtype=bool), accepted], 1)  # the anchor before the nodes
    tree = header.tree
    for wrong, expected in (
        ((anchor >= text).any(), "each anchor before the end of its text (anchor < text_tokens)"),
        ((step == 0).any(), "no duplicate anchors in a text"),
        ((np.diff(text)[same] != 0).any(), "the same text_tokens in all rows of a text"),
        ((np.diff(prompt)[same] != 0).any(), "the same prompt_tokens in all rows of a text"),
        (
            header.has_every_anchor
            and ((step != 1).any() or (anchor[first] != 1).any() or (anchor[last] + 1 != text[last]).any()),
            "every anchor of each text, from 1 to text_tokens - 1",
        ),
        ((accepted.sum(1) != length).any(), "accepted_length nodes in `accepted`"),
        ((path[:, 1:] & ~path[:, list(tree.parent[1:])]).any(), "accepted nodes only below accepted nodes"),
        (
            not tree.is_chain and any((path[:, level].sum(1) > 1).any() for level in tree.levels),
            "at most one accepted node at each depth",
        ),
    ):
        if wrong:
            raise TraceError(f"traces: {where}: expected {expected}; a column is damaged, collect it again")
