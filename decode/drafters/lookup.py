"""Candidates from the text itself: prompt lookup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from ...policies.errors import InputError
from ..models.pair import Pair
from ..round_state import RoundState, Rows
from .base import READS_NOTHING, Drafter, Proposal

LONGEST = 3
"""Default of the longest context that is searched for, in tokens."""


class TextDrafter(Drafter):
    """Base of drafters that search the committed tokens on the host. Subclasses define `_append` and `_followers`."""

    reading = READS_NOTHING

    def __init__(self, pair: Pair) -> None:
        self._device, self._dtype = pair.device, pair.logits_dtype
        self.reserve(1, 0)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        super().reserve(streams, tokens)
        self._texts: list[list[int]] = [[] for _ in range(streams)]
        self._ahead = [0] * streams  # 1 if the anchor of the round was appended already

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._texts[stream], self._ahead[stream] = [], 0

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        for token in tokens[self._ahead[stream] :]:
            self._append(stream, token)
        self._ahead[stream] = 0

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        if depth == 0:  # anchors are committed, although the target has not read them
            for stream, _ in rows:
                self._append(stream, int(round.tokens[stream, 0]))
                self._ahead[stream] = 1
        weights = [self._followers(round, stream, row) for stream, own in rows for row in own]
        return Proposal.of_weights(weights, self._dtype, self._device)

    def _append(self, stream: int, token: int) -> None:
        raise NotImplementedError

    def _followers(self, round: RoundState, stream: int, row: int) -> dict[int, float]:
        """Return the weights of the tokens after a row."""
        raise NotImplementedError


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
        self._longest = longest
        super().__init__(pair)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        super().reserve(streams, tokens)
        # By stream and context, the tokens that followed it.
        self._index: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(streams)]

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        super().begin(stream)
        self._index[stream] = {}

    def _append(self, stream: int, token: int) -> None:
        text, index = self._texts[stream], self._index[stream]
        for length in range(1, min(self._longest, len(text)) + 1):
            index.setdefault(tuple(text[-length:]), []).append(token)
        text.append(token)

    def _followers(self, round: RoundState, stream: int, row: int) -> dict[int, float]:
        context = [*self._texts[stream][-self._longest :], *round.path_tokens(stream, row)[1:]]
        for length in range(min(self._longest, len(context)), 0, -1):
            if followers := self._index[stream].get(tuple(context[-length:])):
                last = {token: at for at, token in enumerate(followers)}
                # At most a thousandth, so that it only breaks ties.
                return {t: n + 1e-3 * (last[t] + 1) / len(followers) for t, n in Counter(followers).items()}
        return {}
