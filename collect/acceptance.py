"""Acceptance by depth, from observed depths only: a token that was not drafted was not rejected either.

Each depth of a round is accepted, rejected or not observed. Where all depths of all rounds were observed, as in dense traces,
P(A >= k) is the share of rounds with A >= k. Where drafts ended earlier it is the product over j <= k of

    a_j = rounds that accepted depth j / rounds that observed depth j, of those that accepted the first j - 1 tokens

(E. L. Kaplan and P. Meier, Journal of the American Statistical Association 53, 1958), which assumes that draft lengths do
not depend on acceptance. Rounds that a live run drafted to full depth at random need no assumption; if there are any, only
they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..policies.contract import Array
from ..policies.display import Table
from .schema import NO_TOKEN, Header

COLUMNS = ("accepted_length", "cut")
LIVE_COLUMNS = ("accepted", "observed", "drawn", "sent", "tokens", "explored")
"""Columns that `depth_outcomes` reads from every trace, and additionally from live ones."""

LENGTHS = "lengths"
"""Key of `Header.facts` in traces of an engine's records: whether its draft lengths are equal."""

FIXED, VARIED = "fixed", "varied"
"""All lengths are equal; they vary, and may depend on acceptance."""

_EXPLORED = (
    "P(A >= k) is of the rounds that explored: they were drafted to full depth at random, which makes it unbiased for the "
    "anchors that the recorded run visited"
)
_ASSUMED = (
    "P(A >= k) is a product over depths, each of the rounds that drafted so deep; it assumes that draft lengths do not "
    "depend on acceptance"
)
_LIMITED = (
    "draft lengths vary and may depend on acceptance, so that P(A >= k) is identified to depth {} only, which every round "
    "drafted"
)


@dataclass(frozen=True)
class DepthOutcomes:
    """The outcomes of rounds by depth.

    Attributes:
        row: [R] int64, the rows of the trace that are used.
        observed: [R, K] bool, depth k was observed after the k - 1 tokens before it were accepted.
        accepted: [R, K] bool, and its token was accepted as well.
        basis: the assumption behind P(A >= k) in one sentence; "" if every depth was observed.
    """

    row: Array
    observed: Array
    accepted: Array
    basis: str

    @property
    def caveats(self) -> tuple[str, ...]:
        """`basis`, if there is one."""
        return (self.basis,) if self.basis else ()

    @property
    def survival(self) -> Array:
        """[K] float64, P(A >= k); NaN if it was not observed."""
        return survival(self.observed.sum(0), self.accepted.sum(0))


class AcceptanceByDepth(Table):
    """A row per depth k: P(A >= k), P(A >= k | A >= k - 1), and the number of rounds that observed it.

    Args:
        outcomes: of the rounds of a trace.
    """

    def __init__(self, outcomes: DepthOutcomes) -> None:
        self.basis = outcomes.basis
        survival = outcomes.survival.tolist()
        observed, accepted = outcomes.observed.sum(0).tolist(), outcomes.accepted.sum(0).tolist()
        super().__init__(
            {"depth": depth, "accepted": chance, "conditional": hits / rounds if rounds else None, "rounds": rounds}
            for depth, (chance, rounds, hits) in enumerate(zip(survival, observed, accepted, strict=True), 1)
        )

    def plot(self) -> Any:
        """Return a matplotlib figure of both probabilities by depth."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3), layout="constrained")
        axes, depths = figure.subplots(), [row["depth"] for row in self]
        axes.plot(depths, [row["accepted"] for row in self], "o-", label="P(A >= k)")
        axes.plot(depths, [row["conditional"] for row in self], "s--", label="P(A >= k | A >= k - 1)")
        axes.set(xlabel="depth k", ylim=(0, 1))
        axes.legend()
        return figure


def depth_outcomes(header: Header, columns: Mapping[str, Array]) -> DepthOutcomes:
    """Return the outcomes of the rounds of a trace by depth, without rounds that the end of a text cut.

    Args:
        header: of the trace.
        columns: `COLUMNS` as arrays [N], and of a live trace `LIVE_COLUMNS` as arrays [N] or [N, nodes].
    """
    row = np.flatnonzero(~columns["cut"].astype(bool))
    depths = np.arange(1, header.depth + 1)
    length = columns["accepted_length"][row, None]
    observed, accepted = length >= depths - 1, length >= depths
    if header.collector != "live":
        return DepthOutcomes(row, observed, accepted, "")
    reached, observed = observed, observed & _tried(header, columns, row)
    if np.array_equal(reached, observed):
        return DepthOutcomes(row, observed, accepted, "")
    explored = columns["explored"][row].astype(bool)
    if explored.any():
        return DepthOutcomes(row[explored], observed[explored], accepted[explored], _EXPLORED)
    basis = _ASSUMED
    if header.facts.get(LENGTHS) == VARIED:
        limit = identified_depth(header, columns["drawn"][row])
        observed, accepted, basis = observed & (depths <= limit), accepted & (depths <= limit), _LIMITED.format(limit)
    return DepthOutcomes(row, observed, accepted & observed, basis)


def identified_depth(header: Header, drawn: Array) -> int:
    """Return the depth up to which the rounds identify the acceptance of any draft length.

    Args:
        header: of the trace.
        drawn: [R, nodes] bool, of the rounds that are used.

    Returns:
        The trace's depth, unless an engine's draft lengths vary: then the depth that every round drafted.
    """
    if header.facts.get(LENGTHS) != VARIED:
        return header.depth
    return int(drawn.sum(1).min(initial=header.depth))


def survival(observed: Array, accepted: Array) -> Array:
    """Return [..., K] float64 P(A >= k) from counts [..., K] of rounds; NaN from the first depth that was not observed on."""
    observed, accepted = (np.asarray(counts, dtype=np.float64) for counts in (observed, accepted))
    with np.errstate(invalid="ignore", divide="ignore"):
        if np.array_equal(observed[..., 1:], accepted[..., :-1]):  # the product telescopes: rounds with A >= k over all
            return np.asarray(accepted / observed[..., :1])
        chance = accepted / observed
    impossible = np.maximum.accumulate(chance == 0.0, -1)  # after a certain rejection nothing is left to observe
    return np.asarray(np.cumprod(np.where(impossible, 0.0, chance), -1))


def _tried(header: Header, columns: Mapping[str, Array], row: Array) -> Array:
    """Return [R, K] bool, whether the outcome of all candidates below the accepted ones is known, by depth.

    All candidates of a tree are required: a depth that was observed because one of a few candidates was accepted would always
    be an acceptance.
    """
    accepted, observed, sent, tokens = (columns[name][row] for name in ("accepted", "observed", "sent", "tokens"))
    # Without any token the draft ends at a node, which counts as a known outcome.
    has_outcome = observed.astype(bool) | sent.astype(bool) | (tokens == NO_TOKEN)
    tree = header.tree
    parent = np.array(tree.parent[1:])  # of each node, as a row of the tree; row 0 is the anchor
    alive = np.concatenate([np.ones((len(row), 1), dtype=bool), accepted.astype(bool)], 1)[:, parent]
    unknown = alive & ~has_outcome
    levels = [np.array(level) - 1 for level in tree.levels[1:]]
    return np.stack([~unknown[:, level].any(1) for level in levels], 1)
