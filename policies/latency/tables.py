"""Seconds of the model calls of a round at one context length, and of a policy's decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arguments import check_number
from .entries import Entries
from .robust_fits import between

Array = np.ndarray[Any, Any]

MOST_DEPTH, MOST_CONTEXT = 1024, 1e9
LEAST_CALL_S, MOST_S = 1e-9, 1e6
"""Limits of what is read from a file: a model call takes time, and nothing takes eleven days."""
CLEARLY = 0.05
"""Share by which a verification of more tokens must be cheaper to be taken."""


@dataclass(frozen=True)
class Price:
    """Seconds of a policy's decisions in a round, features included.

    Attributes:
        each: of one decision.
        opening: besides, once in a round that has any: the first decision runs on caches that the models have emptied, and a
            policy that hears how rounds went does so once.
        row: of each stream beyond the first that it is asked about at once.
    """

    each: float = 0.0
    opening: float = 0.0
    row: float = 0.0

    def of(self, decisions: ArrayLike) -> Array:
        """Return [S] float64 seconds of rounds in which the policy was asked so often."""
        asked = np.asarray(decisions, dtype=np.float64)
        return self.each * asked + self.opening * (asked > 0)

    def together(self, decisions: Array) -> float:
        """Return the seconds of a round of a batch in which the policy was asked so often about each stream [S]."""
        asked = decisions.max(initial=0)
        # Streams that stopped drafting are not read any more, so that rows are counted, not streams times depths.
        return float(self.of(asked) + self.row * (decisions.sum() - asked))

    def times(self, factor: float) -> Price:
        """Return the price of decisions that cost `factor` as much."""
        return Price(self.each * factor, self.opening * factor, self.row * factor)

    @staticmethod
    def read(value: Any) -> Price:
        """Return the price, of itself or a number (of each decision)."""
        return value if isinstance(value, Price) else Price(float(value))


@dataclass(frozen=True)
class CostTable:
    """Seconds of the model calls of a chain round at one context length.

    Attributes:
        context: tokens in the cache when measured.
        draft_s: the first draft step of a round, which reads 1 or 2 new tokens (2 after full acceptance); it runs on
            caches that the target has emptied.
        draft_token_s: each further token of a backlog.
        verify_s: a verification of n = 0, 1, ..., K drafted tokens (n + 1 rows), as measured.
        later_draft_s: each draft step after the first; None = as the first of one token.
        tree_draft_s: of a tree, points (rows, seconds) of a draft step after the first that reads so many tokens; none =
            as many times one row as verifying is.
        tree_verify_s: of a tree, points (drafted tokens, seconds) of a verification; none = as of chains. Between points
            costs are linear.
        second_draft_s: the second draft step, the last one on caches that are still cold; None = as later ones.
    """

    context: float
    draft_s: tuple[float, float]
    draft_token_s: float
    verify_s: tuple[float, ...]
    later_draft_s: float | None = None
    tree_draft_s: tuple[tuple[int, float], ...] = ()
    tree_verify_s: tuple[tuple[int, float], ...] = ()
    second_draft_s: float | None = None

    @property
    def later_s(self) -> float:
        """Seconds of a draft step after the first, of one row."""
        return self.draft_s[0] if self.later_draft_s is None else self.later_draft_s

    @property
    def second_s(self) -> float:
        """Seconds of the second draft step of a round."""
        return self.later_s if self.second_draft_s is None else self.second_draft_s

    def tree_draft(self, most: int) -> tuple[float, ...]:
        """Return the seconds of a later draft step of a tree that reads 0, 1, ..., `most` rows; none cost nothing."""
        scale = self.later_s / self.verify_s[0] if self.verify_s[0] else 0.0
        points = self.tree_draft_s or tuple((n + 1, scale * s) for n, s in enumerate(self.verify_s))  # n + 1 rows
        return (0.0, *between(points, range(1, most + 1)))

    def tree_verify(self, most: int) -> tuple[float, ...]:
        """Return the seconds of a verification of a tree's 0, 1, ..., `most` tokens."""
        return between(self.tree_verify_s or tuple(enumerate(self.verify_s)), range(most + 1))


