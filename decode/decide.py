"""The policy's side of a round: features of what was just drawn, and the policy's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import DraftStep, State, StopPolicy, checked_keep, checked_short
from ..policies.features import Columns, Drawn, Layout, Summary
from ..policies.history import HistoryOne
from ..policies.vectors import DRAFT_HIDDEN, TARGET_HIDDEN, seen
from .candidates import Candidates
from .summaries import summarise

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Base:
    """What is known of a round before drafting: the features [1, F] as far as they are, and the target's `hidden` [1, H]."""

    features: Array
    hidden: Tensor | None = None


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
    """

    raw: Tensor
    sampled: Tensor | None
    scores: Tensor | None
    owner: Sequence[int]
    states: Tensor | None = None
    best: list[list[float]] | None = None


class Decider:
    """Asks a policy, through `keep_one` or `keep_few` where it has them.

    Args:
        policy: any stop policy.
        chain: whether no round has more than one branch.
        widths: H of each vector that the policy reads.

    Attributes:
        layout: of the policy's features.
        select_few, forget: the policy's, where they may be asked in the place of `select` and `observe`; else None.
    """

    def __init__(self, policy: StopPolicy, chain: bool = True, widths: Mapping[str, int] | None = None) -> None:
        self.policy = policy
        self.layout = Layout(policy.features)
        self._columns = Columns(self.layout.node, self.layout.node_at)
        self._anchor = Columns(self.layout.anchor, self.layout.anchor_at)
        self._follows_path = self._columns.plan.path
        self._one = checked_short(policy, "keep_one") if chain and up_to_date(type(policy)) else None
        few = not policy.vectors and up_to_date(type(policy), "keep", "keep_few")
        self._few = checked_short(policy, "keep_few") if few else None
        selects = up_to_date(type(policy), "select", "select_few")
        self.select_few: Callable[..., list[bool]] | None = checked_short(policy, "select_few") if selects else None
        self.forget = checked_short(policy, "forget") if up_to_date(type(policy), "observe", "forget") else None
        self._widths = dict(widths or {})

    def wants(self, depth: int, deepest: int) -> bool:
        """Whether the tokens of a depth matter: the policy is asked there, or follows paths through it."""
        return self._follows_path or self.policy.first <= depth < deepest

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
        summary = summarise(
            self._columns.plan, logits.raw, drawn, temperature, logits.sampled, logits.scores, logits.best
        )
        return Level(places, drawn, summary, temperature, logits.states)

    def base(
        self,
        anchor_row: Tensor,
        anchor: int,
        before: int,
        history: HistoryOne,
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
        features = np.zeros((1, len(self.layout.names)), dtype=np.float32)
        if self.layout.anchor:
            drawn = Drawn.of([(0, anchor, before, 0, 1, 0)])
            summary = summarise(self._anchor.plan, anchor_row, drawn, temperature)
            self._anchor.write(summary, drawn, temperature, features)
        for at, value in zip(self.layout.history_at, history.values(self.layout.history), strict=True):
            features[0, at] = value
        return Base(features, seen(hidden).cpu() if hidden is not None and self.policy.vectors else None)

    def _vectors(self, base: Base, level: Level | None) -> dict[str, Tensor]:
        """Return the vectors that the policy reads, [B, H] on the host for the B branches of a depth."""
        out = {}
        for name in self.policy.vectors:
            if name == TARGET_HIDDEN:
                assert base.hidden is not None
                out[name] = base.hidden.repeat(1 if level is None else len(level.places), 1)
            elif level is None:
                out[name] = torch.zeros(1, self._widths[DRAFT_HIDDEN], dtype=torch.float32, device="cpu")
            else:
                assert level.states is not None
                out[name] = seen(level.states[level.drawn.ids[:, 0]]).cpu()
        return out

    def __call__(
        self,
        depth: int,
        base: Base,
        level: Level | None,
        state: State,
        found: Candidates,
        alive: Sequence[int],
    ) -> tuple[list[int], State]:
        """Return the places to draft on from, and the policy's new state; raises what the policy raises.

        Args:
            depth: j.
            base: of the round.
            level: of depth j; None at depth 0.
            state: of the policy.
            found: drafted so far.
            alive: places of depth j that could be extended.
        """
        features = base.features
        if level is not None:
            features = features.copy() if len(level.places) == 1 else np.repeat(features, len(level.places), 0)
            self._columns.write(level.summary, level.drawn, level.temperature, features)
        if self._one is not None:
            row = features[0].tolist()
            if self.policy.vectors:
                hidden = {name: states[0].numpy() for name, states in self._vectors(base, level).items()}
                go_on, state = self._one(depth, row, state, hidden)
            else:
                go_on, state = self._one(depth, row, state)
            return list(alive) if go_on else [], state
        mask, at = [True], [0]
        parent: tuple[int, ...] = (0,)
        if level is not None and not found.topology.is_chain:
            rows, parent = found.topology.levels[depth], found.topology.above_in_level[depth]
            at = [found.rows[place] - rows[0] for place in level.places]
            mask = [False] * len(rows)
            for place in alive:
                mask[found.rows[place] - rows[0]] = True
            features = _spread(features, at, mask)
        if self._few is not None:
            kept, state = self._few(depth, mask, parent, features.T.tolist(), state)
        else:
            hidden_states = {
                name: torch.from_numpy(_spread(states.numpy(), at, mask))[None]
                for name, states in self._vectors(base, level).items()
            }
            step = DraftStep(
                depth,
                torch.tensor([mask], device="cpu"),
                torch.tensor([parent], device="cpu"),
                torch.from_numpy(features.copy())[None],
                hidden_states,
            )
            keep, state = checked_keep(self.policy, step, state)
            kept = keep[0].tolist()
        if level is None or found.topology.is_chain:
            return list(alive) if kept[0] else [], state
        first = found.topology.levels[depth][0]
        return [place for place in alive if kept[found.rows[place] - first]], state


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


def _spread(values: Array, at: Sequence[int], mask: Sequence[bool]) -> Array:
    """Return a row for each branch that the topology has at a depth: those drawn at their places, 0 where none is alive."""
    if len(at) == len(mask) and all(mask) and list(at) == sorted(at):
        return values
    full = np.zeros((len(mask), values.shape[1]), dtype=values.dtype)
    full[at] = values
    full[~np.array(mask)] = 0.0
    return full


def draft_step(depth: int, features: Tensor, vectors: Mapping[str, Tensor] | None = None) -> DraftStep:
    """Return the step of one stream with one branch, from its features [1, F] and its vectors, each [1, H]."""
    # Made anew each time: a policy that writes into what it is shown must not reach the steps of others.
    alive, parent = (torch.tensor([[value]], device="cpu") for value in (True, 0))
    return DraftStep(depth, alive, parent, features[:, None], {n: v[:, None] for n, v in (vectors or {}).items()})


def up_to_date(kind: type[StopPolicy], full: str = "keep", short: str = "keep_one") -> bool:
    """Whether `keep_one` is at least as derived as `keep`: a subclass that overrides `keep` alone must be heard."""
    nearest = next(base for base in kind.__mro__ if full in vars(base) or short in vars(base))
    return short in vars(nearest)
