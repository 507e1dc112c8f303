"""What rounds of trees cost: rows fed at a draft step, tokens verified, and everything around them.

As the profile of chains, it is measured through the loop itself, driven by a script: random sub-trees of one topology, small
ones more often than large ones, as with policies. Both contexts share the shape of a curve, each has its own scale: single
sizes come up too seldom to be priced alone, and the best tree would be the one whose size was timed in a lucky moment.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ..policies.contract import DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..policies.costs import Profile
from .candidates import Candidates
from .decide import Logits
from .loop import Speculator
from .noise import mix_one
from .observer import Seen
from .pair import Pair
from .records import Round
from .settings import Settings
from .timings import line, typical

GOES_ON, WHOLE = 5, 1.25
"""One of so many levels is the last one; and the power of the number of nodes of which a random share is verified."""

Points = tuple[tuple[int, float], ...]


class RandomTree(StopPolicy):
    """Extends and verifies branches at random, whatever the text is, in plain numbers.

    A round extends at most 1, 2, 4, ... branches of a depth, each as often as the others, and verifies a number of nodes
    whose logarithm is even.
    """

    name = "random-tree"

    def __init__(self, depth: int, widest: int) -> None:
        self.max_depth, self._widest = depth, widest
        self.first = min(1, depth)

    def start(self, streams: int, key: Tensor) -> State:
        """Return the stream's key and the number of the round; there is one stream."""
        return int(key), 0

    def keep_few(
        self, depth: int, alive: Sequence[bool], parent: Sequence[int], rows: Sequence[Sequence[float]], state: State
    ) -> tuple[list[bool], State]:
        """Keep the first branches, up to the round's own width, or none."""
        wide = _toss(*state) % (1 + self._widest.bit_length())
        left = 2**wide if _toss(*state, depth) % GOES_ON else 0
        return _first(left, alive), state

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep some branches."""
        kept, state = self.keep_few(step.depth, step.alive[0].tolist(), (), (), state)
        return torch.tensor([kept], device=step.alive.device), state

    def select_few(
        self, parent: Sequence[int], depth: Sequence[int], drawn: Sequence[bool], state: State
    ) -> list[bool]:
        """Verify the first nodes, a random number of them or all."""
        limit = (1 + sum(drawn)) ** (WHOLE * _toss(*state, -1) / 2**64)
        return _first(int(limit), drawn)

    def select(self, tree: DraftTree, state: State) -> Tensor:
        """Verify the first nodes."""
        return torch.tensor([self.select_few((), (), tree.drawn[0].tolist(), state)], device=tree.drawn.device)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Count the round."""
        return state[0], state[1] + 1


def _first(count: int, flags: Sequence[bool]) -> list[bool]:
    """Return the flags without those behind the first `count` that are set."""
    return [on and number <= count for on, number in zip(flags, accumulate(flags), strict=True)]


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
        sides = [watching.rounds for watching in self._watching]
        drafts, verifies = _curves([_drafts(side) for side in sides]), _curves([_verifications(side) for side in sides])
        low, high = (
            # None is what plain decoding verifies, on caches that no draft has emptied: it is timed there.
            dataclasses.replace(table, tree_draft_s=draft, tree_verify_s=((0, table.verify_s[0]), *verify))
            for table, draft, verify in zip((profile.low, profile.high), drafts, verifies, strict=True)
        )
        return dataclasses.replace(profile, low=low, high=high, tree_outside_s=_outside(sides[0] + sides[1]))


_Rounds = Sequence[tuple[list[int], Round]]
_Timings = Mapping[tuple[int, ...], list[float]]
"""Seconds together of calls that read so many tokens."""


def _drafts(rounds: _Rounds) -> _Timings:
    """Return the timings of later draft steps."""
    timings: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for fed, record in rounds:
        later = tuple(sorted(rows for rows in fed[1:] if rows))
        if later:
            timings[later].append(record.draft_s)
    return timings


def _verifications(rounds: _Rounds) -> _Timings:
    """Return the timings of verifications."""
    timings: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for _, record in rounds:
        if record.verified:
            timings[(record.verified,)].append(record.verify_s)
    return timings


def _curves(sides: Sequence[_Timings]) -> list[Points]:
    """Return for each context the seconds by tokens: never falling, straight between powers of two."""
    every: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for side in sides:
        for sizes, seconds in side.items():
            every[sizes] += seconds
    if not every:
        return [()] * len(sides)
    knots = _knots(max(max(sizes) for sizes in every))
    per_call, *rises = line([(np.sum([_parts(n, knots) for n in sizes], 0), times) for sizes, times in every.items()])
    known = [per_call + float(np.dot(rises, _parts(n, knots)[1:])) for n in knots]

    def scale(side: _Timings) -> float:
        said = {sizes: float(np.interp(sizes, knots, known).sum()) for sizes in side}
        return typical([s / said[sizes] for sizes, seconds in side.items() for s in seconds if said[sizes]]) or 1.0

    return [tuple((n, scale(side) * seconds) for n, seconds in zip(knots, known, strict=True)) for side in sides]


def _knots(most: int) -> list[int]:
    """Return 1, 2, 4, ... below `most`, and `most`."""
    return [*(2**k for k in range((most - 1).bit_length())), most]


def _parts(tokens: int, knots: Sequence[int]) -> list[float]:
    """Return what a call costs, in calls and in tokens between one knot and the next."""
    return [1.0, *(float(min(max(tokens - low, 0), high - low)) for low, high in pairwise(knots))]


def _outside(rounds: _Rounds) -> tuple[float, float, float] | None:
    """Return the seconds outside models and policy per round, draft step and drafted token."""
    groups: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for fed, record in rounds:
        groups[1, sum(bool(rows) for rows in fed), record.drafted].append(record.outside_s)
    if len(groups) < 3:
        return None
    per_round, per_step, per_token = line(list(groups.items()))
    return per_round, per_step, per_token
