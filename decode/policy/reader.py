"""What a policy is shown of live rounds: the features of what S streams have just drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...policies.contract import Array, DraftStep, StopPolicy
from ...policies.features import DRAFT_HIDDEN, TARGET_HIDDEN, DrawnTokens, Layout
from ...policies.history import History
from ..candidates import Candidates
from ..models.hidden import seen
from ..topology import Topology
from .summaries import lead_over_truncated, read_columns


@dataclass(slots=True)
class Base:
    """What is known of a round before drafting: the features [S, F] as far as they are, and the target's `hidden` [S, H]."""

    features: Array
    hidden: Array | None = None


@dataclass(slots=True)
class Level:
    """The n tokens of one depth, as a policy is shown them.

    Attributes:
        features: [n, F].
        path: [n] log-probabilities of the paths to them, where a feature follows paths; else none.
        streams: of each; none = one token of each stream, in their order, as in most rounds of chains.
        places: of each.
        branch: [n] int64, each token's place in its depth of the topology.
        states: [n, H] the draft's, where they are wanted.
    """

    features: Array
    path: Array
    streams: Sequence[int] = ()
    places: Sequence[int] = ()
    branch: Array | int = 0
    states: Tensor | None = None

    def rows(self, parents: Iterable[tuple[int, int]]) -> list[int]:
        """Return the rows of the tokens at these (stream, place)."""
        row = {place: at for at, place in enumerate(zip(self.streams, self.places, strict=True))}
        return [row[parent] for parent in parents]


@dataclass(slots=True)
class Logits:
    """The draft's side of one depth, stream by stream.

    Attributes:
        raw: [R, V] logits of the places that were fed.
        tokens: what was drawn from them, in this order, as `features.Drawn` has it.
        sampled: [R, V] log-weights, where they are not raw / T; else None.
        scores: [R, V] that `match` took the largest of; None under other modes. `best` by row: see `verify.Drawn`.
        states: [R, H] the draft's last hidden states, where somebody wants them.
        untruncated: [R, V] `sampled` before tokens were left out for being unlikely, where that was done.
    """

    raw: Tensor
    tokens: Sequence[tuple[int, ...]]
    sampled: Tensor | None = None
    scores: Tensor | None = None
    states: Tensor | None = None
    best: list[list[float]] | None = None
    untruncated: Tensor | None = None

    def lead(self, drawn: DrawnTokens) -> Array | None:
        """Return [B], see `summaries.lead_over_truncated`; None where nothing was left out."""
        if self.untruncated is None or self.sampled is None:
            return None
        return lead_over_truncated(self.untruncated, self.sampled, drawn)

    def part(self, tokens: slice) -> Logits:
        """Return what these of the tokens that were drawn were drawn from, which are all of one stream."""
        own = self.tokens[tokens]
        rows = slice(own[0][0], own[-1][0] + 1)  # a stream's rows follow one another
        sampled, scores, states, untruncated = (
            None if some is None else some[rows] for some in (self.sampled, self.scores, self.states, self.untruncated)
        )
        best = None if self.best is None else self.best[rows]
        moved = [(token[0] - rows.start, *token[1:]) for token in own]
        return Logits(self.raw[rows], moved, sampled, scores, states, best, untruncated)


