"""Candidates from the text itself: prompt lookup, and the base of drafters that search the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
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
    run, rate = 0, 0.0  # the signals of agreement (`policies.features`)

    def extend(self, token: int) -> None:
        """Append a token to the text, and note whether it was the likeliest one."""
        weights = self.followers(())
        agrees = bool(weights) and max(weights, key=weights.__getitem__) == token
        self.run = (self.run + 1) * agrees
        self.rate = AGREEMENT_WEIGHT * self.rate + (1.0 - AGREEMENT_WEIGHT) * agrees
        self.append(token)

    @abstractmethod
    def match(self) -> tuple[int, int]:
        """Return the length of the longest match of the end of the text, and how often it occurred before."""

    @abstractmethod
    def append(self, token: int) -> None:
        """Append a token to the text."""

    @abstractmethod
    def followers(self, path: Sequence[int]) -> dict[int, float]:
        """Return the weights of the tokens that may follow the text and the candidates `path`."""


class TextDrafter(Drafter):
    """Base of drafters that search the committed tokens on the host, with an index of `new_index()` for each text."""

    reading = "nothing"
    has_signals = True
    _keeps_signals = False

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
        append = index.extend if self._keeps_signals else index.append
        for token in tokens[index.has_anchor :]:
            append(token)
        index.has_anchor = False

    def _append_anchor(self, stream: int, anchor: int) -> TextIndex:
        """Append the anchor of a round to the index of a stream, unless it was."""
        index = self._indexes[stream]
        if not index.has_anchor:
            (index.extend if self._keeps_signals else index.append)(anchor)
            index.has_anchor = True
        return index

    def keep_signals(self) -> None:
        """See `Drafter`: agreement takes a search for each committed token."""
        self._keeps_signals = True

    def signals(self, stream: int, anchor: int) -> tuple[float, ...]:
        """See `Drafter`."""
        index = self._append_anchor(stream, anchor)
        length, count = index.match()
        weights = index.followers(()).values()
        best = max(weights, default=0.0) / (sum(weights) or 1.0)
        return float(length), best, float(count), float(index.run), index.rate

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
    """By context of at most `longest` tokens, the tokens that followed it."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._last: list[int] = []  # at most `longest` tokens
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def append(self, token: int) -> None:
        """See `TextIndex`."""
        for start in range(len(self._last)):
            self._followers.setdefault(tuple(self._last[start:]), []).append(token)
        self._last = [*self._last, token][-self.longest :]

    def followers(self, path: Sequence[int]) -> dict[int, float]:
        """See `TextIndex`."""
        context = [*self._last, *path][-self.longest :]
        for start in range(len(context)):
            if followers := self._followers.get(tuple(context[start:])):
                last = {token: at for at, token in enumerate(followers)}
                # At most a thousandth: it only breaks ties.
                return {t: n + 1e-3 * (last[t] + 1) / len(followers) for t, n in Counter(followers).items()}
        return {}

    def match(self) -> tuple[int, int]:
        """See `TextIndex`."""
        for start in range(len(self._last)):
            if followers := self._followers.get(tuple(self._last[start:])):
                return len(self._last) - start, len(followers)
        return 0, 0


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