class ChainCosts:
    """The costs of chains as arrays, a row for each of the two contexts.

    Attributes:
        first: [2, 1] seconds of the first draft step with one token to read.
        more, token: [2, 1] what the second token to read adds, and each further one.
        second, later: [2, 1] of the second draft step, and of each one after it.
        verify: [2, K + 1].
    """

    def __init__(self, low: CostTable, high: CostTable) -> None:
        def both(of: Callable[[CostTable], float]) -> Array:
            return np.array([[of(low)], [of(high)]])

        self.first = both(lambda table: table.draft_s[0])
        self.more = both(lambda table: table.draft_s[1] - table.draft_s[0])
        self.token = both(lambda table: table.draft_token_s)
        self.second = both(lambda table: table.second_s)
        self.later = both(lambda table: table.later_s)
        self.verify = np.array([low.verify_s, high.verify_s])


def at_context(low: Array, high: Array, contexts: tuple[float, float], context: ArrayLike) -> Array:
    """Return seconds at `context`, on the line through those at the two contexts measured.

    The line goes on beyond them, but seconds never fall below a quarter of the smaller ones: so they stay above 0.
    """
    span = contexts[1] - contexts[0]
    weight = (np.asarray(context, dtype=np.float64) - contexts[0]) / span if span else 0.0
    # Outside its two points a line may fall to 0 and below, and rates divide by seconds.
    out: Array = np.maximum(low + (high - low) * weight, 0.25 * np.minimum(low, high))
    return out


def least_later(cost: Array) -> Array:
    """Return [N] int64, which of the costs [N] from each place on is the least: the first of equal ones."""
    places = np.arange(len(cost))
    # A place has the least cost from itself on iff it equals the running minimum from the end; then the nearest such place.
    least = np.where(cost == np.minimum.accumulate(cost[::-1])[::-1], places, len(cost))
    out: Array = np.minimum.accumulate(least[::-1])[::-1]
    return out


def filled_up(costs: Array) -> Array:
    """Return [N] int64, where to fill up to from each place of costs [2, N]: a later, clearly cheaper one, or itself.

    Where costs are flat the cheapest of several is the one whose measurement was luckiest: filling up to it gains nothing,
    and its seconds are too few. So it has to be cheaper at both contexts, which were timed apart. The first place, plain
    decoding, is timed in texts of its own, and stays as it is.
    """
    least, places = least_later(costs.sum(0)), np.arange(costs.shape[1])
    pays = (costs[:, least] < (1.0 - CLEARLY) * costs).all(0) & (places > 0)
    out: Array = np.where(pays, least, places)
    return out


def read_table(raw: Entries) -> CostTable:
    """Return the costs at one context from their JSON form."""

    def points(key: str, first: int, least: float) -> tuple[tuple[int, float], ...]:
        return raw.points(key, (0, MOST_DEPTH), first, least, MOST_S) if raw.has(key) else ()

    one, two = raw.numbers("draft_s", (2, 2), most=MOST_S)
    return CostTable(
        raw.number("context", most=MOST_CONTEXT),
        (one, two),
        raw.number("draft_token_s", most=MOST_S),
        raw.numbers("verify_s", (1, MOST_DEPTH + 1), LEAST_CALL_S, MOST_S),
        raw.number_or("later_draft_s", None, MOST_S),
        points("tree_draft_s", 1, 0.0),
        points("tree_verify_s", 0, LEAST_CALL_S),
        raw.number_or("second_draft_s", None, MOST_S),
    )


def read_price(raw: Entries, name: str) -> float | Price:
    """Return the price of a policy's decisions from its JSON form: a number, or those of a `Price`; `row` may be missing."""
    if not isinstance(raw.values[name], Mapping):
        return check_number(raw.values[name], raw.named(name), high=MOST_S)
    price = raw.part(name)
    each, opening = (price.number(key, MOST_S) for key in ("each", "opening"))
    return Price(each, opening, price.number_or("row", 0.0, MOST_S))
