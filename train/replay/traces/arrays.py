"""A trace as tensors, in the order in which replay and fitting read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ....collect.schema import READS, UNKNOWN, Header, stream_name
from ....collect.store import Trace
from ....decode.topology import Topology
from ....decode.verify.noise import stream_key
from ....policies.arguments import as_list
from ....policies.contract import Array
from ....policies.errors import TraceError
from ....policies.features import HISTORY_FEATURES, SIBLING_FEATURES, Layout, base_features, complete_features
from .columns import Order, read_columns, read_texts
from .hidden_states import StoredHidden


@dataclass(frozen=True)
class TraceArrays:
    """Rows sorted by sequence and anchor: those of sequence s are the rows offset[s] .. offset[s] + rows[s] - 1.

    Attributes:
        header: of the trace.
        prompt_ids, samples, text_hashes, groups: [S] by sequence, see `collect.schema`.
        keys: [S] int64, the stream keys, for randomised policies.
        offset, rows: [S] first row and number of rows.
        first_anchor: [S] the anchor of the first row.
        prompt_tokens: [S].
        text_tokens: [S] tokens of each text, EOS or the limit included.
        accepted: [N] accepted length A.
        tokens: [N, K] drawn by the draft, K nodes.
        ends: [N, K] bool, nodes that drew EOS.
        cut: [N] bool.
        columns: [N] of each ANCHOR feature and [N, K] of each node feature.
        path: [N, K] bool, accepted nodes; None for chains, where the accepted length says it.
        drawn: [N, K] bool, nodes that a live run drafted; None = all.
        reads: [N] bool, rounds whose drafter reads the text, of two drafters of which one does not; None = all.
        anchors: [N], where a trace has not every anchor; None = they follow one another.
        extra: other columns that were asked for.
        hidden: hidden states, read when they are first asked for.
    """

    header: Header
    prompt_ids: list[str]
    samples: list[str]
    text_hashes: list[str]
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
    path: Tensor | None = None
    drawn: Tensor | None = None
    reads: Tensor | None = None
    anchors: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    hidden: dict[str, StoredHidden] = field(default_factory=dict)

    @cached_property
    def tree(self) -> Topology:
        """The topology; row 0 is the anchor, row i + 1 node i."""
        return self.header.tree

    @cached_property
    def depth(self) -> int:
        """K of the trace."""
        return self.tree.deepest

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.prompt_ids)

    @cached_property
    def clusters(self) -> list[str]:
        """[S], the prompt that each sequence is of: the hash of its text, or the prompt's id where the text is not known.

        Samples of a prompt, and equal texts under several ids, are one cluster. Splits and intervals are over clusters.
        """
        return [text or name for text, name in zip(self.text_hashes, self.prompt_ids, strict=True)]

    @cached_property
    def owner(self) -> Tensor:
        """[N] int64, the sequence of each row."""
        return torch.repeat_interleave(torch.arange(self.sequences), self.rows)

    @cached_property
    def every_anchor(self) -> Tensor:
        """[N] int64, the anchor of each row."""
        if self.anchors is not None:
            return self.anchors
        return torch.arange(len(self.owner)) - (self.offset - self.first_anchor)[self.owner]

    @cached_property
    def only_positions(self) -> bool:
        """Whether there are positions to fit heads on and no whole texts to replay: a mixed text, or rounds are missing."""
        missing = self.anchors is not None or bool((self.first_anchor + self.rows < self.text_tokens).any())
        return self.header.mix > 0 or (self.header.collector == "dense" and missing)

    def accepted_nodes(self, row: Tensor | slice = slice(None)) -> Tensor:
        """Return [R, K] bool, the nodes that the target accepts, at these rows."""
        if self.path is not None:
            return self.path[row]
        return torch.arange(self.depth) < self.accepted[row][:, None]

    def column(self, name: str) -> Tensor:
        """Return a recorded feature: [N] for ANCHOR, [N, K] for PRE and POST; `TraceError` where it was not recorded."""
        if name in SIBLING_FEATURES and self.tree.is_chain:
            # A single candidate is the best: it leads the second best by the margin, and its rank is 0.
            return self.column("noisy_margin") if name == "noisy_lead" else torch.zeros(self.ends.shape)
        if name == "drawn_token":
            return self.tokens.clamp_min(UNKNOWN).float()  # a node without a token (-2) is unknown (-1)
        if name == "above_token":
            token = torch.cat([self.column("anchor_token")[:, None], self.column("drawn_token")], 1)
            return token[:, list(self.tree.parent[1:])]  # [N, 1 + K] by row, the anchor first
        if name == "temperature" and name not in self.columns:
            return torch.full((len(self.ends),), float(self.header.temperature))
        if name not in self.columns:
            raise TraceError(
                f"the trace has no feature {name!r}; it has {', '.join(self.columns)}; collect it again with that feature"
            )
        return self.columns[name]

    def hidden_state(self, name: str) -> StoredHidden:
        """Return a recorded hidden state; `TraceError` where it was not recorded."""
        if name not in self.hidden:
            model = name.removesuffix("_hidden")
            raise TraceError(f"the trace has no {name}; collect it again with --hidden {model}, or use another policy")
        return self.hidden[name]

    def tensors(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ([N, anchor features], [N, K, node features]) of `names`, each in their order; HISTORY is left out."""
        layout = Layout(names)
        anchor, node = [self.column(n) for n in layout.anchor], [self.column(n) for n in layout.node]
        rows, nodes = self.ends.shape
        return (
            torch.stack(anchor, -1) if anchor else torch.zeros(rows, 0),
            side_by_side(node) if node else torch.zeros(rows, nodes, 0),
        )

    def find(self, sequence: Array, anchor: Array) -> Array:
        """Return [R] the rows of these anchors [R] of sequences [R], all int64 arrays; -1 where the trace has none."""
        offset, rows = self.offset.numpy(), self.rows.numpy()
        if self.anchors is None:
            at = anchor - self.first_anchor.numpy()[sequence]
            inside = (at >= 0) & (at < rows[sequence])
            return np.where(inside, offset[sequence] + at, -1)
        # Rows are sorted by sequence, then anchor, so that these keys rise and can be searched.
        wanted = sequence * _FAR + anchor
        at = np.minimum(np.searchsorted(self._known, wanted), len(self._known) - 1)
        return np.where(self._known[at] == wanted, at, -1)

    @cached_property
    def _known(self) -> Array:
        assert self.anchors is not None
        out: Array = np.repeat(np.arange(self.sequences), self.rows.numpy()) * _FAR + self.anchors.numpy()
        return out

    def subset(self, keep: Sequence[int]) -> TraceArrays:
        """Return only the sequences `keep`, in that order."""
        at = torch.tensor(list(keep), dtype=torch.int64)
        counts = self.rows[at]
        index = torch.cat([torch.arange(int(n)) + o for o, n in zip(self.offset[at], counts, strict=True)])
        names: dict[str, Any] = {name: [getattr(self, name)[i] for i in keep] for name in NAMES}
        by_row = {name: values[index] for name in BY_ROW if (values := getattr(self, name)) is not None}
        return dataclasses.replace(
            self,
            **names,
            offset=counts.cumsum(0) - counts,
            columns={name: values[index] for name, values in self.columns.items()},
            extra={name: values[index] for name, values in self.extra.items()},
            hidden={name: values.subset(index) for name, values in self.hidden.items()},
            **{name: getattr(self, name)[at] for name in BY_SEQUENCE},
            **by_row,
        )


