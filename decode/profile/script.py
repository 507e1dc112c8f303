"""The script that drives calibration runs in the place of a policy: every length equally often, whatever the text is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...policies.contract import DraftStep, RoundOutcome, State, StopPolicy

TWICE = 2
"""Times in a row that a length comes."""


class Scripted(StopPolicy):
    """Drafts lengths from a shuffled deck of 0..K, each twice in a row, whatever the text is; K = 0 is plain decoding.

    A size that comes again is a little cheaper, and with real policies about every other one does. It works in plain
    numbers: what a script does between model calls cools the caches that these are timed on.
    """

    first = 0

    def __init__(self, depth: int) -> None:
        self.max_depth = depth
        self.name = f"scripted:{depth}"

    def start(self, streams: int, key: Tensor) -> State:
        """Return by stream its key and the number of its round."""
        return [(one, 0) for one in key.tolist()]

    def _length(self, key: int, number: int) -> int:
        deck, place = divmod(number // TWICE, self.max_depth + 1)
        return _shuffled(self.max_depth + 1, key, deck)[place]

    def keep_one(self, depth: int, features: Sequence[float], state: State) -> tuple[bool, State]:
        """Go on up to the length on the deck."""
        return depth < self._length(*state[0]), state

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep up to the length on the deck."""
        length = torch.tensor([[self._length(*stream)] for stream in state], device=step.alive.device)
        return step.alive & (step.depth < length), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Turn to the next card."""
        active = outcome.active.tolist()
        return [(key, number + on) for (key, number), on in zip(state, active, strict=True)]


@lru_cache(maxsize=256)
def _shuffled(cards: int, key: int, deck: int) -> list[int]:
    return random.Random(f"{key} {deck}").sample(range(cards), cards)
