"""Two drafters: a cheap one for the rounds in which it is confident, another one for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, arange

from ...policies.contract import Array
from ..models.device import upload
from ..models.pair import Pair
from ..round_state import RoundState, Rows
from .base import Drafter, Proposal

MIN_CONFIDENCE = 0.5
"""Default probability of the likeliest next token from which on the first drafter is used."""

ROUNDING = 1e-6
"""Tolerance of that comparison, because traces store probabilities in single precision."""


class FallbackDrafter(Drafter):
    """Chooses the drafter of each round and stream from the committed text alone, so every verification stays exact.

    Args:
        pair: target and draft.
        first: called in every round; reads neither hidden states nor a draft model.
        other: drafts the rounds in which the first one is not confident.
        min_confidence: probability of the first drafter's likeliest token from which on it drafts the round.
    """

    def __init__(self, pair: Pair, first: Drafter, other: Drafter, min_confidence: float = MIN_CONFIDENCE) -> None:
        self._first, self._other, self._vocabulary = first, other, pair.vocabulary
        self._min_confidence = min_confidence
        self.layers, self.readable = other.layers, min(first.readable, other.readable)
        self.carries, self.max_depth = first.carries or other.carries, other.max_depth
        self._confident: dict[int, bool] = {}  # by stream, in this round

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        self._first.reserve(streams, tokens)
        self._other.reserve(streams, tokens)

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._first.begin(stream)
        self._other.begin(stream)

    def prepare(self, lengths: Sequence[int]) -> None:
        """See `Drafter`."""
        self._first.prepare(lengths)
        self._other.prepare(lengths)

    def reset(self) -> None:
        """See `Drafter`."""
        self._first.reset()
        self._other.reset()

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        """See `Drafter`."""
        self._first.committed(stream, tokens, None)
        self._other.committed(stream, tokens, states)

    def backlog(self) -> Array:
        """Return the backlog of the other drafter; see `has_backlog`."""
        return self._other.backlog()

    def has_backlog(self, stream: int) -> bool:
        """Return whether the drafter of the stream's round reads the backlog; defined once the anchor was fed."""
        if self._confident[stream]:
            return False
        return not isinstance(self._other, FallbackDrafter) or self._other.has_backlog(stream)

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        proposal = None
        if depth == 0:
            proposal = self._first.propose(round, depth, rows)
            confidence = proposal.scores.softmax(-1).amax(-1)  # [R], NaN where no token is proposed
            confident = (confidence > self._min_confidence - ROUNDING).tolist()
            self._confident |= zip((stream for stream, _ in rows), confident, strict=True)
        first_rows = [(stream, stream_rows) for stream, stream_rows in rows if self._confident[stream]]
        other_rows = [(stream, stream_rows) for stream, stream_rows in rows if not self._confident[stream]]
        if not first_rows:
            return self._other.propose(round, depth, rows)
        if not other_rows:
            return proposal or self._first.propose(round, depth, rows)
        is_first = np.array([self._confident[stream] for stream, stream_rows in rows for _ in stream_rows])  # [R]
        scores = self._other.propose(round, depth, other_rows).dense(self._vocabulary)
        first_at, other_at = (upload(np.flatnonzero(mask), scores.device) for mask in (is_first, ~is_first))
        first_scores = (proposal or self._first.propose(round, depth, first_rows)).dense(self._vocabulary)
        first_scores = first_scores if proposal is None else first_scores[first_at]
        merged = scores.new_empty(len(is_first), self._vocabulary)
        merged[first_at], merged[other_at] = first_scores, scores
        # With ids, although it is dense, because rows may be without any token.
        return Proposal(merged, arange(self._vocabulary, device=scores.device).expand(len(merged), -1))
