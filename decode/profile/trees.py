"""What rounds of trees cost: rows fed at a draft step, tokens verified, and everything around them.

As the profile of chains, it is measured through the loop itself, driven by a script: random sub-trees of one topology, small
ones more often than large ones, as with policies. Both contexts share the shape of a curve, each has its own scale: single
sizes come up too seldom to be priced alone, and the best tree would be the one whose size was timed in a lucky moment. Every
few rounds draft and verify a single path, as a chain does, and now and then some in a row the whole tree, as a static one
does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...policies.contract import DraftStep, DraftTree, State
from ...policies.estimate import TREE_OUTSIDE, TREE_VERIFY
from ...policies.latency.estimate import TREE_DRAFTS
from ...policies.measurements import CONTEXTS, Key
from ...policies.typing import Array
from ..hooks import Hook
from ..loop import Speculator
from ..models.pair import Pair
from ..records import Round
from ..round_state import RoundState
from ..settings import Settings
from ..verify.noise import mix_one
from ..verify.sampling import MODEL_DEFAULTS, SamplingParams
from .carry_over import TREE_ROUND, Before
from .script import streams_of_script
from .scripts import Script

PATHS = 3
"""One of so many rounds is a single path."""

WHOLES, RUN = 6, 4
"""One of so many runs of rounds is of whole trees, and the rounds of a run: drawn at random they came once in a hundred
rounds, and never after their like."""

GOES_ON, WHOLE = 5, 1.25
"""One of so many levels is the last one; and the power of the number of nodes of which a random share is verified."""


class RandomTree(Script):
    """Extends and verifies branches at random, whatever the text is.

    Some rounds are a single path, some the whole tree. Others extend at most 1, 2, 4, ... branches of a depth, each as often
    as the others, and verify a number of nodes whose logarithm is even.
    """

    name = "random-tree"

    def __init__(self, depth: int, widest: int) -> None:
        self.max_depth, self._widest = depth, widest
        self.first = min(1, depth)

    def _width(self, depth: int, key: int, number: int) -> int:
        """Return how many branches of a depth a round extends."""
        if _is_whole(key, number):
            return self._widest
        wide = 0 if _is_path(key, number) else _toss(key, number) % (1 + self._widest.bit_length())  # 2^wide, up to all
        return 2**wide if _toss(key, number, depth) % GOES_ON else 0

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the first branches, up to the round's own width, or none."""
        widths = [[self._width(step.depth, *stream)] for stream in streams_of_script(state)]
        return step.alive & (step.alive.cumsum(1) <= np.array(widths)), state

    def select(self, tree: DraftTree, state: State) -> Array:
        """Verify the first nodes, a random number of them or all; or the first one of each depth."""
        drawn = tree.drawn.sum(1).tolist()
        most = [
            # All, for a fifth of the tosses.
            [count if _is_whole(*stream) else int((1 + count) ** (WHOLE * _toss(*stream, -1) / 2**64))]
            for count, stream in zip(drawn, streams_of_script(state), strict=True)
        ]
        paths = np.array([[_is_path(*stream)] for stream in streams_of_script(state)])
        deeper = np.diff(tree.depth, prepend=0) > 0
        return tree.drawn & np.where(paths, deeper, tree.drawn.cumsum(1) <= np.array(most))


def _is_path(key: int, number: int) -> bool:
    return _toss(key, number, -2) % PATHS == 0 and not _is_whole(key, number)


def _is_whole(key: int, number: int) -> bool:
    # Dealt, not tossed: of few texts none might have had one, and the largest size been a guess. The first texts, which may
    # be all, have them early.
    return (number // RUN - max(key - 1, 0)) % WHOLES == 0


def _toss(*numbers: int) -> int:
    """Return 64 mixed bits, the same for the same numbers."""
    # Depths, -1 and -2 as the last number keep the draws of a round apart.
    mixed = 0
    for number in numbers:
        mixed = mix_one(mixed ^ number)
    return mixed


@dataclass(frozen=True)
class _TimedRound:
    """A round, the rows that were fed at each of its draft steps, and whether it was a chain."""

    record: Round
    fed: list[int]
    is_path: bool


class _RecordRounds(Hook):
    """Keeps the rounds that were not cut short."""

    def __init__(self) -> None:
        self.rounds: list[_TimedRound] = []

    def on_round_end(self, round: RoundState) -> None:
        """Keep the record of a round of one stream."""
        for stream, sent in round.target_rows:
            if not (record := round.records[stream]).cut:
                fed = [int(rows) for rows in round.steps[stream]]
                is_path = max(fed) == 1 and len(sent) == round.topology.depth[sent[-1]] + 1
                self.rounds.append(_TimedRound(record, fed, is_path))


class TreeRun:
    """Texts that are decoded with one topology, to time the parts of rounds that branch.

    Args:
        pair: on its device.
        tree: what `topology.parse_tree` reads.
        temperature: of the sampling.
        new_tokens: decoded from each context.
        shaping: what else changes the distribution that is sampled from.
        verification: the mode, one of trees.
    """

    def __init__(
        self,
        pair: Pair,
        tree: str,
        *,
        temperature: float,
        new_tokens: int = 96,
        shaping: SamplingParams = MODEL_DEFAULTS,
        verification: str = "auto",
    ) -> None:
        settings = Settings(
            temperature, new_tokens, ignore_eos=True, tree=tree, shaping=shaping, verification=verification
        )
        self._watching: list[_RecordRounds] = [_RecordRounds(), _RecordRounds()]
        policy = RandomTree(settings.topology.deepest, settings.topology.width)
        self._runs = [Speculator(pair, policy, settings, hooks=[watching]) for watching in self._watching]

    def play(self, number: int, contexts: Sequence[list[int]]) -> dict[Key, list[float]]:
        """Decode one text after each of the two contexts and return its timings."""
        timed: dict[Key, list[float]] = defaultdict(list)
        for side, run, watching, tokens in zip(CONTEXTS, self._runs, self._watching, contexts, strict=True):
            watching.rounds.clear()
            run.generate(tokens, key=number)
            before = Before()
            for seen in watching.rounds:
                _add_round(timed, side, seen, before.add(seen.record.verified))
        return timed


def _add_round(timed: dict[Key, list[float]], side: str, seen: _TimedRound, before: int | None) -> None:
    """Add the timings of one round.

    Args:
        timed: is added to.
        side: the context.
        seen: the round.
        before: see `Before`.
    """
    record, steps = seen.record, sum(bool(rows) for rows in seen.fed)
    later = tuple(sorted(rows for rows in seen.fed[1:] if rows))  # timed together, in whatever order
    if later:
        timed[Key(TREE_DRAFTS, side, later)].append(record.draft_s)
    timed[Key(TREE_ROUND, side, (record.verified,))].append(record.seconds)
    if record.verified and before is not None:  # of none: plain decoding, timed on its own
        timed[Key(TREE_VERIFY, side, (record.verified, before))].append(record.verify_s)
    if not seen.is_path:  # less is to be drawn, accepted and moved in a path
        timed[Key(TREE_OUTSIDE, side, (steps, record.drafted))].append(record.outside_s)
