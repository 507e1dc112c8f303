"""Scripts that drive calibration runs in the place of a policy, whatever the text is."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import ClassVar

import numpy as np

from ...policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy

TWICE = 2
"""Times in a row that a length comes."""


class Script(StopPolicy):
    """Counts the rounds: the state is, by stream, its key and the number of its round."""

    reads_seconds: ClassVar[bool] = False
    first = 0

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams in their first round."""
        return keys, np.zeros(streams, dtype=np.int64)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Count the round."""
        keys, numbers = state
        return keys, numbers + outcome.active


def streams_of_script(state: State) -> list[tuple[int, int]]:
    """Return (key, number of the round) of each stream."""
    keys, numbers = state
    return list(zip(keys.tolist(), numbers.tolist(), strict=True))


class Scripted(Script):
    """Drafts lengths from a shuffled deck of 0..K, each twice in a row, whatever the text is; K = 0 is plain decoding.

    A size that comes again is a little cheaper, and with real policies about every other one does. It does little else:
    what a script does between model calls cools the caches that these are timed on. The state is, by stream, its key, the
    number of its round and the length of this one.
    """

    def __init__(self, depth: int) -> None:
        self.max_depth = depth
        self.name = f"scripted:{depth}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams in their first round."""
        return self._turned(super().start(streams, keys))

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep up to the length on the deck."""
        # [S, 1]: looked up by `observe`, at the end of a round, so that next to nothing runs between model calls.
        return step.alive & (step.depth < state[2]), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Turn to the next card."""
        return self._turned(super().observe(outcome, state[:2]))

    def _turned(self, state: State) -> State:
        return *state, np.array([[self._length(*stream)] for stream in streams_of_script(state)])

    def _length(self, key: int, number: int) -> int:
        deck, place = divmod(number // TWICE, self.max_depth + 1)
        return shuffled(self.max_depth + 1, key, deck)[place]


@lru_cache(maxsize=256)
def shuffled(cards: int, key: int, deck: int) -> list[int]:
    """Return the cards of a deck in their order: another one for each key and each deck."""
    # Seeded by a text, which needs no hash: the same deck in every process.
    return random.Random(f"{key} {deck}").sample(range(cards), cards)


def card_at(cards: int, key: int, number: int) -> int:
    """Return the card of a round on the way up and down an ordered deck; where it begins changes with the key."""
    period = max(2 * (cards - 1), 1)
    lap, place = divmod(key, period)
    at = (shuffled(period, lap, cards)[place] + number // TWICE) % period
    return min(at, period - at)
