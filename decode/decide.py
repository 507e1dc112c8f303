"""The policy's side of a round: features of what was just drawn, and the policy's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..policies.contract import DraftStep, State, StopPolicy, checked_keep
from ..policies.features import Layout, Rows, compute, single_precision
from ..policies.few import FewReader, FewRows, reads_few
from ..policies.history import HistoryOne
from ..policies.single import Reader, Row
from ..policies.vectors import DRAFT_HIDDEN, TARGET_HIDDEN, seen
from .candidates import Candidates


@dataclass(slots=True)
class Base:
    """What is known of a round before drafting: `columns` [1, .] as a tensor, or `row` as numbers; `hidden` [1, H]."""

    columns: Tensor | None = None
    row: list[float] | None = None
    hidden: Tensor | None = None


@dataclass(slots=True)
class Level:
    """The tokens of one depth as features are computed from them: the places, a row for each, and [R, H] `states`."""

    places: Sequence[int]
    rows: Rows | Row | FewRows
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
    """Asks a policy, through `keep_one` where that will do: one branch, logits on the CPU, a policy that has it.

    Args:
        policy: any stop policy.
        device: of the logits.
        chain: whether no round has more than one branch.
        widths: H of each vector that the policy reads.

    Attributes:
        layout: of the policy's features.
        select_few, forget: the policy's, where they may be asked in the place of `select` and `observe`; else None.
    """

    def __init__(
        self, policy: StopPolicy, device: torch.device, chain: bool = True, widths: Mapping[str, int] | None = None
    ) -> None:
        self.policy = policy
        self.layout = Layout(policy.features)
        alone = chain and device.type == "cpu"
        self._one = policy.keep_one if alone and up_to_date(type(policy)) else None
        numbers = device.type == "cpu" and up_to_date(type(policy), "select", "select_few")
        self.select_few = policy.select_few if numbers else None
        self.forget = policy.forget if up_to_date(type(policy), "observe", "forget") else None
        self._chain, self._widths, self._device = chain, dict(widths or {}), device
        self._follows_path = "path_logprob" in self.layout.node
        plain = device.type == "cpu" and not policy.vectors and reads_few(self.layout.node)
        self._keep_few = policy.keep_few if plain and up_to_date(type(policy), "keep", "keep_few") else None
        few = plain and self._one is None and (self._keep_few is not None or not chain)
        self._read_few = FewReader(self.layout.node) if few else None
        self._read, self._read_anchor = Reader(self.layout.node), Reader(self.layout.anchor)
        ids = ("anchor_token", "before_token")
        self._anchor_ids = [ids.index(n) for n in self.layout.anchor] if set(self.layout.anchor) <= set(ids) else None

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
        depth = found.depth[places[0]]
        if self._one is not None:
            parent: Any = above.rows if above is not None and self._follows_path else 0.0
            token = found.tokens[places[0]]
            last = found.tokens[found.parent[places[0]]]
            row = Row(logits.raw, temperature, logits.scores, token, parent, depth, logits.sampled, last)
            return Level(places, row, logits.states)
        if self._read_few is not None:
            return Level(places, self._few_rows(found, places, logits, temperature, above))
        device = logits.raw.device
        owner = torch.tensor(logits.owner, device=device)
        tokens = torch.tensor([found.tokens[place] for place in places], device=device)
        raw, sampled, scores, states = (
            v if v is None or self._chain else v[owner]
            for v in (logits.raw, logits.sampled, logits.scores, logits.states)
        )
        rank = width = None
        if not self._chain:
            siblings = [found.children[found.parent[place]] for place in places]
            rank = torch.tensor([all_.index(p) for p, all_ in zip(places, siblings, strict=True)], device=device)
            width = torch.tensor([len(all_) for all_ in siblings], device=device)
        logprob = None
        if self._follows_path:
            assert raw is not None
            logprob = raw.new_zeros(len(places)) if above is None else self._inherited(found, places, above)
        assert raw is not None
        behind = torch.tensor([found.tokens[found.parent[place]] for place in places], device=device)
        rows = Rows(raw, temperature, scores, tokens, logprob, depth, sampled, rank, width, behind)
        return Level(places, rows, states)

    def _few_rows(
        self, found: Candidates, places: Sequence[int], logits: Logits, temperature: float, above: Level | None
    ) -> FewRows:
        first, end = places[0], places[-1] + 1  # drawn one after the other
        parents, owner = found.parent[first:end], logits.owner
        if len(logits.raw) == 1:
            rank, width = list(range(len(places))), [len(places)] * len(places)
        else:
            count = [0] * len(logits.raw)
            rank = []
            for row in owner:  # siblings stand in the order in which they were drawn
                rank.append(count[row])
                count[row] += 1
            width = [count[row] for row in owner]
        rows, parent = None, []
        if above is not None and self._follows_path:
            assert isinstance(above.rows, FewRows)
            at = {place: row for row, place in enumerate(above.places)}
            rows, parent = above.rows, [at[place] for place in parents]
        return FewRows(
            logits.raw,
            temperature,
            logits.scores,
            owner,
            found.tokens[first:end],
            rank,
            width,
            [found.tokens[place] for place in parents],
            rows,
            parent,
            found.depth[first],
            logits.sampled,
            logits.best,
        )

    def _inherited(self, found: Candidates, places: Sequence[int], above: Level) -> Tensor:
        at = {place: row for row, place in enumerate(above.places)}
        assert isinstance(above.rows, Rows)
        logprob = above.rows.path_logprob
        return logprob[[at[found.parent[place]] for place in places]]

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
        past = history.values(self.layout.history)
        states = seen(hidden) if hidden is not None and self.policy.vectors else None
        if self._one is not None or self._read_few is not None:
            if self._anchor_ids is None:
                past = self._read_anchor(Row(anchor_row, temperature, None, anchor, behind=before)) + past
            elif self._anchor_ids:
                known = float(anchor), float(before)
                past = [known[at] for at in self._anchor_ids] + past
            return Base(row=single_precision(past), hidden=states)
        device = anchor_row.device
        own, behind = (torch.tensor([token], device=device) for token in (anchor, before))
        rows = Rows(anchor_row, temperature, tokens=own, above=behind)
        columns = self.layout.base(compute(self.layout.anchor, rows), torch.tensor([past], device=device))
        return Base(columns, hidden=states)

    def _vectors(self, base: Base, level: Level | None) -> dict[str, Tensor]:
        """Return the vectors that the policy reads, [R, H] for the R branches of a depth."""
        out = {}
        for name in self.policy.vectors:
            if name == TARGET_HIDDEN:
                assert base.hidden is not None
                out[name] = base.hidden.repeat(1 if level is None else len(level.places), 1)
            elif level is None:
                out[name] = torch.zeros(1, self._widths[DRAFT_HIDDEN], device=self._device)
            else:
                assert level.states is not None
                out[name] = seen(level.states)
        return out

    def _few_numbers(
        self, depth: int, base: list[float], level: Level | None, found: Candidates, alive: Sequence[int]
    ) -> tuple[list[bool], Sequence[int], Sequence[Sequence[float]]]:
        """Return which branches of a depth are alive, their parents, and by feature their columns; see `_tree_step`."""
        if level is None:
            return [True], [0], [[value] for value in self.layout.step_one(base)]
        assert self._read_few is not None and isinstance(level.rows, FewRows)
        places, rows, parent = level.places, found.topology.levels[depth], found.topology.above_in_level[depth]
        columns = self.layout.columns_few(base, self._read_few(level.rows), len(places))
        drawn = found.rows[places[0] : places[-1] + 1]
        if len(alive) == len(rows) and drawn == rows:  # all that the tree has at this depth, in its order
            return [True] * len(rows), parent, columns
        at = [-1] * len(rows)
        for place in alive:
            at[found.rows[place] - rows[0]] = place - places[0]
        return [number >= 0 for number in at], parent, [[*map([*column, 0.0].__getitem__, at)] for column in columns]

    def __call__(
        self, depth: int, base: Base, level: Level | None, state: State, found: Candidates, alive: Sequence[int]
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
        if self._one is not None:
            assert base.row is not None
            nodes = None
            if level is not None:
                assert isinstance(level.rows, Row)
                nodes = self._read(level.rows)
            row = self.layout.step_one(base.row, nodes)
            if self.policy.vectors:
                hidden = {name: states[0].numpy() for name, states in self._vectors(base, level).items()}
                go_on, state = self._one(depth, row, state, hidden)
            else:
                go_on, state = self._one(depth, row, state)
            return list(alive) if go_on else [], state
        if self._read_few is not None:
            assert base.row is not None
            mask, parent, columns = self._few_numbers(depth, base.row, level, found, alive)
            if self._keep_few is not None:
                kept, state = self._keep_few(depth, mask, parent, columns, state)
            else:
                features = torch.tensor(columns).reshape(1, len(columns), len(mask)).transpose(1, 2)
                step = DraftStep(depth, torch.tensor([mask]), torch.tensor([parent]), features)
                keep, state = checked_keep(self.policy, step, state)
                kept = keep[0].tolist()
            left = 0 if level is None else found.topology.levels[depth][0]
            return [place for place in alive if kept[found.rows[place] - left]], state
        assert base.columns is not None
        if level is None:
            first = draft_step(0, self.layout.step(base.columns), self._vectors(base, level))
            keep, state = checked_keep(self.policy, first, state)
            return list(alive) if bool(keep) else [], state
        assert isinstance(level.rows, Rows)
        features = self.layout.step(base.columns.expand(len(level.places), -1), compute(self.layout.node, level.rows))
        vectors = self._vectors(base, level)
        if self._chain:
            keep, state = checked_keep(self.policy, draft_step(depth, features, vectors), state)
            return list(alive) if bool(keep) else [], state
        step = _tree_step(depth, features, vectors, level.places, found, alive)
        keep, state = checked_keep(self.policy, step, state)
        left = found.topology.levels[depth][0]
        kept = keep[0].tolist()
        return [place for place in alive if kept[found.rows[place] - left]], state


def _tree_step(
    depth: int,
    features: Tensor,
    vectors: Mapping[str, Tensor],
    places: Sequence[int],
    found: Candidates,
    alive: Sequence[int],
) -> DraftStep:
    """Return the step of one stream, with a column for each row that the topology has at this depth, drawn or not."""
    topology = found.topology
    level = topology.levels[depth]
    above = topology.levels[depth - 1][0] if depth > 1 else None
    at = torch.tensor([found.rows[place] - level[0] for place in places], device=features.device)
    mask = torch.zeros(1, len(level), dtype=torch.bool, device=features.device)
    mask[0, [found.rows[place] - level[0] for place in alive]] = True

    def spread(values: Tensor) -> Tensor:
        full = values.new_zeros(1, len(level), values.shape[-1])
        full[0, at] = values
        full[~mask] = 0.0
        return full

    parent = torch.tensor(
        [[0 if above is None else topology.parent[row] - above for row in level]], device=features.device
    )
    return DraftStep(depth, mask, parent, spread(features), {name: spread(values) for name, values in vectors.items()})


def draft_step(depth: int, features: Tensor, vectors: Mapping[str, Tensor] | None = None) -> DraftStep:
    """Return the step of one stream with one branch, from its features [1, F] and its vectors, each [1, H]."""
    # Made anew each time: a policy that writes into what it is shown must not reach the steps of others.
    alive = torch.ones(1, 1, dtype=torch.bool, device=features.device)
    parent = torch.zeros(1, 1, dtype=torch.int64, device=features.device)
    return DraftStep(depth, alive, parent, features[:, None], {n: v[:, None] for n, v in (vectors or {}).items()})


def up_to_date(kind: type[StopPolicy], full: str = "keep", short: str = "keep_one") -> bool:
    """Whether `keep_one` is at least as derived as `keep`: a subclass that overrides `keep` alone must be heard."""
    nearest = next(base for base in kind.__mro__ if full in vars(base) or short in vars(base))
    return short in vars(nearest)
