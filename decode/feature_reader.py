"""`FeatureReader`: computes the `DraftStep` of live rounds when the policy is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import Array, DraftStep, StopPolicy
from ..policies.features import (
    DRAFT_HIDDEN,
    TARGET_HIDDEN,
    Columns,
    DrawnTokens,
    History,
    Layout,
    Needs,
)
from ..policies.heads.base import Reduction, reduced
from ..policies.learned import LearnedPolicy
from .hooks import NO_TIMER, Timer
from .models.device import to_host, upload
from .models.outputs import round_states, stored
from .round_state import DraftScores, RoundState
from .summaries import Launched, StateReducer, launch, lead_of, read_columns, truncation_lead
from .texts import Anchor, Text
from .topology import Topology

_ZERO = np.float32(0.0)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What was copied from a device together: `launched` computed the statistics of drawn tokens or of anchors."""

    launched: Launched | None
    on_host: Mapping[str, Tensor]
    entries: Sequence[int] | None = None  # of the statistics; None = all

    def write(self, columns: Columns, name: str, drawn: DrawnTokens, temperature: float, out: Array) -> Array:
        """Write the columns of the tokens to `out` [B, .] and return the log-probability of each path [B]."""
        assert self.launched is not None
        if "lead" in self.on_host and name != "anchors":
            drawn.lead = self.on_host["lead"].numpy()
        summary = self.launched.summary(self.on_host[name], drawn, entries=self.entries)
        columns(summary, drawn, temperature, out)
        return summary.path


class NextAnchors:
    """Statistics of the target's rows in a round, copied to the host together with its accepted paths.

    A policy that decides before it drafts then need not wait for those of its anchors.

    Args:
        needs, temperature: see `summarise`.
        rows: [R, V] logits of the target.
        streams: those of the round.
        states: [R, W] hidden states of these rows, or what a head's layers make of them; None = not read.

    Attributes:
        on_host: statistics and states, once they are copied.
    """

    def __init__(
        self, needs: Needs, temperature: float, rows: Tensor, streams: Sequence[int], states: Tensor | None = None
    ) -> None:
        self._needs, self._temperature, self._rows, self._streams = needs, temperature, rows, streams
        self._states, self.on_host = states, list[Tensor]()

    def launch(self, at: Tensor, by_row: bool) -> list[Tensor]:
        """Return what is copied for the rows and tokens `at` [B, 2]; see `RoundState.fetch`."""
        self._by_row, entry = (
            by_row,
            at if by_row else torch.stack([torch.arange(len(at), device=at.device), at[:, 1]], 1),
        )
        rows = self._rows if by_row else self._rows.index_select(0, at[:, 0])
        self._launched = launch(self._needs, rows, entry, 1, self._temperature)
        states = self._states if self._states is None or by_row else self._states.index_select(0, at[:, 0])
        return [self._launched.values, *(() if states is None else (states,))]

    def fetched(self, round: RoundState) -> _Fetched | None:
        """Return those of a round's anchors; None if they are not among them."""
        anchors = [(stream, anchor) for stream, anchor in enumerate(round.anchors) if anchor is not None]
        if not self.on_host or not all(anchor.rows is self._rows for _, anchor in anchors):
            return None
        entries = [anchor.at if self._by_row else self._streams.index(stream) for stream, anchor in anchors]
        on_host = {"anchors": self.on_host[0]}
        if self._states is not None:
            on_host["anchor states"] = self.on_host[1][entries]
        return _Fetched(self._launched, on_host, entries)


