"""Traces as tensors, in the order in which replay and fitting read them."""

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

from ...collect.schema import NO_TOKEN, UNKNOWN, Header, drafter_of, parents, stream_name
from ...collect.store import Trace
from ...decode.drafters.spec import drafter_index, drafter_names
from ...decode.topology import Topology
from ...decode.verify.noise import stream_key
from ...policies.arguments import as_list
from ...policies.contract import Array, StopPolicy
from ...policies.errors import TraceError
from ...policies.features import HISTORY_FEATURES, SIBLING_FEATURES, Layout, base_features, complete_features
from .columns import HiddenStates, read_columns, read_texts

NAMES = ("prompt_ids", "samples", "text_hashes", "groups")
BY_SEQUENCE = ("keys", "rows", "first_anchor", "prompt_tokens", "text_tokens")
BY_ROW = ("accepted", "tokens", "ends", "cut", "path", "drawn", "anchors")
"""Fields of `TraceArrays`: lists by sequence, tensors by sequence, and tensors by row."""

_ANCHOR_LIMIT = 1 << 32
"""More than any anchor."""


@dataclass(frozen=True)
class TraceArrays:
    """Rows sorted by sequence and anchor. The rows of sequence s are offset[s] .. offset[s] + rows[s] - 1.

    Shapes: S sequences, N rows, K nodes of the tree.

    Attributes:
        header: of the trace.
        prompt_ids, samples, text_hashes, groups: [S], see `collect.schema`.
        keys: [S] int64, the stream keys, for randomised policies.
        offset, rows: [S] first row and number of rows.
        first_anchor: [S] the anchor of the first row.
        prompt_tokens: [S].
        text_tokens: [S] tokens of each text, including EOS, up to the length limit.
        accepted: [N] accepted length A; of several drafters the largest.
        tokens: [N, K] drawn by the draft.
        ends: [N, K] bool, nodes that drew EOS.
        cut: [N] bool, the end of the text limits what the round shows.
        columns: [N] of each ANCHOR feature, [N, K] of each node feature and [N, D] of each ROUTE feature.
        path: [N, K] bool, accepted nodes; None for chains, where the accepted length implies it.
        drawn: [N, K] bool, nodes that a live run drafted; None = all.
        anchors: [N] if anchors of a text are missing; None = they are consecutive.
        extra: other columns that were requested.
        hidden: hidden states, read on first use.
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
    anchors: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    hidden: dict[str, HiddenStates] = field(default_factory=dict)

    @cached_property
    def tree(self) -> Topology:
        """The topology; row 0 is the anchor, row i + 1 node i."""
        return self.header.tree

    @cached_property
    def depth(self) -> int:
        """Depth of the tree."""
        return self.tree.deepest

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.prompt_ids)

    @cached_property
    def clusters(self) -> list[str]:
        """[S], the prompt of each sequence: the hash of its text, or the prompt's id if the text is unknown.

        Samples of a prompt, and equal texts under several ids, are one cluster. Splits and intervals are over clusters.
        """
        return [text or name for text, name in zip(self.text_hashes, self.prompt_ids, strict=True)]

    @cached_property
    def owner(self) -> Tensor:
        """[N] int64, the sequence of each row."""
        return torch.repeat_interleave(torch.arange(self.sequences), self.rows)

    @cached_property
    def anchor_by_row(self) -> Tensor:
        """[N] int64, the anchor of each row."""
        if self.anchors is not None:
            return self.anchors
        return torch.arange(len(self.owner)) - (self.offset - self.first_anchor)[self.owner]

    @cached_property
    def only_positions(self) -> bool:
        """Whether the trace can train heads but not replay whole texts: its texts are mixed, or rounds are missing."""
        missing = self.anchors is not None or bool((self.first_anchor + self.rows < self.text_tokens).any())
        return self.header.mix > 0 or (self.header.collector == "dense" and missing)

    @cached_property
    def draft_bound(self) -> Tensor:
        """[N], of D drafters [N, D], the most tokens of a chain that can be drafted at each anchor: up to EOS or a limit."""
        if self.tree.drafters > 1:
            return torch.stack([each.draft_bound for each in self.each_drafter], 1)
        # The target's token takes one place of the text.
        allowed = (self.header.max_new_tokens - self.anchor_by_row - 1).clamp(0, self.depth)
        if not self.header.eos or not self.ends.shape[1]:
            return allowed
        # EOS itself is drafted; nothing is drafted after it.
        ends = torch.where(self.ends.any(1), self.ends.int().argmax(1) + 1, self.depth)
        return torch.minimum(allowed, ends)

    @cached_property
    def token_bound(self) -> Tensor:
        """[N], of D drafters [N, D], the tokens of a chain before the first for which the drafter or a filter left none."""
        if self.tree.drafters > 1:
            return torch.stack([each.token_bound for each in self.each_drafter], 1)
        missing = self.tokens == NO_TOKEN
        return torch.where(missing.any(1), missing.int().argmax(1), self.depth)

    def accepted_nodes(self, row: Tensor | slice = slice(None)) -> Tensor:
        """Return [R, K] bool, the nodes that the target accepts, at these rows."""
        if self.path is not None:
            return self.path[row]
        return torch.arange(self.depth) < self.accepted[row][:, None]

    def column(self, name: str) -> Tensor:
        """Return a recorded feature, [N] for ANCHOR, [N, K] for PRE and POST, [N, D] for ROUTE.

        Raises:
            TraceError: the trace does not have it.
        """
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
        if name == "prompt_tokens":
            return self.prompt_tokens[self.owner].float()[:, None].expand(-1, self.tree.drafters)
        if name not in self.columns:
            raise TraceError(
                f"the trace has no feature {name!r}; it has {', '.join(self.columns)}; collect it again with that feature"
            )
        return self.columns[name]

    def hidden_state(self, name: str) -> HiddenStates:
        """Return a recorded hidden state; `TraceError` if the trace does not have it."""
        if name not in self.hidden:
            model = name.removesuffix("_hidden")
            raise TraceError(f"the trace has no {name}; collect it again with --hidden {model}, or use another policy")
        return self.hidden[name]

    def tensors(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ([N, anchor features], [N, K, node features]) of `names`, each in their order, without HISTORY."""
        layout = Layout(names)
        anchor, node = [self.column(n) for n in layout.anchor], [self.column(n) for n in layout.node]
        rows, nodes = self.ends.shape
        return (
            torch.stack(anchor, -1) if anchor else torch.zeros(rows, 0),
            _stack_nodes(node) if node else torch.zeros(rows, nodes, 0),
        )

    def find(self, sequence: Array, anchor: Array) -> Array:
        """Return [R], the rows of anchors [R] of sequences [R], all int64 arrays; -1 if the trace has no such row."""
        offset, rows = self.offset.numpy(), self.rows.numpy()
        if self.anchors is None:
            at = anchor - self.first_anchor.numpy()[sequence]
            inside = (at >= 0) & (at < rows[sequence])
            return np.where(inside, offset[sequence] + at, -1)
        key = sequence * _ANCHOR_LIMIT + anchor
        at = np.minimum(np.searchsorted(self._row_keys, key), len(self._row_keys) - 1)
        return np.where(self._row_keys[at] == key, at, -1)

    @cached_property
    def _row_keys(self) -> Array:
        """[N] int64, ascending because rows are sorted by sequence and anchor."""
        out: Array = (self.owner * _ANCHOR_LIMIT + self.anchor_by_row).numpy()
        return out

    @cached_property
    def drafters(self) -> tuple[str, ...]:
        """The names of the drafters."""
        return drafter_names(drafter_of(self.header))

    def of_policy(self, policy: StopPolicy) -> TraceArrays:
        """Return what a policy is replayed on: the trace, or that of the one drafter that it uses."""
        if policy.routes or self.tree.drafters == 1:
            return self
        return self.each_drafter[drafter_index(policy, self.drafters)]

    @cached_property
    def each_drafter(self) -> list[TraceArrays]:
        """The trace of each drafter, as if it were the only one."""
        count = self.tree.drafters
        return [self] if count == 1 else [self._of_drafter(index) for index in range(count)]

    def _of_drafter(self, index: int) -> TraceArrays:
        nodes = np.flatnonzero(self.tree.drafter_of[1:] == index)
        tree = self.tree.trees[index]
        facts = {**self.header.facts, "drafter": self.drafters[index], "reading": [self.header.readings[index]]}
        header = dataclasses.replace(self.header, drafters=(), facts=facts)
        part = self.of_nodes(nodes, tree, header)
        signals = {name: self.columns[name][:, index : index + 1] for name in header.signals if name in self.columns}
        return dataclasses.replace(part, columns={**part.columns, **signals})

    def of_nodes(self, nodes: Sequence[int] | Array, tree: Topology, header: Header) -> TraceArrays:
        """Return the trace of nodes that are closed under parents.

        Args:
            nodes: numbered from 0, without the root.
            tree: of these nodes.
            header: of the result; its topology is set to that of `tree`.
        """
        at = torch.as_tensor(nodes, dtype=torch.int64)
        path, depths = self.accepted_nodes()[:, at], torch.from_numpy(tree.depths[1:])
        columns = {
            name: values if values.dim() == 1 or name in self.header.signals else values[:, at]
            for name, values in self.columns.items()
        }
        return dataclasses.replace(
            self, header=dataclasses.replace(header, topology=parents(tree)), columns=columns, tokens=self.tokens[:, at],
            ends=self.ends[:, at], path=None if tree.is_chain else path,
            accepted=(path * depths).amax(1) if len(at) else torch.zeros_like(self.accepted),
            drawn=None if self.drawn is None else self.drawn[:, at],
        )  # fmt: skip

    def subset(self, keep: Sequence[int]) -> TraceArrays:
        """Return only the sequences `keep`, in that order."""
        at = torch.tensor(list(keep), dtype=torch.int64)
        counts = self.rows[at]
        starts = counts.cumsum(0) - counts
        index = torch.arange(int(counts.sum())) + (self.offset[at] - starts).repeat_interleave(counts)
        names: dict[str, Any] = {name: [getattr(self, name)[i] for i in keep] for name in NAMES}
        by_row = {name: values[index] for name in BY_ROW if (values := getattr(self, name)) is not None}
        return dataclasses.replace(
            self,
            **names,
            offset=starts,
            columns={name: values[index] for name, values in self.columns.items()},
            extra={name: values[index] for name, values in self.extra.items()},
            hidden={name: values.subset(index) for name, values in self.hidden.items()},
            **{name: getattr(self, name)[at] for name in BY_SEQUENCE},
            **by_row,
        )


