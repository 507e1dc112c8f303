"""`FeatureReader`: computes the `DraftStep` of live rounds when the policy is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import Array, DraftStep, StopPolicy
from ..policies.features import DRAFT_HIDDEN, TARGET_HIDDEN, DrawnTokens, History, Layout
from .models.outputs import seen
from .round_state import DraftScores, RoundState
from .summaries import lead_over_truncated, read_columns
from .topology import Topology

_ZERO = np.float32(0.0)


@dataclass(slots=True)
class _Level:
    """The n tokens of one depth.

    Attributes:
        features: [n, F].
        path: [n] log-probabilities of the paths to them if a feature needs paths, otherwise empty.
        streams, rows: of each token; empty = one token per stream in order, as in most rounds of chains.
        branch: [n] int64, index of each token among the nodes of its depth.
        states: [n, H] hidden states of the draft; None if the policy does not read them.
    """

    features: Array
    path: Array
    streams: Sequence[int] = ()
    rows: Sequence[int] = ()
    branch: Array | int = 0
    states: Tensor | None = None

    def index_of(self, tokens: Iterable[tuple[int, int]]) -> list[int]:
        """Return the indices of tokens given by (stream, row)."""
        index = {token: at for at, token in enumerate(zip(self.streams, self.rows, strict=True))}
        return [index[token] for token in tokens]


class FeatureReader:
    """Computes the features and hidden states that a policy reads in the rounds of S streams.

    Args:
        policy: any stop policy.
        topology: tree of the rounds.
        temperature: sampling temperature; 0 = greedy.
        widths: H of each hidden state that the policy reads.
        streams: S.
    """

    def __init__(
        self,
        policy: StopPolicy,
        topology: Topology,
        temperature: float = 0.0,
        widths: Mapping[str, int] | None = None,
        streams: int = 1,
    ) -> None:
        self.policy, self._topology, self._temperature, self._streams = policy, topology, temperature, streams
        self._first = policy.first  # a policy may change its attributes while it runs
        self._layout, self._widths = Layout(policy.features), dict(widths or {})
        self._columns = self._layout.node_columns
        self._follows_path = self._columns.needs.path
        self._reads_target = bool(self._layout.anchor) or TARGET_HIDDEN in policy.hidden
        self._reads_draft = bool(self._layout.node or policy.hidden)
        self._one_batch = np.zeros(streams, dtype=np.int64)
        self._root_parents = np.zeros((streams, 1), dtype=np.int64)
        self._unread: DraftScores | None = None

    def begin(self, round: RoundState) -> None:
        """Begin a round, or continue one with a policy that replaces another."""
        self.round, self._batch = round, self._one_batch
        self._base: Array | None = None  # [S, F], the ANCHOR and HISTORY columns
        self._target_states: Array | None = None  # [S, H]
        self._level: _Level | None = None
        self._unread = None

    def drawn(self, depth: int, scores: DraftScores) -> None:
        """Keep the scores of a depth until the policy is called, if features need them."""
        is_called = self._first <= depth < self._topology.deepest
        if self._follows_path or (self._reads_draft and is_called):
            self._unread = scores

    @property
    def has_unread_path(self) -> bool:
        """Whether a feature needs paths through tokens for which the policy was not called."""
        return self._unread is not None and self._follows_path

    def read(self) -> None:
        """Read tokens for which the policy is not called."""
        self._read_level(np.zeros((self._streams, len(self._layout.names)), dtype=np.float32))

    def step(self, depth: int, alive: Array, history: History) -> DraftStep:
        """Return the arguments of the policy for the branches that are `alive` [S, B]."""
        if self._base is None:  # once per round: anchor and history do not change within it
            self._base = self._read_base(history)
        if self._unread is not None:
            self._read_level(self._base)
        level, branches = self._level, alive.shape[1]
        parent = self._root_parents
        if branches > 1:
            parent = self._topology.parent_in_level[depth][None].repeat(self._streams, 0)
        if level is not None and not level.streams:
            features = level.features[:, None]
        else:
            features = self._base[:, None].repeat(branches, 1)  # [S, B, F]
            if level is not None:
                features[level.streams, level.branch] = level.features
        if np.count_nonzero(alive) < alive.size:
            features = np.where(alive[..., None], features, _ZERO)  # required by `DraftStep`
        hidden = {name: self._hidden(name, alive) for name in self.policy.hidden}
        return DraftStep(depth, alive, parent, features, hidden, self._batch)

    def _hidden(self, name: str, alive: Array) -> Array:
        """Return a hidden state [S, B, H]."""
        if name == TARGET_HIDDEN:
            assert self._target_states is not None
            states = self._target_states[:, None].repeat(alive.shape[1], 1)
        else:
            states = np.zeros((*alive.shape, self._widths[DRAFT_HIDDEN]), dtype=np.float32)
            level = self._level
            if level is not None and level.states is not None:
                states[level.streams or slice(None), level.branch] = seen(level.states).cpu().numpy()
        states[~alive] = 0.0
        return states

    def _read_base(self, history: History) -> Array:
        texts = [
            (stream, text, anchor)
            for stream, (text, anchor) in enumerate(zip(self.round.texts, self.round.anchors, strict=True))
            if text is not None and anchor is not None
        ]
        streams = [stream for stream, _, _ in texts]
        if len(texts) < self._streams:
            self._batch = np.full(self._streams, -1, dtype=np.int64)
            self._batch[streams] = 0
        base = np.zeros((self._streams, len(self._layout.names)), dtype=np.float32)
        if self._reads_target:
            rows = [anchor.row for _, _, anchor in texts]
            anchors = [(text.tokens[-1], text.tokens[-2]) for _, text, _ in texts]  # with the tokens before them
            own = base[streams]
            read_anchors(self._layout, rows[0] if len(rows) == 1 else torch.cat(rows), anchors, self._temperature, own)
            base[streams] = own
            if TARGET_HIDDEN in self.policy.hidden:
                states = torch.cat([anchor.hidden for _, _, anchor in texts if anchor.hidden is not None])
                self._target_states = np.zeros((self._streams, states.shape[-1]), dtype=np.float32)
                self._target_states[streams] = seen(states).cpu().numpy()
        if self._layout.history:
            base[:, self._layout.history_at] = history.values(self._layout.history)
        return base

    def _read_level(self, base: Array) -> None:
        """Read the unread tokens."""
        scores, before, tree = self._unread, self._level, self._topology
        assert scores is not None
        drawn, streams, rows = self.round.drawn_tokens(scores)
        is_full = tree.is_chain and len(rows) == self._streams  # one token per stream, in order
        if self._follows_path and before is not None:
            drawn.parent_path = before.path
            if not is_full and not before.streams:
                drawn.parent_path = before.path[streams]
            elif not is_full:  # not all branches of the level before were extended
                parents = [(stream, tree.parent[row]) for stream, row in zip(streams, rows, strict=True)]
                drawn.parent_path = before.path[before.index_of(parents)]
        if self._columns.needs.noisy:
            drawn.lead = lead(scores, drawn)
        features = base.copy() if is_full else base[streams]  # [n, F]
        path = read_columns(
            self._columns, scores.raw, drawn, self._temperature, features, scores.sampled, scores.scores, scores.best
        )
        states, self._unread = scores.states, None
        if is_full:
            self._level = _Level(features, path, states=states)
            return
        states = None if states is None else states[drawn.ids[:, 0].tolist()]
        branch = 0 if tree.is_chain else np.array(rows) - tree.spans[tree.depth[rows[0]]].start
        self._level = _Level(features, path, streams, rows, branch, states)


def read_anchors(
    layout: Layout, rows: Tensor, anchors: Sequence[tuple[int, int]], temperature: float, out: Array
) -> None:
    """Write the ANCHOR columns of rounds.

    Args:
        layout: of the features.
        rows: [A, V] logits of the target from which the anchors were drawn.
        anchors: A pairs of an anchor and the token before it.
        temperature: sampling temperature.
        out: [A, F] float32.
    """
    if layout.anchor:
        drawn = DrawnTokens.of([(row, anchor, before, 0, 1, 0) for row, (anchor, before) in enumerate(anchors)])
        read_columns(layout.anchor_columns, rows, drawn, temperature, out)


def lead(scores: DraftScores, drawn: DrawnTokens) -> Array | None:
    """Return [B], see `summaries.lead_over_truncated`; None if no token was removed."""
    if scores.untruncated is None or scores.sampled is None:
        return None
    return lead_over_truncated(scores.untruncated, scores.sampled, drawn)


def single_step(depth: int, features: Array) -> DraftStep:
    """Return the step of one stream with one branch; `features` [1, F]."""
    zeros = np.zeros((1, 1), dtype=np.int64)
    return DraftStep(depth, np.ones((1, 1), dtype=bool), zeros, features[:, None], {}, zeros[0])
