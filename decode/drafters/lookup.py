"""Candidates from the text itself: prompt lookup, and the base of drafters that search the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from ...policies.errors import InputError
from ...policies.features import AGREEMENT_WEIGHT
from ..models.pair import Pair
from ..round_state import RoundState, Rows
from .base import Drafter, Proposal

LONGEST = 3
"""Default of the longest context that is searched for, in tokens."""


class TextIndex(ABC):
    """An index of the text of one stream, the anchor of the current round included."""

    has_anchor = False  # whether the anchor, which the target has not read, was appended

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and note whether each was the likeliest one."""

    @abstractmethod
    def signals(self) -> tuple[float, ...]:
        """Return `policies.features.SIGNALS`."""

    @abstractmethod
    def followers(self, path: Sequence[int]) -> dict[int, float]:
        """Return the weights of the tokens that may follow the text and the candidates `path`."""


class TextDrafter(Drafter):
    """Base of drafters that search the committed tokens on the host, with an index of `new_index()` for each text."""

    reading = "nothing"
    has_signals = True

    def __init__(self, pair: Pair, new_index: Callable[[], TextIndex]) -> None:
        self._device, self._dtype, self._new_index = pair.device, pair.logits_dtype, new_index
        self.reset()

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        super().reserve(streams, tokens)
        self._indexes = [self._new_index() for _ in range(streams)]

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._indexes[stream] = self._new_index()

    def reset(self) -> None:
        """See `Drafter`."""
        self.reserve(self._streams, 0)

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        index = self._indexes[stream]
        index.extend(tokens[index.has_anchor :])
        index.has_anchor = False

    def _append_anchor(self, stream: int, anchor: int) -> TextIndex:
        """Append the anchor of a round to the index of a stream, unless it was."""
        index = self._indexes[stream]
        if not index.has_anchor:
            index.extend([anchor])
            index.has_anchor = True
        return index

    def signals(self, stream: int, anchor: int) -> tuple[float, ...]:
        """See `Drafter`."""
        return self._append_anchor(stream, anchor).signals()

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        if depth == 0:
            for stream, _ in rows:
                self._append_anchor(stream, int(round.tokens[stream, 0]))
        weights = [
            self._indexes[stream].followers(round.path_tokens(stream, row)[1:])
            for stream, stream_rows in rows
            for row in stream_rows
        ]
        return Proposal.of_weights(weights, self._dtype, self._device)


class LookupIndex(TextIndex):
    """By context of at most `longest` tokens, how often each token followed it."""

    def __init__(self, longest: int) -> None:
        self.longest, self._run, self._rate = longest, 0, 0.0
        self._last: list[int] = []  # at most `longest` tokens
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}  # in the order of their last occurrences

    def extend(self, tokens: Sequence[int]) -> None:
        """See `TextIndex`."""
        for token in tokens:
            _, counts = self._match(self._last)
            agrees = token in counts and max(reversed(counts), key=counts.__getitem__) == token
            self._run = (self._run + 1) * agrees
            self._rate = AGREEMENT_WEIGHT * self._rate + (1.0 - AGREEMENT_WEIGHT) * agrees
            for start in range(len(self._last)):
                counts = self._counts.setdefault(tuple(self._last[start:]), {})
                counts[token] = counts.pop(token, 0) + 1
            self._last = [*self._last, token][-self.longest :]

    def _match(self, context: Sequence[int]) -> tuple[int, dict[int, int]]:
        """Return the length of the longest end of a context that has followers, and their counts."""
        for start in range(len(context)):
            if counts := self._counts.get(tuple(context[start:])):
                return len(context) - start, counts
        return 0, {}

    def signals(self) -> tuple[float, ...]:
        """See `TextIndex`."""
        length, counts = self._match(self._last)
        total = sum(counts.values())
        best = max(counts.values(), default=0) / (total or 1)
        return float(length), best, float(total), float(self._run), self._rate

    def followers(self, path: Sequence[int]) -> dict[int, float]:
        """See `TextIndex`."""
        _, counts = self._match([*self._last, *path][-self.longest :])
        # Later occurrences win ties, by at most a thousandth.
        return {token: n + 1e-3 * at / len(counts) for at, (token, n) in enumerate(counts.items(), 1)}


class LookupDrafter(TextDrafter):
    """Prompt lookup: what followed the longest earlier occurrence of the last tokens, weighted by how often.

    Saxena's prompt lookup decoding takes one occurrence. The counts of all occurrences form a distribution, as trees and
    sampling need it. Later occurrences win ties.

    Args:
        pair: for the vocabulary and the device.
        longest: longest context to search for, in tokens.

    Raises:
        InputError: `longest` is not a positive integer.
    """

    def __init__(self, pair: Pair, longest: int = LONGEST) -> None:
        if type(longest) is not int or longest < 1:  # excludes bool
            raise InputError(f"--drafter lookup: expected for longest a whole number of 1 or more, not {longest!r}")
        super().__init__(pair, lambda: LookupIndex(longest))
