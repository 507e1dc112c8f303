"""Seconds of rounds: tables of measured model calls, and the one function that interpolates between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Array = np.ndarray[Any, Any]
Points = tuple[tuple[int, float], ...]
"""Measured (count, seconds), counts ascending."""

MAX_STREAMS = 4096
"""The largest batch that files and rules may name."""

MAX_DEPTH, MAX_CONTEXT, MAX_S, MIN_CALL_S = 1024, 1e9, 1e6, 1e-9
"""Limits of costs: nothing takes eleven days, and a verification takes time."""

MIN_SHARE = 0.25
"""Extrapolated seconds are at least this share of the smallest measured ones: rates divide by seconds."""

PADDING_GAIN = 0.05
"""Padding must save this share of a verification. Of sizes that cost the same, the cheapest is merely the luckiest one."""


def _check_range(name: str, values: ArrayLike, minimum: float = 0.0, maximum: float = MAX_S) -> None:
    numbers = np.asarray(values, dtype=np.float64)
    if not ((minimum <= numbers) & (numbers <= maximum)).all():
        raise ValueError(f"{name}: expected numbers between {minimum:g} and {maximum:g}")


def _check_points(name: str, points: Points, first: int, minimum: float = 0.0) -> None:
    """Raise `ValueError` unless counts ascend from at least `first` and seconds are at least `minimum`."""
    counts = [first - 1, *(count for count, _ in points)]
    if counts[-1] >= 2**31 or any(high <= low for low, high in pairwise(counts)):
        raise ValueError(f"{name}: expected ascending counts from {first} on")
    _check_range(name, [seconds for _, seconds in points], minimum)


def _check_contexts(low: CostTable | BatchTable, high: CostTable | BatchTable) -> None:
    _check_range("context", [low.context, high.context], 0.0, MAX_CONTEXT)
    if high.context != low.context and high.context < low.context + 1.0:
        raise ValueError("high.context: expected that of low, or at least one token more")


def interpolate(x: ArrayLike, xs: ArrayLike, ys: ArrayLike) -> Array:
    """Return y at `x`: linear between measured points, along the line through the first and the last one beyond them.

    Beyond the ends, because the slope between the last two points is mostly noise; the line never falls.
    The result is at least `MIN_SHARE` of the smallest measured y.

    Args:
        x: [...] places.
        xs: [P] ascending.
        ys: [P], or [2, ...] for two points that broadcast with `x`.
    """
    x, xs, ys = (np.asarray(values, dtype=np.float64) for values in (x, xs, ys))
    span = xs[-1] - xs[0] or 1.0
    inside = np.clip(x, xs[0], xs[-1])
    y = np.interp(inside, xs, ys) if ys.ndim == 1 else ys[0] + (ys[-1] - ys[0]) * ((inside - xs[0]) / span)
    rise = np.maximum(ys[-1] - ys[0], 0.0) / span
    out: Array = np.maximum(y + rise * (x - inside), MIN_SHARE * ys.min(0))
    return out


def read_curve(points: Points, x: ArrayLike) -> Array:
    """Return `interpolate` of measured (count, seconds); counts below the first one cost what the first one does."""
    return interpolate(np.maximum(x, points[0][0]), *np.array(points, dtype=np.float64).T)


def extrapolate(entries: Sequence[float], count: int) -> Array:
    """Return [count] `interpolate` of entries for 0, 1, ..."""
    return interpolate(np.arange(count), np.arange(len(entries)), entries)


def first_step_s(one: float | Array, two: float | Array, token: float | Array, backlog: Array) -> Array:
    """Return the seconds of the first draft step of a round; an empty backlog costs as one token (it was timed so)."""
    out: Array = one + (two - one) * (backlog > 1) + np.maximum(backlog - 2, 0) * token
    return out


@dataclass(frozen=True)
class CostTable:
    """Seconds of the model calls of a single-stream round at one context length.

    Attributes:
        context: tokens in the cache.
        draft_s: the first draft step of a round, which reads 1 or 2 new tokens (2 after full acceptance); it runs on caches
            that the target has emptied.
        draft_token_s: each further token of a backlog.
        verify_s: a verification of n = 0, 1, ..., K drafted tokens.
        later_draft_s: each draft step after the first; None = as the first of one token.
        tree_verify_s: (drafted tokens, seconds) of a verification of a tree; empty = as of chains.
        tree_draft_s: a draft step of a tree after the first that reads one row, and each further row; None = grows as
            verification does.
    """

    context: float
    draft_s: tuple[float, float]
    draft_token_s: float
    verify_s: tuple[float, ...]
    later_draft_s: float | None = None
    tree_verify_s: Points = ()
    tree_draft_s: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.verify_s) <= MAX_DEPTH + 1:
            raise ValueError(f"verify_s: expected 1 to {MAX_DEPTH + 1} numbers")
        drafts = [*self.draft_s, self.draft_token_s, self.later_s, *(self.tree_draft_s or ())]
        _check_range("draft_s, draft_token_s, later_draft_s, tree_draft_s", drafts)
        _check_range("verify_s", self.verify_s, MIN_CALL_S)
        _check_points("tree_verify_s", self.tree_verify_s, 0, MIN_CALL_S)

    @property
    def later_s(self) -> float:
        """Seconds of a draft step after the first, of one row."""
        return self.draft_s[0] if self.later_draft_s is None else self.later_draft_s

    def tree_draft(self, rows: int) -> Array:
        """Return [rows + 1] seconds of a later draft step that reads 0, 1, ..., `rows` rows."""
        if self.tree_draft_s is not None:
            step, row = self.tree_draft_s
            return np.append(0.0, step + row * np.arange(rows))
        growth = read_curve(tuple(enumerate(self.verify_s, 1)), np.arange(1, rows + 1)) / self.verify_s[0]
        return np.append(0.0, self.later_s * growth)

    def tree_verify(self, tokens: int) -> Array:
        """Return [tokens + 1] seconds of a verification of a tree of 0, 1, ..., `tokens` tokens."""
        return read_curve(self.tree_verify_s or tuple(enumerate(self.verify_s)), np.arange(tokens + 1))

    def tree_calls_s(self, verified: Array, backlog: Array, fed: Array) -> Array:
        """Return [S] seconds of the model calls of rounds of trees; arguments as of `Costs.round_seconds`."""
        out: Array = self.draft_calls_s(backlog, fed) + self.tree_verify(int(verified.max(initial=0)))[verified]
        return out

    def draft_calls_s(self, backlog: Array, fed: Array) -> Array:
        """Return [S] seconds of the draft's calls, `fed` [S, K] tokens at each step after a backlog [S]."""
        first = first_step_s(*self.draft_s, self.draft_token_s, backlog) * (fed[:, 0] > 0)
        out: Array = first + self.tree_draft(int(fed.max(initial=0)))[fed[:, 1:]].sum(-1)
        return out


