"""What rounds of trees cost: rows fed at a draft step, tokens verified, and everything around them.

As the profile of chains, it is measured through the loop itself, driven by a script: random sub-trees of one topology.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..policies.contract import DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..policies.costs import CostTable, Profile
from .candidates import Candidates
from .decide import Logits
from .loop import Speculator
from .noise import mix_one
from .observer import Seen
from .pair import Pair
from .records import Round
from .settings import Settings
from .timings import line, typical

LEAST = 3
"""Rounds that a size must have come up in to count."""


class RandomTree(StopPolicy):
    """Extends and verifies branches at random, whatever the text is: in each round with another chance; in plain numbers."""

    name = "random-tree"

    def __init__(self, depth: int) -> None:
        self.max_depth = depth
        self.first = min(1, depth)

    def start(self, streams: int, key: Tensor) -> State:
        """Return the stream's key and the number of the round; there is one stream."""
        return int(key), 0

    def keep_few(
        self, depth: int, alive: Sequence[bool], parent: Sequence[int], rows: Sequence[Sequence[float]], state: State
    ) -> tuple[list[bool], State]:
        """Keep some branches, with the round's own chance: a third, two thirds or always."""
        chance = 1 + _toss(*state) % 3
        return [on and _toss(*state, depth, at) % 3 < chance for at, on in enumerate(alive)], state

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep some branches."""
        kept, state = self.keep_few(step.depth, step.alive[0].tolist(), (), (), state)
        return torch.tensor([kept], device=step.alive.device), state

    def select_few(
        self, parent: Sequence[int], depth: Sequence[int], drawn: Sequence[bool], state: State
    ) -> list[bool]:
        """Verify all nodes up to a random one."""
        limit = _toss(*state, -1) % (2 * len(drawn) + 2)
        return [on and (limit > len(drawn) or at < limit) for at, on in enumerate(drawn)]

    def select(self, tree: DraftTree, state: State) -> Tensor:
        """Verify all nodes up to a random one."""
        return torch.tensor([self.select_few((), (), tree.drawn[0].tolist(), state)], device=tree.drawn.device)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Count the round."""
        return state[0], state[1] + 1


def _toss(*numbers: int) -> int:
    """Return 64 mixed bits, the same for the same numbers."""
    mixed = 0
    for number in numbers:
        mixed = mix_one(mixed ^ number)
    return mixed


class _Watching:
    """Keeps what was fed in each round, beside its record."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[int], Round]] = []

    def level(self, found: Candidates, places: Sequence[int], logits: Logits) -> None:
        """See `Observer.level`."""

    def round(self, seen: Seen) -> None:
        """See `Observer.round`."""
        if not seen.record.cut:
            self.rounds.append((seen.found.fed(), seen.record))


class TreeGauge:
    """The costs of one topology in the making; texts are played when it suits, as with `profile.Gauge`.

    Args:
        pair: on its device.
        tree: what `topology.parse_tree` reads.
        temperature: of the sampling.
        new_tokens: decoded from each context.
    """

    def __init__(self, pair: Pair, tree: str, *, temperature: float, new_tokens: int = 96) -> None:
        settings = Settings(temperature, new_tokens, ignore_eos=True, tree=tree)
        self._watching: list[_Watching] = [_Watching(), _Watching()]
        policy = RandomTree(settings.topology.deepest)
        self._runs = [Speculator(pair, policy, settings, observer=watching) for watching in self._watching]

    def play(self, number: int, contexts: Sequence[list[int]]) -> None:
        """Decode one text behind each of the two contexts; number 0 only warms up."""
        for run, watching, tokens in zip(self._runs, self._watching, contexts, strict=True):
            before = len(watching.rounds)
            run.generate(tokens, key=number)
            if not number:
                del watching.rounds[before:]

    def add_to(self, profile: Profile) -> Profile:
        """Return the profile with the costs of trees."""
        sides = [watching.rounds for watching in self._watching]
        every = sides[0] + sides[1]
        low, high = (
            dataclasses.replace(table, tree_draft_s=_draft(side, table), tree_verify_s=_verify(side, every, table))
            for side, table in zip(sides, (profile.low, profile.high), strict=True)
        )
        return dataclasses.replace(profile, low=low, high=high, tree_outside_s=_outside(every))


_Rounds = Sequence[tuple[list[int], Round]]


def _draft(rounds: _Rounds, table: CostTable) -> tuple[tuple[int, float], ...]:
    """Return the line that the later draft steps lie on: seconds = steps * a + rows * b, by averages of like rounds."""
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for fed, record in rounds:
        later = [rows for rows in fed[1:] if rows]
        if later:
            groups[len(later), sum(later)].append(record.draft_s)
    most = max((rows for fed, _ in rounds for rows in fed[1:]), default=1)
    if len({rows / steps for steps, rows in groups}) < 2:
        return table.tree_draft_s
    per_step, per_row = line([(key, values) for key, values in groups.items()])
    return ((1, per_step + per_row), (most, per_step + most * per_row)) if most > 1 else ((1, per_step + per_row),)


def _verify(rounds: _Rounds, every: _Rounds, table: CostTable) -> tuple[tuple[int, float], ...]:
    """Return the seconds by verified tokens; of both contexts together where a size is rare.

    None is what plain decoding verifies, on caches that no draft has emptied: it is timed there, not behind a tree.
    """
    points = [(0, table.verify_s[0])]
    for count in sorted({record.verified for _, record in every if record.verified}):
        times = [[r.verify_s for _, r in some if r.verified == count] for some in (rounds, every)]
        chosen = times[0] if len(times[0]) >= LEAST else times[1]
        if len(chosen) >= LEAST:
            points.append((count, typical(chosen)))
    return tuple(points)


def _outside(rounds: _Rounds) -> tuple[float, float, float] | None:
    """Return the seconds outside models and policy per round, draft step and drafted token."""
    groups: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for fed, record in rounds:
        groups[1, sum(bool(rows) for rows in fed), record.drafted].append(record.outside_s)
    if len(groups) < 3:
        return None
    per_round, per_step, per_token = line(list(groups.items()))
    return per_round, per_step, per_token
