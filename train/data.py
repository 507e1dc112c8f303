"""A trace as tensors, in the order that replay and fitting walk it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..collect.schema import Header
from ..collect.store import Trace
from ..decode.noise import stream_key
from ..policies.errors import TraceError
from ..policies.features import Layout
from ..policies.history import HISTORY_FEATURES


@dataclass(frozen=True)
class TraceArrays:
    """Rows sorted by sequence and anchor: the anchors of sequence s are the rows offset[s], offset[s] + 1, ...

    Attributes:
        header: of the trace.
        prompt_ids, groups: [S] by sequence.
        keys: [S] int64, the stream keys, for randomised policies.
        offset, rows: [S] first row and number of rows.
        first_anchor: [S] the anchor of the first row.
        prompt_tokens: [S].
        text_tokens: [S] tokens of each text, EOS or the limit included.
        accepted: [N] accepted length A.
        tokens: [N, K] drawn by the draft.
        ends: [N, K] bool, nodes that drew EOS.
        cut: [N] bool.
        columns: [N] of each ANCHOR feature and [N, K] of each node feature.
    """

    header: Header
    prompt_ids: list[str]
    groups: list[str]
    keys: Tensor
    offset: Tensor
    rows: Tensor
    first_anchor: Tensor
    prompt_tokens: Tensor
    text_tokens: Tensor
    accepted: Tensor
    tokens: Tensor
    ends: Tensor
    cut: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """K of the trace."""
        return self.header.depth

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.prompt_ids)

    def column(self, name: str) -> Tensor:
        """Return a recorded feature: [N] for ANCHOR, [N, K] for PRE and POST; `TraceError` where it was not recorded."""
        if name not in self.columns:
            raise TraceError(
                f"the trace has no feature {name!r}; it has {', '.join(self.columns)}; collect it again with that feature"
            )
        return self.columns[name]

    def tensors(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ([N, anchor features], [N, K, node features]) of `names`, each in their order; HISTORY is left out."""
        layout = Layout(names)
        anchor, node = [self.column(n) for n in layout.anchor], [self.column(n) for n in layout.node]
        rows, depth = self.ends.shape
        return (
            torch.stack(anchor, -1) if anchor else torch.zeros(rows, 0),
            torch.stack(node, -1) if node else torch.zeros(rows, depth, 0),
        )

    def subset(self, keep: Sequence[int]) -> TraceArrays:
        """Return only the sequences `keep`, in that order."""
        at = torch.tensor(list(keep), dtype=torch.int64)
        counts = self.rows[at]
        index = torch.cat([torch.arange(int(n)) + o for o, n in zip(self.offset[at], counts, strict=True)])
        return TraceArrays(
            self.header,
            [self.prompt_ids[i] for i in keep],
            [self.groups[i] for i in keep],
            self.keys[at],
            counts.cumsum(0) - counts,
            counts,
            self.first_anchor[at],
            self.prompt_tokens[at],
            self.text_tokens[at],
            self.accepted[index],
            self.tokens[index],
            self.ends[index],
            self.cut[index],
            {name: values[index] for name, values in self.columns.items()},
        )


def trace_arrays(trace: Trace, features: Sequence[str] | None = None) -> TraceArrays:
    """Read a trace into memory.

    Args:
        trace: from `open_trace`.
        features: only these; by default every recorded one.

    Raises:
        TraceError: a sequence misses an anchor.
    """
    header = trace.header
    wanted = [*header.anchor_features, *header.features]
    if features is not None:
        wanted = [n for n in wanted if n in features]
    rows = trace.rows.with_format("numpy")
    sequence, anchor = np.asarray(rows["sequence"][:]), np.asarray(rows["anchor"][:])
    order = np.lexsort((anchor, sequence))
    sequence, anchor = sequence[order], anchor[order]
    _, start, count = np.unique(sequence, return_index=True, return_counts=True)
    inside = np.arange(len(order)) - np.repeat(start, count)
    if not np.array_equal(anchor - np.repeat(anchor[start], count), inside):
        raise TraceError(f"--traces: {trace.folder} misses anchors of a text or has one twice; collect it again")

    def read(name: str) -> np.ndarray[Any, Any]:
        return np.asarray(rows[name][:])[order]

    ids, groups = np.asarray(rows["prompt_id"][:])[order][start], np.asarray(rows["group"][:])[order][start]
    tokens = torch.from_numpy(read("tokens").astype(np.int64))
    return TraceArrays(
        header=header,
        prompt_ids=[str(x) for x in ids],
        groups=[str(x) for x in groups],
        keys=torch.tensor([stream_key(header.seed, str(name)) for name in ids]),
        offset=torch.from_numpy(start.astype(np.int64)),
        rows=torch.from_numpy(count.astype(np.int64)),
        first_anchor=torch.from_numpy(anchor[start].astype(np.int64)),
        prompt_tokens=torch.from_numpy(read("prompt_tokens")[start].astype(np.int64)),
        text_tokens=torch.from_numpy(read("text_tokens")[start].astype(np.int64)),
        accepted=torch.from_numpy(read("accepted_length").astype(np.int64)),
        tokens=tokens,
        ends=torch.isin(tokens, torch.tensor(header.eos, dtype=torch.int64)),
        cut=torch.from_numpy(read("cut").astype(bool)),
        columns={name: torch.from_numpy(read(name).astype(np.float32)) for name in wanted},
    )


def seen_features(arrays: TraceArrays, names: Sequence[str], row: Tensor, history: Tensor) -> Tensor:
    """Return [R, K + 1, F], what a policy with these features sees at depths 0..K of R rounds.

    Args:
        arrays: the trace.
        names: features.
        row: [R], the anchors' rows.
        history: [R, 4], the HISTORY features when the rounds began (`Replayed.history`).
    """
    layout = Layout(names)
    anchor, node = arrays.tensors(names)
    columns = [HISTORY_FEATURES.index(name) for name in layout.history]
    base = layout.base(anchor[row], history[:, columns])
    steps = [layout.step(base), *(layout.step(base, node[row, j]) for j in range(arrays.depth))]
    return torch.stack(steps, 1)
