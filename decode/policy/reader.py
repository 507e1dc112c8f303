"""What a policy is shown of live rounds: the features of what S streams have just drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.features import Columns, Drawn, Layout, Summary
from ...policies.features.hidden_states import DRAFT_HIDDEN, TARGET_HIDDEN
from ...policies.features.history import History
from ..candidates import Candidates
from ..models.hidden import seen
from ..topology import Topology
from .summaries import lead_over_truncated, summarise


@dataclass(slots=True)
class Base:
    """What is known of a round before drafting: the features [S, F] as far as they are, and the target's `hidden` [S, H]."""

    features: Array
    hidden: Array | None = None


@dataclass(slots=True)
class Level:
    """The n tokens of one depth, as features are computed from them.

    Attributes:
        where: (stream, place) of each.
        branch: [n] int64, each token's place in its depth of the topology; None where there is one token of one stream.
        drawn, summary, temperature: see `summaries.summarise`.
        states: [R, H] the draft's.
    """

    where: Sequence[tuple[int, int]]
    branch: Array | None
    drawn: Drawn
    summary: Summary
    temperature: float
    states: Tensor | None = None


@dataclass(slots=True)
class Logits:
    """The draft's side of one depth, stream by stream.

    Attributes:
        raw: [R, V] logits of the places that were fed.
        sampled: [R, V] log-weights, where they are not raw / T; else None.
        scores: [R, V] that `match` took the largest of; None under other modes. `best` by row: see `verify.Drawn`.
        owner: for each token that was drawn, its row.
        states: [R, H] the draft's last hidden states, where somebody wants them.
        untruncated: [R, V] `sampled` before tokens were left out for being unlikely, where that was done.
    """

    raw: Tensor
    sampled: Tensor | None
    scores: Tensor | None
    owner: Sequence[int]
    states: Tensor | None = None
    best: list[list[float]] | None = None
    untruncated: Tensor | None = None

    def lead(self, drawn: Drawn) -> Array | None:
        """Return [B], see `summaries.lead_over_truncated`; None where nothing was left out."""
        if self.untruncated is None or self.sampled is None:
            return None
        return lead_over_truncated(self.untruncated, self.sampled, drawn)

    def part(self, tokens: slice) -> Logits:
        """Return what these of the tokens that were drawn were drawn from, which are all of one stream."""
        owner = self.owner[tokens]
        rows = slice(min(owner), max(owner) + 1)
        cut = [
            None if some is None else some[rows] for some in (self.sampled, self.scores, self.states, self.untruncated)
        ]
        best = None if self.best is None else self.best[rows]
        return Logits(self.raw[rows], cut[0], cut[1], [row - rows.start for row in owner], cut[2], best, cut[3])


