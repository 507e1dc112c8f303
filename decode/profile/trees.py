"""What rounds of trees cost: rows fed at a draft step, tokens verified, and everything around them.

As the profile of chains, it is measured through the loop itself, driven by a script: random sub-trees of one topology, small
ones more often than large ones, as with policies. Both contexts share the shape of a curve, each has its own scale: single
sizes come up too seldom to be priced alone, and the best tree would be the one whose size was timed in a lucky moment. Every
few rounds draft and verify a single path, as a chain does: they tell how fast the machine was when chains were timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...policies.contract import DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ...policies.latency.estimate import CONTEXTS, TREE_DRAFTS, TREE_OUTSIDE, TREE_PATH, TREE_VERIFY
from ...policies.latency.measurements import Key
from ..candidates import Candidates
from ..decide import Logits
from ..loop import Speculator
from ..noise import mix_one
from ..observer import Seen
from ..pair import Pair
from ..records import Round
from ..settings import Settings

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


class TreeRun:
    """Texts that are decoded with one topology, to time the parts of rounds that branch.

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

    def play(self, number: int, contexts: Sequence[list[int]]) -> dict[Key, list[float]]:
        """Decode one text after each of the two contexts and return its timings."""
        timed: dict[Key, list[float]] = defaultdict(list)
        for side, run, watching, tokens in zip(CONTEXTS, self._runs, self._watching, contexts, strict=True):
            watching.rounds.clear()
            run.generate(tokens, key=number)
            for played in watching.rounds:
                _add_round(timed, side, played)
        return timed


def _add_round(timed: dict[Key, list[float]], side: str, played: _Played) -> None:
    """Add the timings of one round: as of a chain, if it is one, to tell how fast the machine was then."""
    record, steps = played.record, sum(bool(rows) for rows in played.fed)
    later = tuple(sorted(rows for rows in played.fed[1:] if rows))
    if later:
        timed[Key(TREE_DRAFTS, side, later)].append(record.draft_s)
    if record.verified:
        timed[Key(TREE_VERIFY, side, (record.verified,))].append(record.verify_s)
    if played.is_path:
        timed[Key(TREE_PATH, side, (sum(played.fed[1:]), record.verified))].append(record.draft_s + record.verify_s)
    else:  # less is to be drawn, accepted and moved in a path
        timed[Key(TREE_OUTSIDE, side, (steps, record.drafted))].append(record.outside_s)
