"""Two drafters: a cheap one for the rounds in which it is confident, another one for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array
from ..models.device import upload
from ..models.pair import Pair
from ..round_state import RoundState, Rows
from .base import Drafter, Proposal, carries

MIN_CONFIDENCE = 0.5
"""Probability of the likeliest next token from which on the first drafter is used (`train.drafters.choice` fits it)."""

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
        self.carries, self.max_depth = carries(first) or carries(other), getattr(other, "max_depth", None)
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
        for drafter in (self._first, self._other):
            if hasattr(drafter, "prepare"):
                drafter.prepare(lengths)

    def renew(self) -> None:
        """See `Drafter`."""
        for drafter in (self._first, self._other):
            if hasattr(drafter, "renew"):
                drafter.renew()

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
        own = [(stream, some) for stream, some in rows if self._confident[stream]]
        if not own:
            return self._other.propose(round, depth, rows)
        if len(own) == len(rows):
            return self._first.propose(round, depth, rows) if proposal is None else proposal
        is_own = np.array([self._confident[stream] for stream, some in rows for _ in some])  # [R]
        if proposal is None:
            scores = self._first.propose(round, depth, own).dense(self._vocabulary)
        else:
            scores = proposal.dense(self._vocabulary)[torch.from_numpy(is_own).to(proposal.scores.device)]
        other = self._other.propose(
            round, depth, [(stream, some) for stream, some in rows if not self._confident[stream]]
        )
        order = np.argsort(np.argsort(~is_own, kind="stable"))  # by row, its index in the concatenation
        scores = torch.cat([scores, other.dense(self._vocabulary)])[upload(order, scores.device)]
        # With ids, although it is dense, because rows may be without any token.
        return Proposal(scores, torch.arange(self._vocabulary, device=scores.device).expand(len(scores), -1))
