"""What rounds of a batch cost: draft steps by the streams that draft, verifications by (streams, tokens in all)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .entries import Entries
from .robust_fits import Points, along
from .tables import LEAST_CALL_S, MOST_CONTEXT, MOST_S, at_context

Array = np.ndarray[Any, Any]

MOST_STREAMS, MOST_POINTS = 4096, 4096
"""Limits of what is read from a file."""


@dataclass(frozen=True)
class BatchTable:
    """Seconds of the model calls of batches at one context length.

    Between points costs are linear, beyond the last they go on as they rise over all: a step, as of padding to captured
    sizes, is two points next to each other.

    Attributes:
        context: tokens in each stream's cache when measured.
        first_draft_s: points (streams, seconds) of the first draft step of a round, which reads one token of each stream.
        backlog_token_s: each further token that the first step reads.
        draft_s: points (streams, seconds) of a draft step after the first, or after the second.
        verify_s: by streams, points (tokens in all, anchors included; seconds) of a verification; the first is that of plain
            decoding as measured, after it they never fall.
        second_draft_s: points of the second draft step, the last one on caches that are still cold; none = as later ones.
    """

    context: float
    first_draft_s: Points
    backlog_token_s: float
    draft_s: Points
    verify_s: Mapping[int, Points]
    second_draft_s: Points = ()


@dataclass(frozen=True)
class BatchCosts:
    """What draft steps and verifications of a batch cost, at two context lengths; between them costs are linear.

    Seconds that the methods return include those outside the models. Their arguments are numbers or arrays, which are
    broadcast; the streams are those that take part: a stream that has stopped drafting is verified, not drafted.

    Attributes:
        low, high: the tables at a short and a long context, of the same sizes.
        outside_s: outside the models: per round, per stream of it, per drafted token.
        plain_outside_s: outside the models in a round that drafts nothing and asks nobody: per round, per stream; None = as
            in any other.
    """

    low: BatchTable
    high: BatchTable
    outside_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    plain_outside_s: tuple[float, float] | None = None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes whose verification was measured, rising."""
        return tuple(sorted(self.low.verify_s))

    def first_draft_s(
        self, streams: ArrayLike, context: ArrayLike, backlog: ArrayLike | None = None, begun: ArrayLike = 0
    ) -> Array:
        """Return the seconds of a round's first draft step.

        Args:
            streams: that draft.
            context: tokens committed, the mean over streams.
            backlog: tokens that these streams' drafts have not read, in all; None = one of each.
            begun: streams among them whose drafts have read nothing yet: each reads its text in a call of its own.
        """
        count, alone = np.asarray(streams, dtype=np.float64), np.asarray(begun, dtype=np.float64)
        extra = 0.0 if backlog is None else np.maximum(np.asarray(backlog) - count, 0.0)
        # At 0 streams `along` gives the first point; where every draft reads its text alone, no common call is left.
        low, high = (
            np.where(count > alone, along(table.first_draft_s, count - alone), 0.0)
            + along(table.first_draft_s, 1) * alone
            + extra * table.backlog_token_s
            for table in (self.low, self.high)
        )
        return self._step(count, low, high, context)

    def draft_s(self, streams: ArrayLike, context: ArrayLike) -> Array:
        """Return the seconds of a draft step after the second, by the streams that draft; 0 of none."""
        return self._later(self.low.draft_s, self.high.draft_s, streams, context)

    def second_draft_s(self, streams: ArrayLike, context: ArrayLike) -> Array:
        """Return the seconds of the second draft step of a round, by the streams that draft; 0 of none."""
        low, high = (table.second_draft_s or table.draft_s for table in (self.low, self.high))
        return self._later(low, high, streams, context)

    def _later(self, low: Points, high: Points, streams: ArrayLike, context: ArrayLike) -> Array:
        count = np.asarray(streams, dtype=np.float64)
        return self._step(count, along(low, count), along(high, count), context)

    def _step(self, count: Array, low: Array, high: Array, context: ArrayLike) -> Array:
        seconds = at_context(low, high, self._contexts, context) + self.outside_s[2] * count
        out: Array = np.where(count > 0, seconds, 0.0)
        return out

    def verify_s(self, streams: ArrayLike, tokens: ArrayLike, context: ArrayLike) -> Array:
        """Return the seconds of a verification, and of the round outside drafting.

        Args:
            streams: that are verified together.
            tokens: sent in all, the anchor of each stream included.
            context: tokens committed, the mean over streams.
        """
        per_round, per_stream, _ = self.outside_s
        outside = per_round + per_stream * np.asarray(streams, dtype=np.float64)
        out: Array = self._verification(streams, tokens, context) + outside
        return out

    def plain_s(self, streams: ArrayLike, context: ArrayLike) -> Array:
        """Return the seconds of a step of plain decoding."""
        per_round, per_stream = self.plain_outside_s or self.outside_s[:2]
        outside = per_round + per_stream * np.asarray(streams, dtype=np.float64)
        out: Array = self._verification(streams, streams, context) + outside
        return out

    def _verification(self, streams: ArrayLike, tokens: ArrayLike, context: ArrayLike) -> Array:
        """Return the seconds of the target's call."""
        count, sent = np.broadcast_arrays(*(np.asarray(n, dtype=np.float64) for n in (streams, tokens)))
        shape, count, sent = count.shape, count.ravel(), sent.ravel()
        # Between two sizes measured: both curves at the same tokens in all, weighted by nearness; outside, the nearest one.
        size = np.array(self.sizes, dtype=np.float64)
        at = np.minimum(np.searchsorted(size, count), len(size) - 1)  # the size measured at or above
        before = np.maximum(at - 1, 0)
        span = np.where(at > before, size[at] - size[before], 1.0)
        share = np.where(at > before, np.clip((count - size[before]) / span, 0.0, 1.0), 1.0)  # of the upper one
        calls = np.zeros((2, len(count)))  # [2, n] at the two contexts
        for k, n in enumerate(self.sizes):
            weight = np.where(at == k, share, np.where(before == k, 1.0 - share, 0.0))
            if len(mine := np.flatnonzero(weight)):
                sides = [along(table.verify_s[n], sent[mine]) for table in (self.low, self.high)]
                calls[:, mine] += weight[mine] * np.stack(sides)
        calls = calls.reshape(2, *shape)
        return at_context(calls[0], calls[1], self._contexts, context)

    def round_s(
        self,
        context: ArrayLike,
        streams: ArrayLike,
        tokens: ArrayLike,
        fed: Array,
        backlog: ArrayLike,
        begun: ArrayLike = 0,
    ) -> Array:
        """Return [n] float64 seconds of n rounds of a batch, decisions left out.

        Args:
            context: [n] tokens committed before the round, the mean over streams.
            streams: [n] that have a round.
            tokens: [n] sent to the target in all, anchors included.
            fed: [n, K] how many streams draft at each depth.
            backlog, begun: [n] of the streams that draft; see `first_draft_s`.
        """
        first = self.first_draft_s(fed[:, 0], context, backlog, begun)
        each = np.asarray(context, dtype=np.float64)[:, None]
        second, later = self.second_draft_s(fed[:, 1:2], each), self.draft_s(fed[:, 2:], each)
        out: Array = first + second.sum(1) + later.sum(1) + self.verify_s(streams, tokens, context)
        return out

    def shared_s(
        self, context: Array, drafted: Array, verified: Array, backlog: Array, decisions: Array | None = None
    ) -> float:
        """Return the seconds of one round that streams have together, what decisions take left out.

        Args:
            context, drafted, verified, backlog: [S] of each stream, as of `Profile.round_seconds`.
            decisions: [S] times that the policy was asked; None = it was.
        """
        drafting = drafted > 0
        if decisions is not None and not drafting.any() and not decisions.any():
            return float(self.plain_s([len(drafted)], [float(context.mean())])[0])
        deepest = int(drafted.max(initial=1))  # at least one column: `round_s` takes the first
        fed = (drafted[:, None] > np.arange(deepest)).sum(0)
        # A draft that has read nothing of a text lags behind by all of it.
        read, begun = np.maximum(backlog, 1)[drafting].sum(), (backlog == context)[drafting].sum()
        sent = len(drafted) + int(verified.sum())
        return float(self.round_s([float(context.mean())], [len(drafted)], [sent], fed[None], [read], [begun])[0])

    @property
    def _contexts(self) -> tuple[float, float]:
        return self.low.context, self.high.context

    @staticmethod
    def read(raw: Entries) -> BatchCosts:
        """Return the costs of their JSON form; a mangled entry is a `KeyError` or `ValueError`."""
        low, high = (_read_table(raw.part(side)) for side in ("low", "high"))
        if [(n, _at(p)) for n, p in low.verify_s.items()] != [(n, _at(p)) for n, p in high.verify_s.items()]:
            raise ValueError(f"{raw.named('high')}.verify_s: both contexts need the same sizes")
        # `at_context` divides by the span.
        if high.context != low.context and high.context < low.context + 1.0:
            raise ValueError(f"{raw.part('high').named('context')}: expected that of low, or at least one token more")
        per_round, per_stream, per_token = raw.numbers("outside_s", (3, 3), most=MOST_S)
        plain = None
        if raw.has("plain_outside_s"):
            of_round, of_stream = raw.numbers("plain_outside_s", (2, 2), most=MOST_S)
            plain = of_round, of_stream
        return BatchCosts(low, high, (per_round, per_stream, per_token), plain)


