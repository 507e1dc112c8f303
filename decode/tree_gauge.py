"""What rounds of trees cost: rows fed at a draft step, tokens verified, and everything around them.

As the profile of chains, it is measured through the loop itself, driven by a script: random sub-trees of one topology, small
ones more often than large ones, as with policies. Both contexts share the shape of a curve, each has its own scale: single
sizes come up too seldom to be priced alone, and the best tree would be the one whose size was timed in a lucky moment. Every
few rounds draft and verify a single path, as a chain does: they tell how fast the machine was when chains were timed.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
from .timings import Calls, line, rising, typical

PATHS = 3
"""One of so many rounds is a single path."""

GOES_ON, WHOLE = 5, 1.25
"""One of so many levels is the last one; and the power of the number of nodes of which a random share is verified."""


class RandomTree(StopPolicy):
    """Extends and verifies branches at random, whatever the text is, in plain numbers.

    Some rounds are a single path. Others extend at most 1, 2, 4, ... branches of a depth, each as often as the others, and
    verify a number of nodes whose logarithm is even.
    """

    name = "random-tree"

    def __init__(self, depth: int, widest: int) -> None:
        self.max_depth, self._widest = depth, widest
        self.first = min(1, depth)

    def start(self, streams: int, key: Tensor) -> State:
        """Return the stream's key and the number of the round; there is one stream."""
        return int(key), 0

    def keep_few(
        self, depth: int, alive: Sequence[bool], parent: Sequence[int], columns: Sequence[Sequence[float]], state: State
    ) -> tuple[list[bool], State]:
        """Keep the first branches, up to the round's own width, or none."""
        wide = 0 if _is_path(state) else _toss(*state) % (1 + self._widest.bit_length())
        left = 2**wide if _toss(*state, depth) % GOES_ON else 0
        return _first(left, alive), state

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep some branches."""
        kept, state = self.keep_few(step.depth, step.alive[0].tolist(), (), (), state)
        return torch.tensor([kept], device=step.alive.device), state

    def select_few(
        self, parent: Sequence[int], depth: Sequence[int], drawn: Sequence[bool], state: State
    ) -> list[bool]:
        """Verify the first nodes, a random number of them or all; or the first one of each depth."""
        if _is_path(state):
            return [on and (at == 0 or depth[at] > depth[at - 1]) for at, on in enumerate(drawn)]
        limit = (1 + sum(drawn)) ** (WHOLE * _toss(*state, -1) / 2**64)
        return _first(int(limit), drawn)

    def select(self, tree: DraftTree, state: State) -> Tensor:
        """Verify the first nodes."""
        parent, depth, drawn = (values[0].tolist() for values in (tree.parent, tree.depth, tree.drawn))
        return torch.tensor([self.select_few(parent, depth, drawn, state)], device=tree.drawn.device)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Count the round."""
        return state[0], state[1] + 1


def _is_path(state: State) -> bool:
    return _toss(*state, -2) % PATHS == 0


def _first(count: int, flags: Sequence[bool]) -> list[bool]:
    """Return the flags without those behind the first `count` that are set."""
    return [on and number <= count for on, number in zip(flags, accumulate(flags), strict=True)]


def _toss(*numbers: int) -> int:
    """Return 64 mixed bits, the same for the same numbers."""
    mixed = 0
    for number in numbers:
        mixed = mix_one(mixed ^ number)
    return mixed


@dataclass(frozen=True)
class _Played:
    """A round, the rows that were fed at each of its draft steps, and whether it was a chain."""

    record: Round
    fed: list[int]
    is_path: bool


class _Watching:
    """Keeps the rounds that were not cut short."""

    def __init__(self) -> None:
        self.rounds: list[_Played] = []

    def level(self, found: Candidates, places: Sequence[int], logits: Logits) -> None:
        """See `Observer.level`."""

    def round(self, seen: Seen) -> None:
        """See `Observer.round`."""
        if not seen.record.cut:
            fed = seen.found.fed()
            is_path = max(fed) == 1 and len(seen.sent) == seen.found.depth[seen.sent[-1]] + 1
            self.rounds.append(_Played(seen.record, fed, is_path))


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
        policy = RandomTree(settings.topology.deepest, settings.topology.width)
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
        tables, sides = (profile.low, profile.high), [watching.rounds for watching in self._watching]
        paces = [_pace(side, table) for side, table in zip(sides, tables, strict=True)]
        timed = list(zip(sides, paces, strict=True))
        drafts, verifies = (rising([calls(*side) for side in timed]) for calls in (_drafts, _verifications))
        low, high = (
            # None is what plain decoding verifies, on caches that no draft has emptied: it is timed there.
            dataclasses.replace(table, tree_draft_s=draft, tree_verify_s=((0, table.verify_s[0]), *verify))
            for table, draft, verify in zip(tables, drafts, verifies, strict=True)
        )
        return dataclasses.replace(profile, low=low, high=high, tree_outside_s=_outside(timed))


def _pace(rounds: Sequence[_Played], table: CostTable) -> float:
    """Return how much slower the machine was than when the chains of `table` were timed, by the rounds that are chains."""
    shares = []
    for played in rounds:
        steps, record = sum(played.fed[1:]), played.record
        if played.is_path and 0 < record.verified < len(table.verify_s):
            drafts = (table.second_draft_s or table.later_s) + (steps - 1) * table.later_s if steps else 0.0
            shares.append((record.draft_s + record.verify_s) / (drafts + table.verify_s[record.verified]))
    return typical(shares) or 1.0


def _drafts(rounds: Sequence[_Played], pace: float) -> Calls:
    """Return the timings of later draft steps, those of each round together."""
    timings: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for played in rounds:
        later = tuple(sorted(rows for rows in played.fed[1:] if rows))
        if later:
            timings[later].append(played.record.draft_s / pace)
    return timings


def _verifications(rounds: Sequence[_Played], pace: float) -> Calls:
    """Return the timings of verifications."""
    timings: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for played in rounds:
        if played.record.verified:
            timings[(played.record.verified,)].append(played.record.verify_s / pace)
    return timings


def _outside(timed: Sequence[tuple[Sequence[_Played], float]]) -> tuple[float, float, float] | None:
    """Return the seconds outside models and policy per round, draft step and drafted token, of rounds that branch."""
    groups: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for rounds, pace in timed:
        for played in rounds:
            if played.is_path:  # less is to be drawn, accepted and moved
                continue
            key = 1, sum(bool(rows) for rows in played.fed), played.record.drafted
            groups[key].append(played.record.outside_s / pace)
    if len(groups) < 3:
        return None
    per_round, per_step, per_token = line(list(groups.items()))
    return per_round, per_step, per_token