class FeatureReader:
    """Computes the features and hidden states that a policy reads in the rounds of S streams.

    Args:
        policy: any stop policy.
        topology: tree of the rounds.
        temperature: sampling temperature; 0 = greedy.
        widths: H of each hidden state that the policy reads.
        streams: S.
        signals: returns the ROUTE features [S, D, .] of a round, given the round and the history; None = 0.
    """

    def __init__(
        self,
        policy: StopPolicy,
        topology: Topology,
        temperature: float = 0.0,
        widths: Mapping[str, int] | None = None,
        streams: int = 1,
        signals: Callable[[RoundState, History], Array] | None = None,
    ) -> None:
        self._signals = signals
        self.policy, self._topology, self._temperature, self._streams = policy, topology, temperature, streams
        self._first = policy.first  # a policy may change its attributes while it runs
        self._layout, self._widths = Layout(policy.features), dict(widths or {})
        self._columns = self._layout.node_columns
        self._follows_path = "path_logprob" in self._layout.names
        self._reads_target = bool(self._layout.anchor) or TARGET_HIDDEN in policy.hidden
        # A reduction to the width of the state would save nothing. Reductions are recognized by their width.
        layers: Mapping[str, Reduction] = policy.head.reductions if isinstance(policy, LearnedPolicy) else {}
        self.reducers = {
            name: reducer
            for name, reducer in ((name, StateReducer(one)) for name, one in layers.items())
            if reducer.width != self._widths.get(name)
        }
        self._prefetches = self._first == 0 and self._reads_target
        self._next: NextAnchors | None = None
        self._reads_draft = bool(self._layout.node or policy.hidden)
        self._one_batch = np.zeros(streams, dtype=np.int64)
        self._parents = [level[None].repeat(streams, 0) for level in topology.parent_in_level]  # by depth, [S, B]
        self._owners = topology.drafter_of_branch if topology.drafters > 1 else None

    def begin(self, round: RoundState) -> None:
        """Begin a round, or continue one with a policy that replaces another."""
        self.round, self._batch = round, self._one_batch
        self._base: Array | None = None  # [S, D, F], the columns that are known before drafting
        self._target_states: Array | None = None  # [S, H]
        # Of the latest depth with B rows that was read:
        self._features: Array | None = None  # [S, B, F]
        self._path: Array | None = None  # [S, B] log-probabilities of the paths, if a feature needs them
        self._states: Tensor | Array | None = None  # [n, H] draft's hidden states of the n tokens drawn
        self._indices: tuple[Array, Array] | None = None  # stream and index in the depth of these; None = all in order
        self._unread: Sequence[DraftScores] = ()  # of the latest depth, until they are read
        # Copied from a device together with the tokens of the latest depth, and with the first tokens of the round.
        self._fetched: _Fetched | None = None
        self._anchors = None if self._next is None else self._next.fetched(round)
        self._next = None

    def next_anchors(self, rows: Tensor, states: Callable[[], Tensor]) -> NextAnchors | None:
        """Return what the verification copies for the next round.

        Args:
            rows: [R, V] logits of the target.
            states: returns its last hidden states, [R, H] or more.
        """
        if self._prefetches and not rows.is_cpu:
            streams = [stream for stream, _ in self.round.target_rows]
            is_read = TARGET_HIDDEN in self.policy.hidden
            kept = self._reduced(TARGET_HIDDEN, states()[: len(rows)]) if is_read else None
            self._next = NextAnchors(self._layout.anchor_columns.needs, self._temperature, rows, streams, kept)
        return self._next

    def drawn(self, depth: int, scores: Sequence[DraftScores]) -> None:
        """Keep the scores of a depth until the policy is called, if features need them."""
        is_called = self._first <= depth < self._topology.deepest
        if self._follows_path or (self._reads_draft and is_called):
            self._unread = scores

    def fetch(self, depth: int, scores: DraftScores, tokens: Tensor) -> list[int]:
        """Return tokens [R] of chains, drawn on a device, and copy what the policy reads there: the host waits once."""
        self.drawn(depth, [scores])
        device, launched, anchors, parts = tokens.device, None, None, dict[str, Tensor]()
        if self._unread:
            launched, parts = self.launch(scores, tokens)
        parts["tokens"] = tokens
        if self._reads_target and self._base is None and self._anchors is None:
            rows, last = self._anchor_rows()
            if self._layout.anchor:
                at = upload([[row, token] for row, (token, _) in enumerate(last)], device)
                anchors = launch(self._layout.anchor_columns.needs, rows, at, 1, self._temperature)
                parts["anchors"] = anchors.values
            if TARGET_HIDDEN in self.policy.hidden:
                parts["anchor states"] = self._reduced(TARGET_HIDDEN, self._anchor_states())
        on_host = dict(zip(parts, to_host(*parts.values()), strict=True))
        self._fetched = None if launched is None else _Fetched(launched, on_host)
        if "anchors" in parts or "anchor states" in parts:
            self._anchors = _Fetched(anchors, on_host)
        out: list[int] = on_host["tokens"].tolist()
        return out

    def launch(self, scores: DraftScores, tokens: Tensor) -> tuple[Launched, dict[str, Tensor]]:
        """Start what the policy reads of tokens [R] of chains on their device; return it as a whole and by name."""
        needs, at = self._columns.needs, torch.stack([torch.arange(len(tokens), device=tokens.device), tokens], 1)
        launched = launch(needs, scores.raw, at, 1, self._temperature, scores.sampled, scores.scores)
        parts = {"statistics": launched.values}
        if needs.noisy and scores.untruncated is not None and scores.sampled is not None:
            parts["lead"] = lead_of(scores.untruncated, scores.sampled, at)
        if scores.states is not None:
            parts["states"] = self._reduced(DRAFT_HIDDEN, scores.states)
        return launched, parts

    def read_path(self, timer: Timer = NO_TIMER) -> None:
        """Read the tokens of a depth for which the policy was not called, if a feature needs the paths through them."""
        if self._unread and self._follows_path:
            mark = timer.mark()
            drafters = self._topology.drafters
            self._read_levels(np.zeros((self._streams, drafters, len(self._layout.names)), dtype=np.float32))
            timer.add("policy", mark)

    def step(self, depth: int, alive: Array, history: History) -> DraftStep:
        """Return the arguments of the policy for the branches that are `alive` [S, B]."""
        if self._base is None:  # once per round: anchor and history do not change within it
            self._base = self._read_base(history)
        if self._unread:
            self._read_levels(self._base)
        features = self._by_branch(self._base, depth) if self._features is None else self._features
        if np.count_nonzero(alive) < alive.size:
            features = np.where(alive[..., None], features, _ZERO)  # required by `DraftStep`
        hidden = dict(self._hidden(name, alive) for name in self.policy.hidden)
        if self._owners is None:
            return DraftStep(depth, alive, self._parents[depth], features, hidden, self._batch)
        owners = self._owners[depth], self._owners[max(depth - 1, 0)]
        return DraftStep(depth, alive, self._parents[depth], features, hidden, self._batch, *owners)

    def before_drafting(self, history: History) -> list[Array]:
        """Return the columns [S, F] of chains that are known before drafting, and the target's states [S, .] if read."""
        self._prefetches = self._reads_target  # it is called in every round
        if self._base is None:
            self._base = self._read_base(history)
        return [self._base[:, 0], *([] if self._target_states is None else [self._target_states])]

    def _by_branch(self, base: Array, depth: int) -> Array:
        """Return a copy of the columns [S, D, F] by branch of a depth [S, B, F]."""
        return base.repeat(self._topology.branches[depth], 1) if self._owners is None else base[:, self._owners[depth]]

    def _reduced(self, name: str, states: Tensor) -> Tensor:
        """Return what is copied to the host of hidden states [n, H] on a device: the output of the head's layers on them."""
        return self.reducers[name](states) if name in self.reducers else stored(states)

    def _to_host(self, name: str, states: Tensor) -> Array:
        """Return hidden states [n, H] as a policy sees them, or what its head reduces them to, float32."""
        values: Array = (round_states(states) if states.is_cpu else self._reduced(name, states).float()).cpu().numpy()
        return values

    def _hidden(self, name: str, alive: Array) -> tuple[str, Array]:
        """Return a hidden state [S, B, H] by the name under which the policy receives it."""
        if name == TARGET_HIDDEN:
            assert self._target_states is not None
            states = self._target_states[:, None].repeat(alive.shape[1], 1)
        else:
            values, width = self._states, self._widths[DRAFT_HIDDEN]
            if isinstance(values, Tensor):
                values = self._to_host(name, values)
            if name in self.reducers and (values is None or values.shape[1] != width):
                width = self.reducers[name].width
            states = np.zeros((*alive.shape, width), dtype=np.float32)
            if values is not None and self._indices is None:
                states[:] = values.reshape(states.shape)
            elif values is not None:
                states[self._indices] = values
        states[~alive] = 0.0
        is_reduced = name in self.reducers and states.shape[-1] != self._widths.get(name)
        return reduced(name) if is_reduced else name, states

    def _read_base(self, history: History) -> Array:
        round = self.round
        streams = [stream for stream, text in enumerate(round.texts) if text is not None]
        if len(streams) < self._streams:
            self._batch = np.full(self._streams, -1, dtype=np.int64)
            self._batch[streams] = 0
        base = np.zeros((self._streams, self._topology.drafters, len(self._layout.names)), dtype=np.float32)
        if self._reads_target:
            rows, last = self._anchor_rows()
            if self._layout.anchor:
                drawn = DrawnTokens.of([(row, anchor, before, 0, 1, 0) for row, (anchor, before) in enumerate(last)])
                columns, out = self._layout.anchor_columns, base[streams, 0]
                if self._anchors is None:
                    read_columns(columns, rows, drawn, self._temperature, out)
                else:
                    self._anchors.write(columns, "anchors", drawn, self._temperature, out)
                base[streams] = out[:, None]
            if TARGET_HIDDEN in self.policy.hidden:
                if self._anchors is None:
                    states = self._to_host(TARGET_HIDDEN, self._anchor_states())
                else:
                    states = self._anchors.on_host["anchor states"].float().numpy()
                self._target_states = np.zeros((self._streams, states.shape[-1]), dtype=np.float32)
                self._target_states[streams] = states
        if self._layout.history:
            values = history.values(self._layout.history)  # [S, n], or [S, D, n] with several drafters
            base[..., self._layout.history_at] = values[:, None] if self._owners is None else values
        if self._layout.route and self._signals is not None:
            base[..., self._layout.route_at] = self._signals(round, history).take(self._layout.route_columns, -1)
        return base

    def _anchor_rows(self) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return the rows [A, V] that the anchors were drawn from, and each anchor with the token before it."""
        rows = [anchor.row for anchor in self.round.anchors if anchor is not None]
        last = [(text.tokens[-1], text.tokens[-2]) for text in self.round.texts if text is not None]
        return rows[0] if len(rows) == 1 else torch.cat(rows), last

    def _anchor_states(self) -> Tensor:
        """Return the hidden states [A, H] of these rows."""
        return torch.cat([a.hidden for a in self.round.anchors if a is not None and a.hidden is not None])

    def _read_levels(self, base: Array) -> None:
        """Read the unread tokens; `base` [S, D, F] has the other columns."""
        levels, tree, streams = self._unread, self._topology, self._streams
        self._unread, self._states, self._indices = (), None, None
        level_depth = tree.depth[levels[0].rows[0][1][0]] + 1
        branches = tree.branches[level_depth]
        results = [self._read_level(scores, base, level_depth) for scores in levels]
        if len(results) == 1 and len(results[0][0]) == streams * branches:  # all branches in order
            (features, path, _), *_ = results
            self._features = features.reshape(streams, branches, -1)
            self._path = path.reshape(streams, branches) if self._follows_path else None
            return
        self._features = self._by_branch(base, level_depth)
        self._path = np.zeros((streams, branches)) if self._follows_path else None
        for features, path, places in results:
            self._features[places] = features
            if self._path is not None:
                self._path[places] = path
        self._indices = places  # only read with hidden states of the draft, and then there is one drafter

    def _read_level(self, scores: DraftScores, base: Array, depth: int) -> tuple[Array, Array, tuple[Array, Array]]:
        """Read the tokens that one drafter drew at a depth.

        Returns:
            Of n tokens: features [n, F], log-probabilities of paths [n], and stream and branch of each.
        """
        tree = self._topology
        drawn, stream_of, rows = self.round.drawn_tokens(scores)
        is_full = len(rows) == self._streams * tree.branches[depth]
        streams, branch = np.array(stream_of), np.array(rows) - tree.spans[depth].start
        if self._follows_path and self._path is not None:
            drawn.parent_path = self._path[streams, tree.parent_in_level[depth][branch]]
        features = base[streams, scores.drafter]  # [n, F]
        if self._fetched is not None:
            path = self._fetched.write(self._columns, "statistics", drawn, self._temperature, features)
            states, self._fetched = self._fetched.on_host.get("states"), None
            self._states = None if states is None else states.float().numpy()
            return features, path, (streams, branch)
        if self._columns.needs.noisy:
            drawn.lead = truncation_lead(scores.untruncated, scores.sampled, drawn)
        path = read_columns(
            self._columns, scores.raw, drawn, self._temperature, features, scores.sampled, scores.scores, scores.best
        )
        self._states = scores.states
        if scores.states is not None and not (is_full and tree.branches[depth] == 1):
            self._states = scores.states[drawn.ids[:, 0].tolist()]
        return features, path, (streams, branch)


def set_anchors(
    round: RoundState, tokens: Mapping[int, Sequence[int]], prompt_tokens: Mapping[int, int] | None = None
) -> None:
    """Set the anchors of a round without logits of the target, such as the rounds of an engine.

    Args:
        round: just begun.
        tokens: by stream, the token before the anchor, and the anchor.
        prompt_tokens: by stream, number of tokens of the prompt; None = unknown.
    """
    texts: list[Text | None] = [None] * len(round.active)
    for stream, last in tokens.items():
        count = prompt_tokens[stream] if prompt_tokens else 0
        texts[stream] = cast(Text, SimpleNamespace(tokens=last, prompt_tokens=count))
        round.tokens[stream, 0] = last[-1]
    anchor = Anchor(torch.zeros(1, 1), 0, None)
    round.texts, round.anchors = texts, [None if text is None else anchor for text in texts]
