"""Candidates from the text so far, and optionally from a file and earlier texts: suffix decoding."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...policies.contract import Array
from ...policies.errors import InputError
from ...policies.kernels import on_first_use
from ...policies.kernels.suffix import CURRENT, EDGES, LINK, PROPOSED, SHARED_LENGTH, SHARED_STATE
from ..models.pair import Pair
from .lookup import TextDrafter, TextIndex

MAX_PROPOSED = 32
"""Maximum number of tokens proposed after a row."""

kernels = on_first_use("suffix")


class SuffixAutomaton:
    """Suffix automaton of the substrings of one or several texts, with their counts: see `policies.kernels.suffix`.

    Attributes:
        arrays: the arrays of the kernels; others after each `reserve`.
    """

    def __init__(self) -> None:
        self._tokens = self._capacity = 0
        states, edges, sizes = np.zeros((1, 5), np.int64), np.zeros((1, 4), np.int64), np.array([1, 0, 0])
        states[0, LINK] = -1
        self.arrays: tuple[Array, Array, Array, Array] = states, edges, np.zeros(1, np.int64), sizes
        self.reserve(128)

    def reserve(self, tokens: int) -> None:
        """Allocate memory for more tokens."""
        self._tokens += tokens
        if self._tokens <= self._capacity:
            return
        self._capacity = capacity = max(2 * self._capacity, self._tokens)
        old_states, old_edges, _, sizes = self.arrays
        states, edges = np.zeros((2 * capacity + 1, 5), np.int64), np.zeros((3 * capacity + 1, 4), np.int64)
        states[: len(old_states)], edges[: len(old_edges)] = old_states, old_edges
        table = np.zeros(1 << (6 * capacity).bit_length(), np.int64)
        kernels().fill_table(edges, table, int(sizes[EDGES]))
        self.arrays = states, edges, table, sizes

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add a whole text."""
        self.reserve(len(tokens))
        self.arrays[3][CURRENT] = 0
        kernels().append(self.arrays, np.array(tokens, dtype=np.int64))

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return state and length of the longest suffix of `tokens` that occurs in the texts."""
        state, length = kernels().match(self.arrays, np.array(tokens, dtype=np.int64))
        return state, length


class SuffixIndex(TextIndex):
    """The automaton of a text, and the longest suffix of the text in `shared`, the automaton of a file and earlier texts.

    Args:
        shared: see above.
        vocabulary: V.
    """

    def __init__(self, shared: SuffixAutomaton, vocabulary: int) -> None:
        self.text: list[int] = []
        self._automaton, self._shared = SuffixAutomaton(), shared
        self._facts, self._agreement = np.zeros(5, dtype=np.int64), np.zeros(2)
        self._memory = np.zeros(vocabulary), np.zeros(vocabulary, dtype=np.int64)
        self._likeliest = np.zeros(MAX_PROPOSED, dtype=np.int64), np.zeros(MAX_PROPOSED)

    def extend(self, tokens: Sequence[int]) -> None:
        """See `TextIndex`."""
        self.text += tokens
        self._automaton.reserve(len(tokens))
        automata, new = (self._automaton.arrays, self._shared.arrays), np.array(tokens, dtype=np.int64)
        kernels().extend(*automata, new, self._facts, self._agreement, *self._memory, *self._likeliest)

    def match_shared(self) -> None:
        """Search the whole text in the shared automaton, which may have other states now."""
        self._facts[[SHARED_STATE, SHARED_LENGTH]] = self._shared.match(self.text)
        self.extend([])

    def signals(self) -> tuple[float, ...]:
        """See `TextIndex`."""
        _, _, proposed, length, count = self._facts.tolist()
        weights = self._likeliest[1][:proposed].tolist()
        return float(length), (weights[0] / sum(weights) if weights else 0.0), float(count), *self._agreement.tolist()

    def followers(self, path: Sequence[int]) -> dict[int, float]:
        """See `TextIndex`."""
        (tokens, weights), proposed = self._likeliest, int(self._facts[PROPOSED])
        if path:
            automata, added = (self._automaton.arrays, self._shared.arrays), np.array(path, dtype=np.int64)
            tokens, weights = np.empty_like(tokens), np.empty_like(weights)
            proposed = kernels().propose(*automata, added, self._facts, *self._memory, tokens, weights)
        return dict(zip(tokens[:proposed].tolist(), weights[:proposed].tolist(), strict=True))


class SuffixDrafter(TextDrafter):
    """What followed the longest suffix that occurred before, weighted by how often (SuffixDecoding, arXiv 2411.04975).

    The counts are mixed with those after shorter suffixes (PPM-C): the scores of a long and of a short repetition differ,
    and a policy can read them.

    Args:
        pair: for the vocabulary and the device.
        path: a text file that is searched in addition to each text; "" = none.
        keep: 1 = earlier texts are searched too, 0 = they are not.

    Raises:
        InputError: `keep` has another value, the file cannot be read, or the pair has no tokenizer to read it with.
    """

    _indexes: list[SuffixIndex]  # type: ignore[assignment]

    def __init__(self, pair: Pair, path: str = "", keep: int = 0) -> None:
        if keep not in (0, 1):
            raise InputError(f"--drafter suffix: expected for keep 0 or 1, not {keep!r}")
        self.carries = bool(keep)
        self._file: list[int] = []
        if path:
            if pair.tokenizer is None:
                raise InputError("--drafter suffix: the pair has no tokenizer to read a file with")
            ids = pair.tokenizer(_read_text(path), add_special_tokens=False)["input_ids"]
            self._file = list(map(int, ids))
        super().__init__(pair, lambda: SuffixIndex(self._shared, pair.vocabulary))

    def reset(self) -> None:
        """See `Drafter`. The contents of the file are kept."""
        self._indexes, self._shared = [], SuffixAutomaton()
        self._shared.add_text(self._file)
        super().reset()

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        if self.carries:
            for index in self._indexes:
                self._shared.add_text(index.text)
        super().reserve(streams, tokens)

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        if self.carries:
            self._shared.add_text(self._indexes[stream].text)
            for index in self._indexes:  # the new text may have split states
                index.match_shared()
        super().begin(stream)


def file_hash(path: str) -> str:
    """Return a short hash of a text file; raise `InputError` if it cannot be read."""
    return hashlib.blake2b(_read_text(path).encode(), digest_size=8).hexdigest()


def _read_text(path: str) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"--drafter suffix: expected a text file, but {path} cannot be read: {reason}") from None
