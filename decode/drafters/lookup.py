"""Candidates from the text itself: prompt lookup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...policies.contract import Array
from ...policies.errors import InputError
from ..candidates import Candidates
from ..models.long_rope import ENDLESS
from ..models.pair import Pair
from .base import READS_NOTHING, Proposal

LONGEST = 3
"""Tokens of context that are looked for, at most, unless told otherwise."""


class LookupDrafter:
    """Prompt lookup: what followed the longest earlier occurrence of the last tokens, weighted by how often (free).

    Saxena's prompt lookup decoding takes one occurrence; the counts of all of them make a distribution, so that trees
    and sampling work as with any draft. Later occurrences win between equals. It needs no draft model.

    Args:
        pair: for the vocabulary and the device.
        longest: tokens of context to look for, at most.
    """

    layers: tuple[int, ...] = ()
    readable = ENDLESS
    reading = READS_NOTHING

    def __init__(self, pair: Pair, longest: int = LONGEST) -> None:
        if type(longest) is not int or longest < 1:  # True is an int to `isinstance`
            raise InputError(f"--drafter lookup: expected for longest a whole number of 1 or more, not {longest!r}")
        self._device, self._dtype, self._longest = pair.device, pair.logits_dtype, longest
        self.reserve(1, 0)

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        self._texts: list[list[int]] = [[] for _ in range(streams)]
        self._index: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(streams)]
        self._ahead = [0] * streams  # 1 where the root of a round has been noted already

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._texts[stream], self._index[stream], self._ahead[stream] = [], {}, 0

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        for token in tokens[self._ahead[stream] :]:
            self._note(stream, token)
        self._ahead[stream] = 0

    def _note(self, stream: int, token: int) -> None:
        """Note what came after every run of tokens that ends the text."""
        text, index = self._texts[stream], self._index[stream]
        for length in range(1, min(self._longest, len(text)) + 1):
            index.setdefault(tuple(text[-length:]), []).append(token)
        text.append(token)

    def backlog(self) -> Array:
        """Return zeros: reading is free."""
        return np.zeros(len(self._texts), dtype=np.int64)

    def propose(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> Proposal:
        """See `Drafter`."""
        rows = []
        for stream, here, places in zip(streams, found, feeding, strict=True):
            if here.depth[places[0]] == 0 and here.roots == 1:  # committed, though the target has not read it
                self._note(stream, here.tokens[0])
                self._ahead[stream] = 1
            rows += [self._followers(stream, here.tokens_to(place)[self._ahead[stream] :]) for place in places]
        return Proposal.of_weights(rows, self._dtype, self._device)

    def _followers(self, stream: int, path: Sequence[int]) -> dict[int, float]:
        """Return the weights of the tokens that came after the longest known suffix; a later one counts a trifle more."""
        prefix = [*self._texts[stream][-self._longest :], *path]
        for length in range(min(self._longest, len(prefix)), 0, -1):
            seen = self._index[stream].get(tuple(prefix[-length:]))
            if seen:
                last = {token: at for at, token in enumerate(seen)}
                # At most a thousandth, so that it decides between equal counts only.
                return {t: n + 1e-3 * (last[t] + 1) / len(seen) for t, n in Counter(seen).items()}
        return {}
