"""Traces of one pair as one: of several temperatures, or of several sets of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....collect.schema import Header
from ....collect.store import Trace
from ....policies.errors import TraceError
from .arrays import BY_ROW, BY_SEQUENCE, NAMES, TraceArrays, trace_arrays
from .hidden_states import StoredHidden

_ALIKE = (
    "pair", "vocabulary", "eos", "sampling", "verification", "label", "topology", "max_new_tokens", "collector", "texts",
    "mix", "draws", "off_text",
)  # fmt: skip
_INSTEAD = ", all with --verification match where temperature 0 is among them"


def temperatures(traces: Sequence[Trace]) -> tuple[float, ...]:
    """Return the temperatures of the traces, each once, rising."""
    return tuple(sorted({trace.header.temperature for trace in traces}))


def joined_arrays(
    traces: Sequence[Trace],
    features: Sequence[str] | None = None,
    hidden: Sequence[str] | None = None,
    extra: Sequence[str] = (),
) -> TraceArrays:
    """Read traces of chains as one: the texts of each follow those of the one before; `temperature` is a column.

    A prompt that is in several traces keeps its id, so that splits by prompt keep its texts together.

    Args:
        traces: one or more, of one pair and recorded alike.
        features: only these; by default every one that all of them have.
        hidden: hidden states that will be asked for; by default every one that all of them have.
        extra: other columns to keep.

    Raises:
        TraceError: they differ in more than temperature, seed and prompts, or are of trees.
    """
    if not traces:
        raise TraceError("--traces: expected at least one trace")
    first = traces[0]
    for other in traces[1:]:
        check_alike(first.header, other.header, str(first.folder), str(other.folder))
    if not first.header.tree.is_chain:
        raise TraceError(
            f"--traces: {first.folder} is of a tree; give --rule gain, which learns the nodes to verify, or collect without "
            "--tree"
        )
    return join_arrays([trace_arrays(trace, features, extra, hidden) for trace in traces])


def check_alike(first: Header, second: Header, where: str, other: str, names: Sequence[str] = _ALIKE) -> None:
    """Refuse traces that differ in any of `names`: they cannot be one."""
    if differ := first.differing(second, names):
        instead = _INSTEAD if "verification" in differ[0] else ""
        raise TraceError(
            f"--traces: {where} and {other} differ in {differ[0]}; expected one pair, recorded alike at several temperatures "
            f"or on several prompts{instead}"
        )


def join_arrays(parts: Sequence[TraceArrays]) -> TraceArrays:
    """Return the texts of all parts, one after the other; see `joined_arrays`."""
    first = parts[0]
    if len(parts) == 1:
        return first
    every = [name for name in first.columns if all(name in part.columns for part in parts)]
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in every}
    # The header is the first part's, so that what parts may differ in has to be a column.
    columns["temperature"] = torch.cat([part.column("temperature") for part in parts])
    names: dict[str, Any] = {name: [value for part in parts for value in getattr(part, name)] for name in NAMES}
    joined = {name: _joined([getattr(part, name) for part in parts]) for name in (*BY_SEQUENCE, *BY_ROW)}
    if any(part.anchors is not None for part in parts):  # one that misses anchors makes all of them be looked up
        joined["anchors"] = torch.cat([part.every_anchor for part in parts])
    return dataclasses.replace(
        first,
        **names,
        offset=joined["rows"].cumsum(0) - joined["rows"],
        columns=columns,
        extra={name: torch.cat([part.extra[name] for part in parts]) for name in first.extra},
        hidden=_joined_hidden(parts),
        **joined,
    )


def _joined_hidden(parts: Sequence[TraceArrays]) -> dict[str, StoredHidden]:
    starts = torch.tensor([0, *(len(part.cut) for part in parts)]).cumsum(0)
    every = [name for name in parts[0].hidden if all(name in part.hidden for part in parts)]
    return {name: JoinedHidden([part.hidden[name] for part in parts], starts) for name in every}


class JoinedHidden(StoredHidden):
    """One hidden state of several traces.

    Args:
        parts: of each.
        starts: [P + 1] first row of each, and how many rows there are.
    """

    def __init__(self, parts: Sequence[StoredHidden], starts: Tensor) -> None:
        self.name, self.width, self.of_nodes = parts[0].name, parts[0].width, parts[0].of_nodes
        self._parts, self._starts, self._index = list(parts), starts, None

    def at(self, row: Tensor, node: Tensor | None = None) -> Tensor:
        """Return [R, H] float16 of rows [R], and of nodes [R] unless it is the anchor's."""
        row = row if self._index is None else self._index[row]
        out = torch.zeros(len(row), self.width, dtype=torch.float16)
        owner = torch.searchsorted(self._starts, row, right=True) - 1  # right: a first row is its part's own
        for at, part in enumerate(self._parts):
            mine = owner == at
            if bool(mine.any()):
                out[mine] = part.at(row[mine] - self._starts[at], None if node is None else node[mine])
        return out

    def subset(self, row: Tensor) -> JoinedHidden:
        """Return those of these rows alone; what was read is shared."""
        made = JoinedHidden(self._parts, self._starts)
        made._index = row if self._index is None else self._index[row]
        return made


def _joined(values: Sequence[Tensor | None]) -> Any:
    known = [value for value in values if value is not None]
    return torch.cat(known) if len(known) == len(values) else None