NAMES = ("prompt_ids", "samples", "text_hashes", "groups")
"""Fields of `TraceArrays` that are lists by sequence."""

BY_SEQUENCE = ("keys", "rows", "first_anchor", "prompt_tokens", "text_tokens")
BY_ROW = ("accepted", "tokens", "ends", "cut", "path", "drawn", "reads", "anchors")
"""Fields of `TraceArrays` that are tensors by sequence, and those by row."""

_FAR = 1 << 32
"""More than any anchor."""


def side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Return [N, K, F] of F columns [N, K]; without a copy where they lie side by side already, as in `trace_arrays`."""
    first = columns[0]
    lies = all(
        c.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and c.storage_offset() == first.storage_offset() + at
        and c.stride() == first.stride()
        for at, c in enumerate(columns)
    )
    # Columns of one block have neighbouring offsets and equal strides; a stride shorter than F would run into the next node.
    if not lies or (len(columns) > 1 and first.stride(-1) < len(columns)):
        return torch.stack(list(columns), -1)
    return first.as_strided((*first.shape, len(columns)), (*first.stride(), 1))


def _wanted(header: Header, features: Sequence[str] | None) -> list[str]:
    """Return the recorded features to read, in the order in which a policy reads them."""
    base = None if features is None else base_features(features)
    names = [*(base or ()), *header.anchor_features, *header.features]
    asked = {*(names if base is None else base)}
    if "above_token" in asked:
        asked.add("anchor_token")  # the parent of the first token
    return [name for name in dict.fromkeys(names) if name in asked]


def trace_arrays(
    trace: Trace,
    features: Sequence[str] | None = None,
    extra: Sequence[str] = (),
    hidden: Sequence[str] | None = None,
) -> TraceArrays:
    """Read a trace into memory.

    Args:
        trace: from `load_trace`.
        features: only these, which lets a large trace fit; by default every recorded one.
        extra: other columns to keep.
        hidden: hidden states that will be asked for; by default every recorded one, since none is read before.

    Raises:
        TraceError: a dense sequence misses an anchor, or one is there twice; a hidden state is not recorded; a row lacks a
            value or has an impossible one.
    """
    features, hidden = (None if names is None else as_list(names) for names in (features, hidden))
    header, order = trace.header, Order.read(trace)
    wanted = _wanted(header, features)
    anchor_names, node_names = ([n for n in wanted if n in of] for of in (header.anchor_features, header.features))
    kinds: dict[str, Any] = dict.fromkeys((*anchor_names, *node_names), np.float32)
    kinds |= dict.fromkeys(("prompt_tokens", "text_tokens", "accepted_length"), np.int64)
    kinds |= {"tokens": np.int32, "cut": bool}
    if header.collector == "live":
        kinds |= {"accepted": bool, "drawn": bool}
    elif not header.tree.is_chain:
        kinds["accepted"] = bool
    if header.drafts_in_turn:
        kinds[READS] = bool
    # Side by side in memory: replay looks up all columns of a node at once.
    block = np.empty((len(order.of), len(header.topology), len(node_names)), dtype=np.float32)
    into = {name: block[..., at] for at, name in enumerate(node_names)}
    read = {name: torch.from_numpy(made) for name, made in read_columns(trace, kinds, order.place, into).items()}
    read |= zip(node_names, torch.from_numpy(block).unbind(-1), strict=True)
    more = read_columns(trace, dict.fromkeys(extra), order.place) if extra else {}
    names = ("prompt_id", "sample", "text_hash", "group")
    ids, samples, text_hashes, groups = read_texts(trace, names, order.of[order.start])
    # Hidden states are kept in the order of the file; all else is put in order as it is read.
    index = None if (order.of[1:] > order.of[:-1]).all() else torch.from_numpy(order.of)
    deepest, accepted = header.tree.deepest, read["accepted_length"]
    if len(accepted) and not 0 <= int(accepted.min()) <= int(accepted.max()) <= deepest:
        raise TraceError(f"--traces: {trace.folder} has accepted lengths beyond 0 to {deepest}; collect it again")
    draws = (order.key % header.draws).tolist()  # a text's sequences follow one another
    made = TraceArrays(
        header=header,
        prompt_ids=ids,
        samples=samples,
        text_hashes=text_hashes,
        groups=groups,
        keys=torch.tensor(
            [
                stream_key(header.seed, stream_name(name, sample), draw)
                for name, sample, draw in zip(ids, samples, draws, strict=True)
            ]
        ),
        offset=torch.from_numpy(order.start.astype(np.int64)),
        rows=torch.from_numpy(order.count.astype(np.int64)),
        first_anchor=torch.from_numpy(order.anchor[order.start]),
        prompt_tokens=read["prompt_tokens"][order.start],
        text_tokens=read["text_tokens"][order.start],
        accepted=read["accepted_length"],
        tokens=read["tokens"],
        ends=torch.isin(read["tokens"], torch.tensor(header.eos, dtype=torch.int32)),
        cut=read["cut"],
        columns={name: read[name] for name in (*anchor_names, *node_names)},
        path=read.get("accepted"),
        drawn=read.get("drawn"),
        reads=read.get(READS),
        anchors=None if order.follows else torch.from_numpy(order.anchor),
        extra={name: torch.from_numpy(made) for name, made in more.items()},
        hidden={n: StoredHidden(trace, n, index) for n in header.hidden if hidden is None or n in hidden},
    )
    for name in hidden or ():
        made.hidden_state(name)
    pa.default_memory_pool().release_unused()  # pyarrow keeps what it read through for itself
    return made


def typical_context(arrays: TraceArrays) -> float:
    """Return the middle of the contexts that rounds of these texts see."""
    return float((arrays.prompt_tokens + arrays.text_tokens / 2).double().median())


def seen_features(arrays: TraceArrays, names: Sequence[str], row: Tensor, history: Tensor) -> Tensor:
    """Return [R, K + 1, F], what a policy with these features sees before drafting and at the K nodes of R rounds.

    Args:
        arrays: the trace.
        names: features.
        row: [R], the anchors' rows.
        history: [R, 4], the HISTORY features when the rounds began (`Replayed.history`).
    """
    layout = Layout(names)
    anchor, node = arrays.tensors(names)
    base = np.zeros((len(row), len(layout.names)), dtype=np.float32)
    base[:, layout.anchor_at] = anchor[row].numpy()
    base[:, layout.history_at] = history[:, [HISTORY_FEATURES.index(name) for name in layout.history]].numpy()
    seen = np.repeat(base[:, None], node.shape[1] + 1, 1)
    # Before drafting, PRE and POST columns stay 0.
    seen[:, 1:, layout.node_at] = node[row].numpy()
    if layout.names != tuple(names):  # custom features among them
        parts = (seen[:, :1], True), (seen[:, 1:], False)
        seen = np.concatenate([complete_features(names, part, at_anchor) for part, at_anchor in parts], 1)
    return torch.from_numpy(seen)
