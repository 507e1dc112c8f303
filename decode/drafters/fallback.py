"""Two drafters at once: one that costs nothing where it is sure, such as suffix drafting where a text repeats itself, another
elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...policies.contract import Array
from ..models.pair import Pair
from ..round_state import RoundState, Rows
from .base import Bounded, Carries, Chooses, Drafter, Prepares, Proposal, carries

SURE = 0.5
"""Chance of the likeliest next token from which on the first drafter takes a round (`train.drafters.choice` fits it)."""

ROUNDING = 1e-6
"""Chances are told apart no finer: a trace keeps them in single precision."""


class FallbackDrafter:
    """Chooses round by round and stream by stream, by the committed text alone: so every verification stays exact.

    Args:
        pair: that they draft for.
        first: is asked in every round, and reads neither hidden states nor a draft model: `suffix`, `lookup`, or a plugin's.
        other: drafts the rounds in which the first one is not sure.
        sure: chance of the first one's likeliest next token from which on it drafts; above 1 it never does.
    """

    def __init__(self, pair: Pair, first: Drafter, other: Drafter, sure: float = SURE) -> None:
        self._first, self._other, self._vocabulary = first, other, pair.vocabulary
        if isinstance(other, Bounded):
            self.most = other.most  # in its rounds
        self._least = sure - ROUNDING
        self.layers, self.readable = other.layers, min(first.readable, other.readable)
        self.carries = carries(first) or carries(other)
        self._sure: dict[int, bool] = {}  # by stream, whether the first one drafts this round

    def reserve(self, streams: int, tokens: int) -> None:
        """See `Drafter`."""
        self._first.reserve(streams, tokens)
        self._other.reserve(streams, tokens)

    def begin(self, stream: int) -> None:
        """See `Drafter`."""
        self._first.begin(stream)
        self._other.begin(stream)

    def prepare(self, lengths: Sequence[int]) -> None:
        """See `Prepares`."""
        for drafter in (self._first, self._other):
            if isinstance(drafter, Prepares):
                drafter.prepare(lengths)

    def renew(self) -> None:
        """See `Carries`."""
        for drafter in (self._first, self._other):
            if isinstance(drafter, Carries):
                drafter.renew()

    def committed(self, stream: int, tokens: Sequence[int], states: torch.Tensor | None) -> None:
        """See `Drafter`."""
        self._first.committed(stream, tokens, None)
        self._other.committed(stream, tokens, states)

    def backlog(self) -> Array:
        """Return the other one's: the first one, which `reads` tells, has none."""
        return self._other.backlog()

    def reads(self, stream: int) -> bool:
        """See `Chooses`."""
        if self._sure[stream]:
            return False
        return self._other.reads(stream) if isinstance(self._other, Chooses) else True

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        """See `Drafter`."""
        counts, known = [len(own) for _, own in rows], None
        # Who drafts is settled at the anchors, for the whole round.
        if depth == 0:
            known = self._first.propose(round, depth, rows)
            chances = known.scores.softmax(-1).amax(-1).split(counts)  # not a number where it knows no token
            self._sure |= {
                stream: bool((own > self._least).any()) for (stream, _), own in zip(rows, chances, strict=True)
            }
        sides = {sure: [one for one in rows if self._sure[one[0]] is sure] for sure in (True, False)}
        if not sides[True]:
            return self._other.propose(round, depth, rows)
        if not sides[False]:
            return self._first.propose(round, depth, rows) if known is None else known
        scores: dict[int, torch.Tensor] = {}
        for drafter, own in ((self._first, sides[True]), (self._other, sides[False])):
            asked = rows if drafter is self._first and known is not None else own
            made = known if known is not None and drafter is self._first else drafter.propose(round, depth, own)
            parts = made.dense(self._vocabulary).split([len(some) for _, some in asked])
            scores |= {
                stream: part
                for (stream, _), part in zip(asked, parts, strict=True)
                if self._sure[stream] is (drafter is self._first)
            }
        every = torch.cat([scores[stream] for stream, _ in rows])
        # With ids, though it is dense: only then the loop looks for rows that know no token (`ModelSource`).
        return Proposal(every, torch.arange(self._vocabulary, device=every.device).expand(len(every), -1))
