"""What a policy is shown of a live round: the features of what was just drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..policies.contract import Array, DraftStep, StopPolicy
from ..policies.features import Columns, Drawn, Layout, Summary
from ..policies.features.hidden_states import DRAFT_HIDDEN, TARGET_HIDDEN
from ..policies.features.history import History
from .candidates import Candidates
from .models.hidden import seen
from .summaries import lead_over_truncated, summarise


@dataclass(slots=True)
class Base:
    """What is known of a round before drafting: the features [1, F] as far as they are, and the target's `hidden` [1, H]."""

    features: Array
    hidden: Array | None = None


@dataclass(slots=True)
class Level:
    """The tokens of one depth, as features are computed from them: their places, their summary, and `states` [R, H]."""

    places: Sequence[int]
    drawn: Drawn
    summary: Summary
    temperature: float
    states: Tensor | None = None


@dataclass(slots=True)
class Logits:
    """The draft's side of one depth.

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


class Reader:
    """Reads, of one stream, what a policy wants to know.

    Args:
        policy: any stop policy.
        widths: H of each hidden state that the policy reads.

    Attributes:
        layout: of the policy's features.
    """

    def __init__(self, policy: StopPolicy, widths: Mapping[str, int] | None = None) -> None:
        self.policy = policy
        self.layout = Layout(policy.features)
        self._columns = Columns(self.layout.node, self.layout.node_at)
        self._anchor = Columns(self.layout.anchor, self.layout.anchor_at)
        self._follows_path = self._columns.plan.path
        self._looks = bool(self.layout.node or policy.hidden)
        self._widths = dict(widths or {})

    def wants(self, depth: int, deepest: int) -> bool:
        """Whether the tokens of a depth matter: the policy is asked there and looks at them, or follows paths through it."""
        return self._follows_path or (self._looks and self.policy.first <= depth < deepest)

    def level(
        self, found: Candidates, places: Sequence[int], logits: Logits, temperature: float, above: Level | None
    ) -> Level:
        """Return the level of the tokens just drawn.

        Args:
            found: with these tokens.
            places: theirs.
            logits: that they were drawn from.
            temperature: of the sampling.
            above: the level before it.
        """
        drawn = drawn_tokens(found, places, logits.owner)
        if self._follows_path and above is not None:
            at = {place: row for row, place in enumerate(above.places)}
            drawn.parent_path = above.summary.path[[at[found.parent[place]] for place in places]]
        if self._columns.plan.noisy:
            drawn.lead = logits.lead(drawn)
        summary = summarise(
            self._columns.plan, logits.raw, drawn, temperature, logits.sampled, logits.scores, logits.best
        )
        return Level(places, drawn, summary, temperature, logits.states)

    def base(
        self,
        anchor_row: Tensor,
        anchor: int,
        before: int,
        history: History,
        temperature: float = 0.0,
        hidden: Tensor | None = None,
    ) -> Base:
        """Return the ANCHOR and HISTORY columns of a round.

        Args:
            anchor_row: [1, V], the target's row that the anchor was drawn from.
            anchor, before: the anchor token and the one before it.
            history: of the text.
            temperature: of the sampling.
            hidden: [1, H], the target's last hidden state of that row, if the policy reads it.
        """
        layout = self.layout
        features = np.zeros((1, len(layout.names)), dtype=np.float32)
        if layout.anchor:
            drawn = Drawn.of([(0, anchor, before, 0, 1, 0)])
            summary = summarise(self._anchor.plan, anchor_row, drawn, temperature)
            self._anchor.write(summary, drawn, temperature, features)
        if layout.history:
            features[:, layout.history_at] = history.values(layout.history)
        reads = TARGET_HIDDEN in self.policy.hidden and hidden is not None
        return Base(features, seen(hidden).cpu().numpy() if reads and hidden is not None else None)

    def _hidden(self, base: Base, level: Level | None) -> dict[str, Array]:
        """Return the hidden states that the policy reads, [B, H] for the B branches of a depth."""
        out = {}
        for name in self.policy.hidden:
            if name == TARGET_HIDDEN:
                assert base.hidden is not None
                out[name] = base.hidden.repeat(1 if level is None else len(level.places), 0)
            elif level is None:
                out[name] = np.zeros((1, self._widths[DRAFT_HIDDEN]), dtype=np.float32)
            else:
                assert level.states is not None
                out[name] = seen(level.states[level.drawn.ids[:, 0]]).cpu().numpy()
        return out

    def step(self, depth: int, base: Base, level: Level | None, found: Candidates, alive: Array) -> DraftStep:
        """Return what the policy is shown.

        Args:
            depth: j.
            base: of the round.
            level: of depth j; None at depth 0, and where the policy looks at no token.
            found: drafted so far.
            alive: [1, B] bool, the branches of depth j that could be extended.
        """
        features = base.features
        if level is not None:
            features = features.copy() if len(level.places) == 1 else features.repeat(len(level.places), 0)
            self._columns.write(level.summary, level.drawn, level.temperature, features)
        hidden = self._hidden(base, level) if self.policy.hidden else _NOTHING
        tree = found.topology
        if depth == 0 or tree.is_chain:
            return draft_step(depth, features, hidden)
        if level is None:  # nothing of the tokens themselves
            features = features * alive[0][:, None]
            return DraftStep(depth, alive, tree.above_in_level[depth][None], features[None], hidden, _BATCH)
        first, width = tree.spans[depth].start, alive.shape[1]
        at = [found.rows[place] - first for place in level.places]
        if np.count_nonzero(alive) < width or at != sorted(at):
            features = _spread(features, at, alive[0])
            hidden = {name: _spread(states, at, alive[0]) for name, states in hidden.items()}
        shown = {name: states[None] for name, states in hidden.items()} if hidden else hidden
        return DraftStep(depth, alive, tree.above_in_level[depth][None], features[None], shown, _BATCH)


def drawn_tokens(found: Candidates, places: Sequence[int], owner: Sequence[int]) -> Drawn:
    """Return the tokens at `places`, which were drawn one after the other from the rows `owner` of some logits."""
    depth = found.depth[places[0]]
    if len(places) == 1:
        place = places[0]
        return Drawn.of([(owner[0], found.tokens[place], found.tokens[found.parent[place]], 0, 1, depth)])
    count: dict[int, int] = {}
    rank = []
    for row in owner:
        rank.append(count.get(row, 0))
        count[row] = rank[-1] + 1
    return Drawn.of(
        [
            (row, found.tokens[place], found.tokens[found.parent[place]], at, count[row], depth)
            for place, row, at in zip(places, owner, rank, strict=True)
        ]
    )


def _spread(values: Array, at: Sequence[int], mask: Array) -> Array:
    """Return a row for each branch that the topology has at a depth: those drawn at their places, 0 where none is alive."""
    full = np.zeros((len(mask), values.shape[1]), dtype=values.dtype)
    full[at] = values
    full[~mask] = 0.0
    return full


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
