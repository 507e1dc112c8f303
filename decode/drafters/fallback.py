"""Two drafters at once: one that costs nothing where it is sure, such as suffix drafting where a text repeats itself, another
elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...policies.contract import Array
from ..candidates import Candidates
from ..models.pair import Pair
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

    def propose(
        self, streams: Sequence[int], found: Sequence[Candidates], feeding: Sequence[Sequence[int]]
    ) -> Proposal:
        """See `Drafter`."""
        counts, known = [len(places) for places in feeding], None
        # Who drafts is settled at the roots, for the whole round.
        if found[0].depth[feeding[0][0]] == 0:
            known = self._first.propose(streams, found, feeding)
            chances = known.scores.softmax(-1).amax(-1).split(counts)  # not a number where it knows no token
            self._sure |= {s: bool((own > self._least).any()) for s, own in zip(streams, chances, strict=True)}
        sides: dict[bool, list[int]] = {True: [], False: []}
        for at, stream in enumerate(streams):
            sides[self._sure[stream]].append(at)
        if not sides[True]:
            return self._other.propose(streams, found, feeding)
        if not sides[False]:
            return self._first.propose(streams, found, feeding) if known is None else known
        rows: dict[int, torch.Tensor] = {}
        for drafter, own in ((self._first, sides[True]), (self._other, sides[False])):
            if drafter is self._first and known is not None:  # it has been asked of all
                parts = known.dense(self._vocabulary).split(counts)
                rows |= {at: parts[at] for at in own}
                continue
            made = drafter.propose([streams[at] for at in own], [found[at] for at in own], [feeding[at] for at in own])
            rows |= zip(own, made.dense(self._vocabulary).split([counts[at] for at in own]), strict=True)
        scores = torch.cat([rows[at] for at in range(len(streams))])
        # With ids, though it is dense: only then the loop looks for rows that know no token (`ModelSource.draw`).
        return Proposal(scores, torch.arange(self._vocabulary, device=scores.device).expand(len(scores), -1))