def _at(points: Points) -> list[int]:
    return [n for n, _ in points]


def _read_table(raw: Entries) -> BatchTable:
    verify, sizes = raw.part("verify_s"), {}
    for key in verify.values:
        # `int` of a very long text takes long; no size has nine digits, and "04" would take the place of "4".
        size = int(key) if isinstance(key, str) and len(key) < 9 and key.isascii() and key.isdecimal() else 0
        if not 1 <= size <= MOST_STREAMS or key != str(size):
            raise ValueError(f"{verify.place}: expected batch sizes between 1 and {MOST_STREAMS}, not {key[:40]!r}")
        sizes[size] = verify.points(key, (1, MOST_POINTS), size, LEAST_CALL_S, MOST_S)
    if not sizes:
        raise ValueError(f"{verify.place}: expected at least one batch size")
    return BatchTable(
        raw.number("context", most=MOST_CONTEXT),
        raw.points("first_draft_s", (1, MOST_STREAMS), 1, 0.0, MOST_S),
        raw.number("backlog_token_s", most=MOST_S),
        raw.points("draft_s", (1, MOST_STREAMS), 1, 0.0, MOST_S),
        dict(sorted(sizes.items())),
        raw.points("second_draft_s", (0, MOST_STREAMS), 1, 0.0, MOST_S) if raw.has("second_draft_s") else (),
    )