class Reader:
    """Reads, of S streams, what a policy wants to know.

    Args:
        policy: any stop policy.
        widths: H of each hidden state that the policy reads.
        streams: S.

    Attributes:
        layout: of the policy's features.
    """

    def __init__(self, policy: StopPolicy, widths: Mapping[str, int] | None = None, streams: int = 1) -> None:
        self.policy, self._streams = policy, streams
        self.layout = Layout(policy.features)
        self._columns = Columns(self.layout.node, self.layout.node_at)
        self._anchor = Columns(self.layout.anchor, self.layout.anchor_at)
        self._follows_path = self._columns.plan.path
        self._looks = bool(self.layout.node or policy.hidden)
        self._widths = dict(widths or {})
        self._batch = np.full(streams, -1, dtype=np.int64)

    def wants(self, depth: int, deepest: int) -> bool:
        """Whether the tokens of a depth matter: the policy is asked there and looks at them, or follows paths through it."""
        return self._follows_path or (self._looks and self.policy.first <= depth < deepest)

    def base(
        self,
        rows: Tensor,
        tokens: Sequence[tuple[int, int]],
        history: History,
        temperature: float = 0.0,
        hidden: Tensor | None = None,
        streams: Sequence[int] | None = None,
    ) -> Base:
        """Return the ANCHOR and HISTORY columns of a round.

        Args:
            rows: [A, V], the target's rows that the anchors were drawn from.
            tokens: A anchors, each with the token before it.
            history: of the S streams.
            temperature: of the sampling.
            hidden: [A, H], the target's last hidden states of these rows, if the policy reads them.
            streams: A, whose they are; None = all of them.
        """
        layout, at = self.layout, slice(None) if streams is None else list(streams)
        self._batch = np.full(self._streams, -1, dtype=np.int64)
        self._batch[at] = 0
        features = np.zeros((self._streams, len(layout.names)), dtype=np.float32)
        if layout.anchor:
            drawn = Drawn.of([(row, anchor, before, 0, 1, 0) for row, (anchor, before) in enumerate(tokens)])
            summary = summarise(self._anchor.plan, rows, drawn, temperature)
            known = features if streams is None else features[at]
            self._anchor.write(summary, drawn, temperature, known)
            features[at] = known
        if layout.history:
            features[:, layout.history_at] = history.values(layout.history)
        if TARGET_HIDDEN not in self.policy.hidden or hidden is None:
            return Base(features)
        states = np.zeros((self._streams, hidden.shape[-1]), dtype=np.float32)
        states[at] = seen(hidden).cpu().numpy()
        return Base(features, states)

    def level(
        self,
        turns: Sequence[tuple[int, Candidates, Sequence[int]]],
        logits: Logits,
        temperature: float,
        above: Level | None,
    ) -> Level:
        """Return the level of the tokens just drawn.

        Args:
            turns: of each stream its number, its candidates with these tokens, and their places.
            logits: that they were drawn from.
            temperature: of the sampling.
            above: the level before it.
        """
        drawn = drawn_tokens([(found, places) for _, found, places in turns], logits.owner)
        where = [(number, place) for number, _, places in turns for place in places]
        if self._follows_path and above is not None:
            row = {place: at for at, place in enumerate(above.where)}
            parents = [(number, found.parent[place]) for number, found, places in turns for place in places]
            drawn.parent_path = above.summary.path[[row[parent] for parent in parents]]
        if self._columns.plan.noisy:
            drawn.lead = logits.lead(drawn)
        summary = summarise(
            self._columns.plan, logits.raw, drawn, temperature, logits.sampled, logits.scores, logits.best
        )
        tree = turns[0][1].topology
        branch = None
        if self._streams > 1 or not tree.is_chain:
            first = tree.spans[turns[0][1].depth[where[0][1]]].start
            branch = np.array([found.rows[place] - first for _, found, places in turns for place in places])
        return Level(where, branch, drawn, summary, temperature, logits.states)

    def step(self, depth: int, base: Base, level: Level | None, tree: Topology, alive: Array) -> DraftStep:
        """Return what the policy is shown.

        Args:
            depth: j.
            base: of the round.
            level: of depth j; None at depth 0, and where the policy looks at no token.
            tree: of the round.
            alive: [S, B] bool, the branches of depth j that could be extended.
        """
        if self._streams == 1 and (depth == 0 or tree.is_chain):
            return self._single(depth, base, level)
        if depth == 0:
            alive = np.logical_or.reduce(alive, 1, keepdims=True)
            parent = np.zeros((self._streams, 1), dtype=np.int64)
        else:
            parent = tree.above_in_level[depth][None].repeat(self._streams, 0)
        shape = (*alive.shape, base.features.shape[1])
        features = np.zeros(shape, dtype=np.float32)
        features[:] = base.features[:, None]
        if level is not None and level.branch is not None:
            streams = [stream for stream, _ in level.where]
            rows = base.features[streams]
            self._columns.write(level.summary, level.drawn, level.temperature, rows)
            features[streams, level.branch] = rows
        features[~alive] = 0.0
        hidden = self._hidden(base, level, alive) if self.policy.hidden else _NOTHING
        return DraftStep(depth, alive, parent, features, hidden, self._batch)

    def _hidden(self, base: Base, level: Level | None, alive: Array) -> dict[str, Array]:
        """Return the hidden states that the policy reads, [S, B, H]."""
        out = {}
        for name in self.policy.hidden:
            if name == TARGET_HIDDEN:
                assert base.hidden is not None
                states = base.hidden[:, None].repeat(alive.shape[1], 1)
            else:
                states = np.zeros((*alive.shape, self._widths[DRAFT_HIDDEN]), dtype=np.float32)
                if level is not None and level.branch is not None and level.states is not None:
                    drawn = seen(level.states[level.drawn.ids[:, 0]]).cpu().numpy()
                    states[[stream for stream, _ in level.where], level.branch] = drawn
            states[~alive] = 0.0
            out[name] = states
        return out

    def _single(self, depth: int, base: Base, level: Level | None) -> DraftStep:
        """Return the step of one stream with one branch."""
        features = base.features
        if level is not None:
            features = features.copy()
            self._columns.write(level.summary, level.drawn, level.temperature, features)
        hidden: dict[str, Array] = {}
        for name in self.policy.hidden:
            if name == TARGET_HIDDEN:
                assert base.hidden is not None
                hidden[name] = base.hidden
            elif level is None or level.states is None:
                hidden[name] = np.zeros((1, self._widths[DRAFT_HIDDEN]), dtype=np.float32)
            else:
                hidden[name] = seen(level.states).cpu().numpy()
        return draft_step(depth, features, hidden)


def drawn_tokens(turns: Sequence[tuple[Candidates, Sequence[int]]], owner: Sequence[int]) -> Drawn:
    """Return the tokens at the places of some streams, which were drawn one after the other from the rows `owner`."""
    count: dict[int, int] = {}
    rank = []
    for row in owner:
        rank.append(count.get(row, 0))
        count[row] = rank[-1] + 1
    tokens = [
        (found.tokens[place], found.tokens[found.parent[place]], found.depth[place])
        for found, places in turns
        for place in places
    ]
    return Drawn.of(
        [
            (row, token, above, at, count[row], depth)
            for row, at, (token, above, depth) in zip(owner, rank, tokens, strict=True)
        ]
    )


_NOTHING: Mapping[str, Array] = {}
_ALIVE, _PARENT, _BATCH = np.ones((1, 1), dtype=bool), np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64)
"""Of every step with one branch. A plugin, which may write into what it is shown, is shown copies (`checked_keep`)."""


def draft_step(depth: int, features: Array, hidden: Mapping[str, Array] = _NOTHING) -> DraftStep:
    """Return the step of one stream with one branch.

    Args:
        depth: j.
        features: [1, F].
        hidden: states by name, each [1, H].
    """
    states = {name: values[:, None] for name, values in hidden.items()} if hidden else hidden
    return DraftStep(depth, _ALIVE, _PARENT, features[:, None], states, _BATCH)
