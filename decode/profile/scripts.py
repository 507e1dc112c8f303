"""Policies with scripted decisions, independent of the text, to time rounds of all sizes: chains, batches and trees."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import ClassVar

import numpy as np

from ...policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from ..verify.noise import mix_one

REPEATS = 2
"""Number of consecutive rounds with the same length. Half of the rounds then repeat a size, which
is slightly cheaper."""

BATCH_LENGTHS = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32)
"""Draft lengths of a batch, in addition to the largest depth of the profile."""

PATH_EVERY, FULL_EVERY, FULL_RUN = 3, 6, 4
"""One of 3 rounds drafts a single path. One of 6 groups of 4 consecutive rounds drafts full trees, like a static tree."""

END_EVERY, SIZE_POWER = 5, 1.25
"""One of 5 levels of a tree is the last one. The exponent of the log-uniform number of verified nodes."""


class Script(StopPolicy):
    """Base of scripts. The state has the key of each stream and the number of its round."""

    reads_seconds: ClassVar[bool] = False
    first = 0

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams in their first round."""
        return keys, np.zeros(streams, dtype=np.int64)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Count the round."""
        return state[0], state[1] + outcome.active


def _rounds(state: State) -> list[tuple[int, int]]:
    """Return (key, number of the round) of each stream."""
    return list(zip(state[0].tolist(), state[1].tolist(), strict=True))


@lru_cache(maxsize=256)
def seeded_permutation(cards: int, key: int, deck: int) -> list[int]:
    """Return a permutation of 0..cards - 1, seeded by the key and the number of the deck."""
    return random.Random(f"{key} {deck}").sample(range(cards), cards)


class ChainScript(Script):
    """Drafts lengths in shuffled order: each permutation of 0..K is a deck, and each of its cards is used twice in a row.

    The length is computed at the end of the previous round, because work between model calls would clear the caches.
    """

    def __init__(self, depth: int) -> None:
        self.max_depth, self.name = depth, f"scripted:{depth}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams in their first round."""
        return self._with_lengths(super().start(streams, keys))

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep up to the length of the round."""
        return step.alive & (step.depth < state[2]), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Compute the length of the next round."""
        return self._with_lengths(super().observe(outcome, state[:2]))

    def _with_lengths(self, state: State) -> State:
        places = [(key, *divmod(number // REPEATS, self.max_depth + 1)) for key, number in _rounds(state)]
        return *state, np.array(
            [[seeded_permutation(self.max_depth + 1, key, deck)[place]] for key, deck, place in places]
        )


class BatchScript(Script):
    """Drafts with some of the streams, all to the same depth. The drafting streams rotate.

    A deck has the pairs (number of drafting streams, length), ordered by the number of drafted tokens. Rounds go up and down
    the deck and use each pair twice. Consecutive rounds are therefore similar, as with a policy. A verification takes longer
    after a longer round, because the caches then hold less of the target: in shuffled order, a batch of four with one drafted
    token per text took 9% longer.
    """

    def __init__(self, streams: int, depth: int) -> None:
        self.max_depth, self.name, self._streams = depth, f"batch-script:{streams}", streams
        counts = sorted(
            {*(2**k for k in range((streams - 1).bit_length())), streams}
        )  # costs are interpolated between these
        lengths = range(1, depth + 1) if streams == 1 else sorted({*(n for n in BATCH_LENGTHS if n < depth), depth})
        # (drafting streams, length), ordered by the total number of drafted tokens
        self.deck = sorted(
            [(0, 0), *((n, k) for n in counts for k in lengths)], key=lambda card: (card[0] * card[1], card)
        )

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep up to the length of the round in the drafting streams."""
        lengths = np.zeros(len(step.alive), dtype=np.int64)
        for stream, (key, number) in enumerate(_rounds(state)):
            count, length = self.deck[deck_index(len(self.deck), key, number)]
            lengths[stream] = length * ((stream - number) % self._streams < count)
        return step.alive & (step.depth < lengths)[:, None], state


def deck_index(cards: int, key: int, number: int) -> int:
    """Return the index of a round's card on the way up and down an ordered deck. The start depends on the key."""
    period = max(2 * (cards - 1), 1)
    lap, place = divmod(key, period)
    at = (seeded_permutation(period, lap, cards)[place] + number // REPEATS) % period
    return min(at, period - at)


class TreeScript(Script):
    """Extends and verifies random branches. Some rounds draft a single path, some the full tree.

    Other rounds extend at most 1, 2, 4, ... branches of a depth, each equally often, and verify a log-uniform number of
    nodes.
    """

    name = "random-tree"

    def __init__(self, depth: int, width: int) -> None:
        self.max_depth, self.first, self._width = depth, min(1, depth), width

    def _branches(self, depth: int, key: int, number: int) -> int:
        """Return how many branches of a depth a round extends."""
        if is_full(key, number):
            return self._width
        power = 0 if _is_path(key, number) else _random_bits(key, number) % (1 + self._width.bit_length())
        return 2**power if _random_bits(key, number, depth) % END_EVERY else 0

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the first branches, up to the round's width, or none."""
        widths = np.array([[self._branches(step.depth, *stream)] for stream in _rounds(state)])
        return step.alive & (step.alive.cumsum(1) <= widths), state

    def select(self, tree: DraftTree, state: State) -> Array:
        """Verify the first nodes, a random number of them or all; or the first one of each depth."""
        rounds = _rounds(state)
        sizes = [
            [count if is_full(*stream) else int((1 + count) ** (SIZE_POWER * _random_bits(*stream, -1) / 2**64))]
            for count, stream in zip(tree.drawn.sum(1).tolist(), rounds, strict=True)
        ]
        paths = np.array([[_is_path(*stream)] for stream in rounds])
        deeper = np.diff(tree.depth, prepend=0) > 0
        return tree.drawn & np.where(paths, deeper, tree.drawn.cumsum(1) <= np.array(sizes))


def _is_path(key: int, number: int) -> bool:
    return _random_bits(key, number, -2) % PATH_EVERY == 0 and not is_full(key, number)


def is_full(key: int, number: int) -> bool:
    """Whether a round drafts the full tree. These rounds are fixed, because few texts might contain no random one."""
    return (number // FULL_RUN - max(key - 1, 0)) % FULL_EVERY == 0


def _random_bits(*numbers: int) -> int:
    """Return 64 pseudo-random bits that depend on the numbers. A last number of -1 or -2 is not a depth."""
    mixed = 0
    for number in numbers:
        mixed = mix_one(mixed ^ number)
    return mixed