@dataclass(frozen=True)
class BatchTable:
    """Seconds of batches at one context length.

    Attributes:
        context: tokens in the cache of each stream.
        draft_s: (streams that draft, seconds) of a draft step after the first.
        verify_s: by streams, (tokens of all streams, anchors included; seconds) of a round except drafting and decisions. A
            jump, as from padding to recorded sizes, is two adjacent points.
        first_draft_s: of the first draft step, which runs on caches that the target has emptied; empty = as later ones.
    """

    context: float
    draft_s: Points
    verify_s: Mapping[int, Points]
    first_draft_s: Points = ()

    def __post_init__(self) -> None:
        if not self.draft_s or not self.verify_s or not all(self.verify_s.values()):
            raise ValueError("batch: expected at least one point in each curve")
        if not all(1 <= size <= MAX_STREAMS for size in self.verify_s):
            raise ValueError(f"batch.verify_s: expected batch sizes between 1 and {MAX_STREAMS}")
        _check_points("batch.draft_s", self.draft_s, 1)
        _check_points("batch.first_draft_s", self.first_draft_s, 1)
        for size, points in self.verify_s.items():
            _check_points("batch.verify_s", points, size, MIN_CALL_S)

    def rounds_s(self, streams: Array, tokens: Array) -> Array:
        """Return [n] seconds of rounds except drafting: interpolated between the curves of measured batch sizes."""
        sizes = sorted(self.verify_s)
        curves = np.stack([read_curve(self.verify_s[size], tokens) for size in sizes])  # [sizes, n]
        # Beyond the measured sizes the nearest curve holds: it goes on with the tokens.
        place = interpolate(np.clip(streams, sizes[0], sizes[-1]), sizes, np.arange(len(sizes)))
        below = place.astype(np.int64)
        above, share, column = np.minimum(below + 1, len(sizes) - 1), place - below, np.arange(len(tokens))
        out: Array = (1.0 - share) * curves[below, column] + share * curves[above, column]
        return out


