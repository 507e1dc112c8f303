"""`FeatureReader`: computes the `DraftStep` of live rounds when the policy is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import Array, DraftStep, StopPolicy
from ..policies.features import DRAFT_HIDDEN, ROUTE_FEATURES, TARGET_HIDDEN, DrawnTokens, History, Layout
from .hooks import NO_TIMER, Timer
from .models.outputs import round_states
from .round_state import DraftScores, RoundState
from .summaries import read_columns, truncation_lead
from .texts import Anchor, Text
from .topology import Topology

_ZERO = np.float32(0.0)


def no_signals(round: RoundState, history: History) -> Array:
    """Return ROUTE features of 0, of rounds in which no drafter provides any."""
    return np.zeros((len(round.active), round.topology.drafters, len(ROUTE_FEATURES)), dtype=np.float32)


class FeatureReader:
    """Computes the features and hidden states that a policy reads in the rounds of S streams.

    Args:
        policy: any stop policy.
        topology: tree of the rounds.
        temperature: sampling temperature; 0 = greedy.
        widths: H of each hidden state that the policy reads.
        streams: S.
        signals: returns the ROUTE features [S, D, .] of a round, given the round and the history.
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
        self._signals = signals or no_signals
        self.policy, self._topology, self._temperature, self._streams = policy, topology, temperature, streams
        self._first = policy.first  # a policy may change its attributes while it runs
        self._layout, self._widths = Layout(policy.features), dict(widths or {})
        self._columns = self._layout.node_columns
        self._follows_path = "path_logprob" in self._layout.names
        self._reads_target = bool(self._layout.anchor) or TARGET_HIDDEN in policy.hidden
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
        self._states: Tensor | None = None  # [n, H] draft's hidden states of the n tokens drawn
        self._indices: tuple[Array, Array] | None = None  # stream and index in the depth of these; None = all in order
        self._unread: Sequence[DraftScores] = ()  # of the latest depth, until they are read

    def drawn(self, depth: int, scores: Sequence[DraftScores]) -> None:
        """Keep the scores of a depth until the policy is called, if features need them."""
        is_called = self._first <= depth < self._topology.deepest
        if self._follows_path or (self._reads_draft and is_called):
            self._unread = scores

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
        hidden = {name: self._hidden(name, alive) for name in self.policy.hidden}
        if self._owners is None:
            return DraftStep(depth, alive, self._parents[depth], features, hidden, self._batch)
        owners = self._owners[depth], self._owners[max(depth - 1, 0)]
        return DraftStep(depth, alive, self._parents[depth], features, hidden, self._batch, *owners)

    def _by_branch(self, base: Array, depth: int) -> Array:
        """Return a copy of the columns [S, D, F] by branch of a depth [S, B, F]."""
        return base.repeat(self._topology.branches[depth], 1) if self._owners is None else base[:, self._owners[depth]]

    def _hidden(self, name: str, alive: Array) -> Array:
        """Return a hidden state [S, B, H]."""
        if name == TARGET_HIDDEN:
            assert self._target_states is not None
            states = self._target_states[:, None].repeat(alive.shape[1], 1)
        else:
            states = np.zeros((*alive.shape, self._widths[DRAFT_HIDDEN]), dtype=np.float32)
            if self._states is not None:
                values = round_states(self._states).cpu().numpy()
                if self._indices is None:
                    states[:] = values.reshape(states.shape)
                else:
                    states[self._indices] = values
        states[~alive] = 0.0
        return states

    def _read_base(self, history: History) -> Array:
        round = self.round
        streams = [stream for stream, text in enumerate(round.texts) if text is not None]
        if len(streams) < self._streams:
            self._batch = np.full(self._streams, -1, dtype=np.int64)
            self._batch[streams] = 0
        base = np.zeros((self._streams, self._topology.drafters, len(self._layout.names)), dtype=np.float32)
        if self._reads_target:
            anchors = [anchor for anchor in round.anchors if anchor is not None]
            last = [(text.tokens[-1], text.tokens[-2]) for text in round.texts if text is not None]
            rows = anchors[0].row if len(anchors) == 1 else torch.cat([anchor.row for anchor in anchors])
            columns = base[streams, 0]
            read_anchors(self._layout, rows, last, self._temperature, columns)
            base[streams] = columns[:, None]
            if TARGET_HIDDEN in self.policy.hidden:
                states = torch.cat([anchor.hidden for anchor in anchors if anchor.hidden is not None])
                self._target_states = np.zeros((self._streams, states.shape[-1]), dtype=np.float32)
                self._target_states[streams] = round_states(states).cpu().numpy()
        if self._layout.history:
            values = history.values(self._layout.history)  # [S, n], or [S, D, n] with several drafters
            base[..., self._layout.history_at] = values[:, None] if self._owners is None else values
        if self._layout.route:
            base[..., self._layout.route_at] = self._signals(round, history).take(self._layout.route_columns, -1)
        return base

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
        if self._columns.needs.noisy:
            drawn.lead = truncation_lead(scores.untruncated, scores.sampled, drawn)
        features = base[streams, scores.drafter]  # [n, F]
        path = read_columns(
            self._columns, scores.raw, drawn, self._temperature, features, scores.sampled, scores.scores, scores.best
        )
        self._states = scores.states
        if scores.states is not None and not (is_full and tree.branches[depth] == 1):
            self._states = scores.states[drawn.ids[:, 0].tolist()]
        return features, path, (streams, branch)


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