def _stack_nodes(columns: Sequence[Tensor]) -> Tensor:
    """Return [N, K, F] of F columns [N, K], without a copy if they are adjacent in memory, as `trace_arrays` reads them."""
    first = columns[0]
    adjacent = all(
        c.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and c.storage_offset() == first.storage_offset() + at
        and c.stride() == first.stride()
        for at, c in enumerate(columns)
    )
    # Columns of one block have neighbouring offsets and equal strides; a stride shorter than F would run into the next node.
    if not adjacent or (len(columns) > 1 and first.stride(-1) < len(columns)):
        return torch.stack(list(columns), -1)
    return first.as_strided((*first.shape, len(columns)), (*first.stride(), 1))


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
        extra: other columns to read.
        hidden: hidden states that will be used; by default every recorded one. None is read before its first use.

    Raises:
        TraceError: a dense sequence misses an anchor, or has one twice; a hidden state is not recorded; a row lacks a value
            or has an impossible one.
    """
    features, hidden = (None if names is None else as_list(names) for names in (features, hidden))
    header, selected = trace.header, _recorded_features(trace.header, features)
    order, start, counts, anchor, consecutive, sequence = _row_order(trace)
    position = np.argsort(order)  # the inverse permutation
    anchor_names, node_names, signals = (
        [n for n in selected if n in of] for of in (header.anchor_features, header.features, header.signals)
    )
    # Node features are adjacent in memory: replay looks up all features of a node at once.
    block = np.empty((len(order), len(header.topology), len(node_names)), dtype=np.float32)
    columns = {
        name: torch.from_numpy(values)
        for name, values in read_columns(
            trace,
            _column_types(header, [*anchor_names, *signals], node_names),
            position,
            {name: block[..., at] for at, name in enumerate(node_names)},
        ).items()
    }
    columns |= zip(node_names, torch.from_numpy(block).unbind(-1), strict=True)
    accepted = columns["accepted_length"]
    if len(accepted) and not 0 <= int(accepted.min()) <= int(accepted.max()) <= header.tree.deepest:
        raise TraceError(
            f"--traces: {trace.folder} has accepted lengths beyond 0 to {header.tree.deepest}; collect it again"
        )
    first_rows = ("prompt_id", "sample", "text_hash", "group")
    ids, samples, text_hashes, groups = read_texts(trace, first_rows, order[start])
    draws = (sequence % header.draws).tolist()  # the draws of a text are consecutive sequences
    keys = [
        stream_key(header.seed, stream_name(name, sample), draw)
        for name, sample, draw in zip(ids, samples, draws, strict=True)
    ]
    extra_columns = read_columns(trace, dict.fromkeys(extra), position) if extra else {}
    # Hidden states stay in the order of the file.
    index = torch.from_numpy(order)
    arrays = TraceArrays(
        header=header,
        prompt_ids=ids,
        samples=samples,
        text_hashes=text_hashes,
        groups=groups,
        keys=torch.tensor(keys),
        offset=torch.from_numpy(start.astype(np.int64)),
        rows=torch.from_numpy(counts.astype(np.int64)),
        first_anchor=torch.from_numpy(anchor[start]),
        prompt_tokens=columns["prompt_tokens"][start],
        text_tokens=columns["text_tokens"][start],
        accepted=accepted,
        tokens=columns["tokens"],
        ends=torch.isin(columns["tokens"], torch.tensor(header.eos, dtype=torch.int32)),
        cut=columns["cut"],
        columns={name: columns[name] for name in (*anchor_names, *node_names, *signals)},
        path=columns.get("accepted"),
        drawn=columns.get("drawn"),
        anchors=None if consecutive else torch.from_numpy(anchor),
        extra={name: torch.from_numpy(values) for name, values in extra_columns.items()},
        hidden={n: HiddenStates.of([trace], n, index) for n in header.hidden if hidden is None or n in hidden},
    )
    for name in hidden or ():
        arrays.hidden_state(name)
    pa.default_memory_pool().release_unused()  # pyarrow keeps the memory that it read through
    return arrays


def _recorded_features(header: Header, features: Sequence[str] | None) -> list[str]:
    """Return the recorded features to read, in the order in which a policy reads them."""
    base = None if features is None else base_features(features)
    names = [*(base or ()), *header.anchor_features, *header.features, *header.signals]
    requested = {*(names if base is None else base)}
    if "above_token" in requested:
        requested.add("anchor_token")  # the parent of the first token
    return [name for name in dict.fromkeys(names) if name in requested]


def _column_types(header: Header, anchor_names: Sequence[str], node_names: Sequence[str]) -> dict[str, Any]:
    """Return the columns that `trace_arrays` reads and their types."""
    types: dict[str, Any] = dict.fromkeys((*anchor_names, *node_names), np.float32)
    types |= dict.fromkeys(("prompt_tokens", "text_tokens", "accepted_length"), np.int64)
    types |= {"tokens": np.int32, "cut": bool}
    if header.collector == "live":
        types |= {"accepted": bool, "drawn": bool}
    elif not header.tree.is_chain:
        types["accepted"] = bool
    return types


def _row_order(trace: Trace) -> tuple[Array, Array, Array, Array, bool, Array]:
    """Return the order of rows by sequence and anchor.

    Returns:
        [N] row of the trace; [S] first row and number of rows of each sequence; [N] anchors; whether the anchors of each
        sequence are consecutive; [S] number of each sequence.

    Raises:
        TraceError: an anchor is there twice, or is missing in a trace that should have all.
    """
    sequence, anchor = read_columns(trace, {"sequence": np.int64, "anchor": np.int64}).values()
    order = np.lexsort((anchor, sequence))  # the last key is the primary one
    sequence, anchor = sequence[order], anchor[order]
    numbers, start, counts = np.unique(sequence, return_index=True, return_counts=True)
    within = np.arange(len(anchor)) - np.repeat(start, counts)
    consecutive = np.array_equal(anchor - np.repeat(anchor[start], counts), within)
    twice = bool(((np.diff(anchor) == 0) & (np.diff(sequence) == 0)).any())
    if twice or (trace.header.has_every_anchor and not consecutive):
        raise TraceError(f"--traces: {trace.folder} misses anchors of a text or has one twice; collect it again")
    return order, start, counts, anchor, consecutive, numbers


_EQUAL_FIELDS = (
    "pair", "vocabulary", "eos", "sampling", "verification", "label", "topology", "max_new_tokens", "collector", "texts",
    "mix", "draws",
)  # fmt: skip


def temperatures(traces: Sequence[Trace]) -> tuple[float, ...]:
    """Return the distinct temperatures of the traces in ascending order."""
    return tuple(sorted({trace.header.temperature for trace in traces}))


def check_compatible(
    first: Header, second: Header, where: str, other: str, names: Sequence[str] = _EQUAL_FIELDS
) -> None:
    """Refuse traces that differ in any of `names`: they cannot be one."""
    if differ := first.differing(second, names):
        instead = (
            ", all with --verification match if temperature 0 is among them" if "verification" in differ[0] else ""
        )
        raise TraceError(
            f"--traces: {where} and {other} differ in {differ[0]}; expected one pair, recorded alike at several temperatures "
            f"or on several prompts{instead}"
        )


def joined_arrays(
    traces: Sequence[Trace],
    features: Sequence[str] | None = None,
    hidden: Sequence[str] | None = None,
    extra: Sequence[str] = (),
) -> TraceArrays:
    """Read traces of chains, of one or several drafters, as one, texts after texts; `temperature` becomes a column.

    A prompt of several traces keeps its id, so that splits by prompt keep its texts together.

    Args:
        traces: one or more, of one pair and recorded alike.
        features: only these; by default every one that all of them have.
        hidden: hidden states that will be used; by default every one that all of them have.
        extra: other columns to read.

    Raises:
        TraceError: they differ in more than temperature, seed and prompts, or are of trees.
    """
    if not traces:
        raise TraceError("--traces: expected at least one trace")
    first = traces[0]
    for other in traces[1:]:
        check_compatible(first.header, other.header, str(first.folder), str(other.folder))
    if not all(tree.is_chain for tree in first.header.tree.trees):
        raise TraceError(
            f"--traces: {first.folder} is of a tree; give --rule gain, which learns the nodes to verify, or collect without "
            "--tree"
        )
    parts = [trace_arrays(trace, features, extra, hidden) for trace in traces]
    return parts[0] if len(parts) == 1 else _concatenate(parts)


def _concatenate(parts: Sequence[TraceArrays]) -> TraceArrays:
    first = parts[0]
    shared = [name for name in first.columns if all(name in part.columns for part in parts)]
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in shared}
    # The header is that of the first part, so that the temperature has to be a column.
    columns["temperature"] = torch.cat([part.column("temperature") for part in parts])
    names: dict[str, Any] = {name: [value for part in parts for value in getattr(part, name)] for name in NAMES}
    fields: dict[str, Any] = {}
    for name in (*BY_SEQUENCE, *BY_ROW):
        values = [getattr(part, name) for part in parts]
        fields[name] = None if any(value is None for value in values) else torch.cat(values)
    if any(part.anchors is not None for part in parts):  # one part without all anchors: all are looked up
        fields["anchors"] = torch.cat([part.anchor_by_row for part in parts])
    states = [name for name in first.hidden if all(name in part.hidden for part in parts)]
    return dataclasses.replace(
        first,
        **names,
        offset=fields["rows"].cumsum(0) - fields["rows"],
        columns=columns,
        extra={name: torch.cat([part.extra[name] for part in parts]) for name in first.extra},
        hidden={name: HiddenStates.concatenate([part.hidden[name] for part in parts]) for name in states},
        **fields,
    )


def typical_context(arrays: TraceArrays) -> float:
    """Return the median context in the middle of these texts."""
    return float((arrays.prompt_tokens + arrays.text_tokens / 2).double().median())


def policy_features(arrays: TraceArrays, names: Sequence[str], row: Tensor, history: Tensor) -> Tensor:
    """Return [R, K + 1, F], features as a policy receives them before drafting and at the K nodes of R rounds.

    Args:
        arrays: the trace.
        names: features.
        row: [R], the anchors' rows.
        history: [R, 4], the HISTORY features when the rounds began (`Rounds.history`).
    """
    layout = Layout(names)
    anchor, node = arrays.tensors(names)
    base = np.zeros((len(row), len(layout.names)), dtype=np.float32)
    base[:, layout.anchor_at] = anchor[row].numpy()
    base[:, layout.history_at] = history[:, [HISTORY_FEATURES.index(name) for name in layout.history]].numpy()
    for name, at in zip(layout.route, layout.route_at, strict=True):
        if name != "idle_tokens":  # 0 if there is one drafter
            base[:, at] = arrays.column(name)[row, 0].numpy()
    seen = np.repeat(base[:, None], node.shape[1] + 1, 1)
    # Before drafting, PRE and POST features are 0.
    seen[:, 1:, layout.node_at] = node[row].numpy()
    if layout.names != tuple(names):  # custom features among them
        parts = (seen[:, :1], True), (seen[:, 1:], False)
        seen = np.concatenate([complete_features(names, part, at_anchor) for part, at_anchor in parts], 1)
    return torch.from_numpy(seen)