@dataclass(frozen=True)
class BatchCosts:
    """Costs of texts that are decoded side by side, at a short and a long context; both tables have the same sizes."""

    low: BatchTable
    high: BatchTable

    def __post_init__(self) -> None:
        _check_contexts(self.low, self.high)
        counts = [
            {n: [at for at, _ in points] for n, points in side.verify_s.items()} for side in (self.low, self.high)
        ]
        if counts[0] != counts[1]:
            raise ValueError("batch.verify_s: both contexts need the same sizes and counts")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes with a measured verification, ascending."""
        return tuple(sorted(self.low.verify_s))

    def between(self, context: ArrayLike, read: Callable[[BatchTable], Array]) -> Array:
        """Return the values that `read` returns of a table, interpolated at a context length."""
        return interpolate(context, (self.low.context, self.high.context), np.stack([read(self.low), read(self.high)]))


@dataclass(frozen=True)
class Costs:
    """Seconds of rounds of a pair on a machine, at two context lengths.

    Attributes:
        low, high: the tables at a short and a long context.
        step_s: outside the models, per drafted token.
        round_s: outside the models, per round.
        prefill_s: reading a prompt: (constant, per token).
        decision_s: a decision, features included, by the policy's `cost_name`.
        tree_outside_s: outside the models in a round of a tree: (per round, per draft step, per drafted token); None = as
            in a chain, where each step drafts one.
        batch: costs of texts that are decoded side by side; None = not measured.
    """

    low: CostTable
    high: CostTable
    step_s: float
    round_s: float
    prefill_s: tuple[float, float]
    decision_s: Mapping[str, float] = field(default_factory=dict)
    _: KW_ONLY
    tree_outside_s: tuple[float, float, float] | None = None
    batch: BatchCosts | None = None

    def __post_init__(self) -> None:
        _check_contexts(self.low, self.high)
        if len(self.low.verify_s) != len(self.high.verify_s):
            raise ValueError("verify_s: both contexts need the same lengths")
        seconds = [self.step_s, self.round_s, *self.prefill_s, *(self.tree_outside_s or ())]
        _check_range("step_s, round_s, prefill_s, tree_outside_s", seconds)
        _check_range("decision_s", list(self.decision_s.values()))

    @property
    def max_depth(self) -> int:
        """The depth of the deepest chain with a measured verification."""
        return len(self.low.verify_s) - 1

    def between(self, context: ArrayLike, read: Callable[[CostTable], float | Sequence[float] | Array]) -> Array:
        """Return the seconds [n] that `read` returns of a table, interpolated at a context length."""
        tables = np.array([read(self.low), read(self.high)], dtype=np.float64)
        return interpolate(context, (self.low.context, self.high.context), tables)

    def decision(self, name: str) -> float:
        """Return the seconds of a decision of the policy with the `cost_name` `name`; 0 if it was not measured."""
        return self.decision_s.get(name, 0.0)

    def padded(self) -> tuple[int, ...]:
        """Return for n = 0..K drafted tokens how many to verify: a later size if it is clearly cheaper, else n.

        It has to be cheaper at both contexts, which were timed apart. Plain decoding is never padded.
        """
        costs = np.array([self.low.verify_s, self.high.verify_s])  # [2, K + 1]
        out = []
        for n in range(costs.shape[1]):
            best = n + int(costs[:, n:].sum(0).argmin())
            out.append(best if n and (costs[:, best] < (1.0 - PADDING_GAIN) * costs[:, n]).all() else n)
        return tuple(out)

    @cached_property
    def _padded(self) -> Array:
        return np.array(self.padded(), dtype=np.int64)

    @cached_property
    def _chain_tables(self) -> tuple[Array, ...]:
        """Seconds at both contexts: first step of 1 and 2 tokens, a token, a later step [2, 1]; verification [2, K + 1]."""
        tables = (self.low, self.high)
        steps = np.array([[*table.draft_s, table.draft_token_s, table.later_s] for table in tables])
        return (*steps.T[:, :, None], np.array([table.verify_s for table in tables]))

    def round_seconds(
        self,
        context: Array,
        drafted: Array,
        verified: Array,
        backlog: Array,
        decisions: Array,
        decision: float,
        fed: Array | None = None,
    ) -> Array:
        """Return [S] float64 seconds of rounds, [R, S] of contexts [R, S].

        Args:
            context: [S] or [R, S] tokens committed before the round.
            drafted, verified: [S] int64, tokens drawn, tokens sent to the target.
            backlog: [S] committed tokens that the draft has not read yet.
            decisions: [S] times the policy was called.
            decision: seconds of each.
            fed: [S, K] int64, of trees: how many tokens the draft read at each of its steps; None = chains, one a step.
        """
        if fed is None:
            outside = self.round_s + self.step_s * drafted
            one, two, token, later, verify = self._chain_tables
            first = first_step_s(one, two, token, backlog) * (drafted > 0)
            # [2, S] at both contexts; the loop pads chains alone.
            tables = first + later * np.maximum(drafted - 1, 0) + verify[:, self._padded[verified]]
        else:
            per_round, per_step, per_token = self.tree_outside_s or (self.round_s, self.step_s, 0.0)
            outside = per_round + per_step * (fed > 0).sum(1) + per_token * drafted
            tables = np.stack([table.tree_calls_s(verified, backlog, fed) for table in (self.low, self.high)])
        calls = interpolate(context, (self.low.context, self.high.context), tables)
        out: Array = calls + outside + decision * decisions
        return out

    def first_draft_s(self, streams: ArrayLike, context: ArrayLike) -> Array:
        """Return the seconds of a round's first draft step by the streams that draft; 0 of none.

        Arguments of this and the next two methods are numbers or arrays, which broadcast. Seconds include those outside the
        models. Without `batch`, the tables of a single stream are used: a token costs the same in every stream.
        """
        count = np.asarray(streams)
        if self.batch:
            seconds = self.batch.between(context, lambda table: read_curve(table.first_draft_s or table.draft_s, count))
        else:
            first, later = (
                self.between(context, read) for read in (lambda table: table.draft_s[0], lambda table: table.later_s)
            )
            seconds = np.maximum(self.draft_s(count, context) + first - later, MIN_SHARE * first)
        out: Array = np.where(count > 0, seconds, 0.0)
        return out

    def draft_s(self, streams: ArrayLike, context: ArrayLike) -> Array:
        """Return the seconds of a later draft step by the streams that draft; 0 of none."""
        count = np.asarray(streams)
        if self.batch:
            out: Array = self.batch.between(context, lambda table: read_curve(table.draft_s, count)) * (count > 0)
            return out
        most = int(count.max(initial=0))
        return self.between(context, lambda table: table.tree_draft(most)[count]) + self.step_s * count

    def verify_s(self, streams: ArrayLike, tokens: ArrayLike, context: ArrayLike) -> Array:
        """Return the seconds of a round except drafting.

        Args:
            streams: that are verified together.
            tokens: sent in all, the anchor of each stream included.
            context: tokens committed, the mean over streams.
        """
        count, sent = np.broadcast_arrays(streams, tokens)
        if self.batch:
            flat = count.ravel(), sent.ravel()
            return self.batch.between(context, lambda table: table.rounds_s(*flat).reshape(count.shape))
        padded = np.arange(max(int(sent.max(initial=0)), self.max_depth + 1) + 1)
        padded[1 : self.max_depth + 2] = self._padded + 1  # the loop pads a single stream
        sent = np.where(count == 1, padded[sent], sent)
        calls = self.between(context, lambda table: read_curve(tuple(enumerate(table.verify_s, 1)), sent))
        return calls + self.round_s

    def batch_seconds(
        self, context: Array, drafted: Array, verified: Array, decisions: Array, decision: float
    ) -> float:
        """Return the seconds of one round that the streams of a batch have together; arguments as of `round_seconds`."""
        mean = float(context.mean())
        fed = (drafted[:, None] > np.arange(drafted.max(initial=0))).sum(0)  # [K] streams that draft at each depth
        drafts = self.draft_s(fed[1:], mean).sum() + (self.first_draft_s(fed[0], mean) if len(fed) else 0.0)
        verification = self.verify_s(len(drafted), len(drafted) + int(verified.sum()), mean)
        return float(drafts + verification + decision * decisions.max(initial=0))

    def chain_costs(self, context: float, decision: float, first: int = 0, depth: int | None = None) -> Array:
        """Return [K + 1] float64, the seconds of a round that drafts k = 0..K tokens at `context`, backlog 1.

        A policy with its first decision at depth `first` decides k - first + 1 times, but not at depth K.
        """
        depth = self.max_depth if depth is None else depth
        k = np.arange(depth + 1)
        decisions = np.maximum(np.minimum(k, depth - 1) - first + 1, 0)
        one = np.ones_like(k)
        return self.round_seconds(one * context, k, k, one, decisions, decision)

    def prefill_seconds(self, length: ArrayLike) -> Array:
        """Return [S] float64 seconds to read prompts of `length` [S] tokens with the target."""
        return self.prefill_s[0] + self.prefill_s[1] * np.asarray(length, dtype=np.float64)
