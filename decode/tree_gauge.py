"""What rounds of trees cost: rows fed at a draft step, tokens verified, and everything around them.

As the profile of chains, it is measured through the loop itself, driven by a script: random sub-trees of one topology.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..policies.costs import CostTable, Profile
from .candidates import Candidates
from .decide import Logits
from .loop import Speculator
from .noise import mix
from .observer import Seen
from .pair import Pair
from .records import Round
from .settings import Settings

LEAST = 3
"""Rounds that a size must have come up in to count."""


class RandomTree(StopPolicy):
    """Extends and verifies branches at random, whatever the text is: in each round with another chance."""

    name = "random-tree"

    def __init__(self, depth: int) -> None:
        self.max_depth = depth
        self.first = min(1, depth)

    def start(self, streams: int, key: Tensor) -> State:
        """Return the key and the number of the round."""
        return key, torch.zeros_like(key)

    def _coin(self, state: State, salt: int, count: int) -> Tensor:
        """Return [S, count] bool, true with the round's own chance: a third, two thirds or always."""
        key, number = state
        seed = mix(key + 31 * number)
        chance = 1 + (seed & 0xFFFF) % 3
        cells = torch.arange(count, device=key.device)
        return (mix(mix(seed[:, None] + 7919 * salt) + cells) & 0xFFFF) % 3 < chance[:, None]

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep some branches."""
        return step.alive & self._coin(state, step.depth, step.alive.shape[1]), state

    def select(self, tree: DraftTree, state: State) -> Tensor:
        """Verify all nodes up to a random one."""
        count = tree.drawn.shape[1]
        seed = mix(mix(state[0] + 31 * state[1]) + 3)
        limit = torch.where(seed & 1 == 0, count, (seed >> 1 & 0xFFFF) % (count + 1))
        return tree.drawn & (torch.arange(count, device=seed.device) < limit[:, None])

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Count the round."""
        return state[0], state[1] + outcome.active


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
            dataclasses.replace(table, tree_draft_s=_draft(side, table), tree_verify_s=_verify(side, every))
            for side, table in zip(sides, (profile.low, profile.high), strict=True)
        )
        return dataclasses.replace(profile, low=low, high=high, tree_outside_s=_outside(every))


_Rounds = Sequence[tuple[list[int], Round]]


def _draft(rounds: _Rounds, table: CostTable) -> tuple[tuple[int, float], ...]:
    """Return the line that the later draft steps lie on: seconds = steps * a + rows * b, by medians of like rounds."""
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for fed, record in rounds:
        later = [rows for rows in fed[1:] if rows]
        if later:
            groups[len(later), sum(later)].append(record.draft_s)
    most = max((rows for fed, _ in rounds for rows in fed[1:]), default=1)
    if len({rows / steps for steps, rows in groups}) < 2:
        return table.tree_draft_s
    per_step, per_row = _line([(key, values) for key, values in groups.items()])
    return ((1, per_step + per_row), (most, per_step + most * per_row)) if most > 1 else ((1, per_step + per_row),)


def _verify(rounds: _Rounds, every: _Rounds) -> tuple[tuple[int, float], ...]:
    """Return the medians by verified tokens; of both contexts together where a size is rare."""
    points = []
    for count in sorted({record.verified for _, record in every}):
        times = [[r.verify_s for _, r in some if r.verified == count] for some in (rounds, every)]
        chosen = times[0] if len(times[0]) >= LEAST else times[1]
        if len(chosen) >= LEAST:
            points.append((count, statistics.median(chosen)))
    return tuple(points)


def _outside(rounds: _Rounds) -> tuple[float, float, float] | None:
    """Return the seconds outside models and policy per round, draft step and drafted token."""
    groups: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for fed, record in rounds:
        groups[1, sum(bool(rows) for rows in fed), record.drafted].append(record.outside_s)
    if len(groups) < 3:
        return None
    per_round, per_step, per_token = _line(list(groups.items()))
    return per_round, per_step, per_token


def _line(groups: Sequence[tuple[Any, list[float]]]) -> list[float]:
    """Return the coefficients, none below 0, that the medians of the groups are nearest to, weighted by their size."""
    weight = np.sqrt([len(values) for _, values in groups])
    x = np.array([key for key, _ in groups], dtype=np.float64) * weight[:, None]
    y = np.array([statistics.median(values) for _, values in groups]) * weight
    columns = list(range(x.shape[1]))
    while columns:
        found, *_ = np.linalg.lstsq(x[:, columns], y, rcond=None)
        if (found >= 0).all():
            break
        columns.pop(int(found.argmin()))
    out = [0.0] * x.shape[1]
    for column, value in zip(columns, found if columns else [], strict=True):
        out[column] = float(value)
    return out