class Reader:
    """Reads, of S streams, what a policy wants to know.

    Args:
        policy: any stop policy.
        widths: H of each hidden state that the policy reads.
        streams: S.

    Attributes:
        layout: of the policy's features.
        reads_target: the policy reads the target's rows or states.
        follows_path: it reads probabilities of paths.
        unknown: the base of a round that nobody asks about.
    """

    def __init__(self, policy: StopPolicy, widths: Mapping[str, int] | None = None, streams: int = 1) -> None:
        self.policy, self._streams = policy, streams
        self.layout = Layout(policy.features)
        self._columns, self._anchor = self.layout.node_columns, self.layout.anchor_columns
        self.follows_path = self._columns.needs.path
        self.reads_target = bool(self.layout.anchor) or TARGET_HIDDEN in policy.hidden
        self._looks = bool(self.layout.node or policy.hidden)
        self._widths = dict(widths or {})
        self._batch = self._together = np.zeros(streams, dtype=np.int64)
        self._parents = np.zeros((streams, 1), dtype=np.int64)  # of single branches
        self.unknown = Base(np.zeros((streams, len(policy.features)), dtype=np.float32))

    def wants(self, depth: int, deepest: int) -> bool:
        """Whether the tokens of a depth matter: the policy is asked there and looks at them, or follows paths through it."""
        return self.follows_path or (self._looks and self.policy.first <= depth < deepest)

    def base(
        self,
        history: History,
        temperature: float = 0.0,
        rows: Tensor | None = None,
        anchors: Sequence[tuple[int, int]] = (),
        hidden: Tensor | None = None,
        streams: Sequence[int] | None = None,
    ) -> Base:
        """Return the ANCHOR and HISTORY columns of a round.

        Args:
            history: of the S streams.
            temperature: of the sampling.
            rows: [A, V], the target's rows that the anchors were drawn from, if the policy `reads_target`.
            anchors: A, each with the token before it.
            hidden: [A, H], the target's last hidden states of these rows, if the policy reads them.
            streams: A, whose they are; None = all of them.
        """
        layout, at = self.layout, slice(None) if streams is None else list(streams)
        self._batch = self._together
        if streams is not None:
            self._batch = np.full(self._streams, -1, dtype=np.int64)  # -1: without a round (`DraftStep.batch`)
            self._batch[at] = 0
        features = np.zeros((self._streams, len(layout.names)), dtype=np.float32)
        if layout.anchor and rows is not None:
            drawn = DrawnTokens.of([(row, anchor, before, 0, 1, 0) for row, (anchor, before) in enumerate(anchors)])
            known = features[at]  # a copy where `at` is a list, so it is put back
            read_columns(self._anchor, rows, drawn, temperature, known)
            features[at] = known
        if layout.history:
            layout.write_history(history, features)
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
        base: Base,
        before: Level | None,
    ) -> Level:
        """Return the level of the tokens just drawn.

        Args:
            turns: of each stream its number, its candidates with these tokens, and their places.
            logits: that they were drawn from.
            temperature: of the sampling.
            base: of the round.
            before: the level before it.
        """
        tree, drawn = turns[0][1].topology, DrawnTokens(np.array(logits.tokens, dtype=np.int64))
        every = tree.is_chain and len(turns) == self._streams  # then there is nothing to put in order
        streams = [] if every else [number for number, _, places in turns for _ in places]
        if self.follows_path and before is not None:
            drawn.parent_path = before.path
            if not every and not before.streams:
                drawn.parent_path = before.path[streams]
            elif not every:  # not everything of the level before was extended
                parents = [(number, found.parent[place]) for number, found, places in turns for place in places]
                drawn.parent_path = before.path[before.rows(parents)]
        if self._columns.needs.noisy:
            drawn.lead = logits.lead(drawn)
        features = base.features.copy() if every else base.features[streams]  # [n, F]
        path = read_columns(
            self._columns, logits.raw, drawn, temperature, features, logits.sampled, logits.scores, logits.best
        )
        states = logits.states
        if every:
            return Level(features, path, states=states)
        states = None if states is None else states[drawn.ids[:, 0].tolist()]
        places = [place for _, _, some in turns for place in some]
        if tree.is_chain:
            return Level(features, path, streams, places, 0, states)
        first = tree.spans[turns[0][1].depth[places[0]]].start  # all are of one depth
        branch = np.array([found.rows[place] - first for _, found, some in turns for place in some])
        return Level(features, path, streams, places, branch, states)

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
        if depth == 0 and alive.shape[1] > 1:
            # Roots that are alternatives for the next token are decided on as one branch.
            alive = np.logical_or.reduce(alive, 1, keepdims=True)
        streams, branches = alive.shape
        parent = self._parents if branches == 1 else tree.parent_in_level[depth][None].repeat(streams, 0)
        if level is not None and not level.streams:
            features = level.features[:, None]
        else:
            features = base.features[:, None].repeat(branches, 1)  # [S, B, F]
            if level is not None:
                features[level.streams, level.branch] = level.features
        if np.count_nonzero(alive) < alive.size:
            features = np.where(alive[..., None], features, _ZERO)  # the contract wants zeros there
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
                states = np.zeros((*alive.shape, self._widths[DRAFT_HIDDEN]), dtype=np.float32)  # [S, B, H]
                if level is not None and level.states is not None:
                    drawn = seen(level.states).cpu().numpy()
                    states[level.streams or slice(None), level.branch] = drawn
            states[~alive] = 0.0
            out[name] = states
        return out

    def _single(self, depth: int, base: Base, level: Level | None) -> DraftStep:
        """Return the step of one stream with one branch."""
        features = base.features if level is None else level.features
        if not self.policy.hidden:
            return draft_step(depth, features)
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


_NOTHING: Mapping[str, Array] = {}
_ZERO = np.float32(0.0)
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
