"""The costs of a profile, of its timings: the same function gives the profile and each bootstrap draw of it.

What is timed (`Key.what`), at each of the two contexts, with what it is counted by (`Key.counts`):

    verify (tokens)                 a verification in a round that may have drafted
    plain ()                        a verification of plain decoding, on its own: on caches that no draft has emptied
    first draft (backlog)           the first draft step of a round, which reads so many tokens
    later drafts (drafted)          the other ones of a round that drafted so many, together
    outside (drafted)               all of a round but models and policy
    plain outside ()                the same of plain decoding, where nothing is asked, drafted or compared
    prefill (prompt tokens)         reading a prompt
    tree ...                        the same of rounds that may branch, by rows: see `trees`
    batch plain (streams)           a verification of plain decoding, of several texts side by side
    batch verify (streams, tokens)  one in a round that may have drafted, the streams' anchors included
    batch first draft (streams, backlog)  the first draft step, by the streams that draft and the tokens read in all
    batch drafts (streams, steps)   the other ones, together
    batch outside (streams, drafted)  all of a round but models and policy
    batch plain outside (streams)   the same of plain decoding
    decisions (times asked)         of a policy, all of one round
    decisions (times asked, rows)   of streams that it is asked about at once: one row of each, each time
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ..errors import InputError
from .batch import BatchCosts, BatchTable
from .costs import Costs
from .measurements import Measurements, Seconds, Timings
from .robust_fits import Points, line, never_falling, pooled, rising, typical
from .tables import CostTable, Price

SHORT, LONG = CONTEXTS = ("short", "long")
VERIFY, PLAIN, FIRST, LATER, OUTSIDE, PREFILL = "verify", "plain", "first draft", "later drafts", "outside", "prefill"
PLAIN_OUTSIDE = "plain outside"
TREE_DRAFTS, TREE_VERIFY, TREE_OUTSIDE = "tree drafts", "tree verify", "tree outside"
BATCH_PLAIN, BATCH_VERIFY, BATCH_FIRST = "batch plain", "batch verify", "batch first draft"
BATCH_DRAFTS, BATCH_OUTSIDE, BATCH_PLAIN_OUTSIDE = "batch drafts", "batch outside", "batch plain outside"
DECISIONS = "decisions"

LEAST_COUNTS: Mapping[str, tuple[int, ...]] = {
    VERIFY: (0,),
    PLAIN: (),
    FIRST: (1,),
    LATER: (2,),
    OUTSIDE: (0,),
    PLAIN_OUTSIDE: (),
    PREFILL: (1,),
    TREE_VERIFY: (1,),
    TREE_OUTSIDE: (0, 0),
    DECISIONS: (1,),
    BATCH_PLAIN: (1,),
    BATCH_VERIFY: (1, 1),
    BATCH_FIRST: (1, 1),
    BATCH_DRAFTS: (1, 1),
    BATCH_OUTSIDE: (1, 0),
    BATCH_PLAIN_OUTSIDE: (1,),
}
"""What each part is counted by, and from where on; the rows of `TREE_DRAFTS` are as many as there were steps."""

FAR_BACKLOG = 8
"""Tokens beyond which a backlog tells what one more of them costs."""

Groups = Mapping[tuple[int, ...], Seconds]


def check(measurements: Measurements) -> Measurements:
    """Return the measurements; raises `ValueError` where costs cannot be estimated from one of them."""
    for (what, of, counts), series in measurements.series.items():
        least = LEAST_COUNTS.get(what, (1,) * max(len(counts), 1))
        known = what == TREE_DRAFTS or what in LEAST_COUNTS
        if what == DECISIONS and len(counts) == 2:
            least = (1, counts[0])  # a row at least each time
        if not known or len(counts) != len(least) or any(n < m for n, m in zip(counts, least, strict=True)):
            raise ValueError(f"measurements: {what!r} of {list(counts)} is nothing that costs are estimated from")
        if what != DECISIONS and of not in CONTEXTS:
            raise ValueError(f"measurements: {what!r} at the context {of!r}, which is neither short nor long")
        if what == BATCH_VERIFY and counts[1] < counts[0]:
            raise ValueError(f"measurements: {what!r} of {counts[0]} streams and only {counts[1]} tokens")
        if what in (VERIFY, PLAIN, TREE_VERIFY, BATCH_PLAIN, BATCH_VERIFY) and not all(map(all, series)):
            raise ValueError(f"measurements: a verification of {list(counts)} in no time")
    return measurements


def estimate(timings: Timings, contexts: tuple[float, float], depth: int) -> Costs:
    """Return all costs that timings tell but those of decisions: of chains up to `depth` tokens, of trees and batches.

    Args:
        timings: see the top of this module.
        contexts: tokens in the cache at the short and the long context.
        depth: K.

    Raises:
        InputError: nothing was timed that costs could be told by.
    """
    low, high = (_chains(timings, side, context, depth) for side, context in zip(CONTEXTS, contexts, strict=True))
    step_s, round_s = _outside(timings)
    low, high, tree_outside = _with_trees(timings, low, high)
    plain = _both(timings, PLAIN_OUTSIDE)
    return Costs(
        low, high, step_s, round_s, _prefill(timings), tree_outside_s=tree_outside, batch=batch_costs(timings, contexts),
        plain_outside_s=typical(plain[()]) if plain else None,
    )  # fmt: skip


def _both(timings: Timings, what: str) -> Groups:
    """Return the timings of a part of a round at both contexts together."""
    return pooled([timings.groups(what, side) for side in CONTEXTS])


def decisions(timings: Timings) -> dict[str, Price]:
    """Return the prices of policies' decisions."""
    prices = {}
    for name in timings.named(DECISIONS):
        groups = timings.groups(DECISIONS, name)
        alone = {counts[0]: seconds for counts, seconds in groups.items() if len(counts) == 1}
        together = {counts: seconds for counts, seconds in groups.items() if len(counts) == 2}
        price = _decided_alone(alone or {asked: seconds for (asked, _), seconds in together.items()})
        if further := [
            (np.asarray(seconds) - price.of(asked)) / (rows - asked)
            for (asked, rows), seconds in together.items()
            if rows > asked
        ]:
            price = dataclasses.replace(price, row=max(0.0, typical(np.concatenate(further))))
        prices[name] = price
    return prices


def _decided_alone(groups: Mapping[int, Seconds]) -> Price:
    """Return the price of the decisions about one stream, by the times asked."""
    if len(groups) > 1:
        # All decisions of a round are timed together: count x each + opening.
        return Price(*line([((asked, 1), seconds) for asked, seconds in groups.items()]))
    ((asked, seconds),) = groups.items()
    return Price(typical(seconds) / asked)


def _chains(timings: Timings, side: str, context: float, depth: int) -> CostTable:
    """Return the costs at one context; what was never seen there is taken from both contexts together."""

    def of(what: str, *counts: int) -> float:
        here = timings.groups(what, side).get(counts)
        return typical(_both(timings, what).get(counts, ()) if here is None else here)

    # Whatever was never timed, or not told apart, is 0 here, which no call costs: `or` goes on to the next best source.
    second, later = _later(pooled([timings.groups(LATER, side)])) or _later(_both(timings, LATER)) or (0.0, 0.0)
    # A drafter that reads all anew that was committed has never one token alone to read: a step that reads two is its first,
    # and no later one, which may read nothing at all.
    one = of(FIRST, 1) or of(FIRST, 2) or second
    two = of(FIRST, 2) or one
    slope = _slope(pooled([timings.groups(FIRST, side)]), two) or _slope(_both(timings, FIRST), two) or 0.0
    verify = _filled([of(PLAIN) or of(VERIFY, 0), *(of(VERIFY, n) for n in range(1, depth + 1))])
    # Reading more is never cheaper: where it was timed so, that was noise.
    return CostTable(context, (one, max(two, one)), max(slope, 0.0), verify, later or one, second_draft_s=second or one)


def _later(groups: Groups) -> tuple[float, float] | None:
    """Return the seconds of the second draft step and of each after it; None where there was none."""
    if not groups:
        return None
    if len(groups) == 1:
        (((drafted,), seconds),) = groups.items()
        return typical(seconds) / (drafted - 1), typical(seconds) / (drafted - 1)  # one length does not tell them apart
    # After the first step: second + (drafted - 2) x later.
    second, later = line([((1, drafted - 2), seconds) for (drafted,), seconds in groups.items()])
    return second, later


def _slope(groups: Groups, two: float) -> float | None:
    """Return the seconds of a token of a long backlog, beside a first draft step of two; None where there was none."""
    long = [(seconds - two) / (backlog - 2) for (backlog,), seconds in groups.items() if backlog > FAR_BACKLOG]
    return typical(np.concatenate(long)) if long else None


def _filled(seconds: list[float]) -> tuple[float, ...]:
    """Return the times with every length that never came up priced as the nearest one that did, the longer if in doubt."""
    known = [n for n, value in enumerate(seconds) if value > 0]
    if not known:
        raise InputError("profile: no round was timed; give more new tokens or more repeats")
    return tuple(seconds[min(known, key=lambda k: (abs(k - n), -k))] for n in range(len(seconds)))


def _outside(timings: Timings) -> tuple[float, float]:
    """Return the seconds outside models and policy per drafted token and per round."""
    groups = _both(timings, OUTSIDE)
    if len(groups) < 2:
        return 0.0, typical(next(iter(groups.values()), ()))
    per_token, per_round = line([((drafted, 1), seconds) for (drafted,), seconds in groups.items()])
    return per_token, per_round


def _prefill(timings: Timings) -> tuple[float, float]:
    """Return (constant, per token) of reading a prompt."""
    groups = [(tokens, seconds) for side in CONTEXTS for (tokens,), seconds in timings.groups(PREFILL, side).items()]
    constant, slope = line([((1, tokens), seconds) for tokens, seconds in groups]) if groups else (0.0, 0.0)
    return constant, slope


def _with_trees(
    timings: Timings, low: CostTable, high: CostTable
) -> tuple[CostTable, CostTable, tuple[float, float, float] | None]:
    """Return the costs with those of trees, and of their rounds outside models and policy.

    Both contexts share the shape of a curve, each has its own scale: single sizes come up too seldom to be priced alone, and
    the best tree would be the one whose size was timed in a lucky moment.
    """
    if not timings.named(TREE_VERIFY):
        return low, high, None
    sides = (low, high)
    drafts, verifies = (
        rising([timings.groups(what, name) for name in CONTEXTS]) for what in (TREE_DRAFTS, TREE_VERIFY)
    )
    low, high = (
        # None is what plain decoding verifies, on caches that no draft has emptied: it is timed there.
        dataclasses.replace(side, tree_draft_s=draft, tree_verify_s=((0, side.verify_s[0]), *verify))
        for side, draft, verify in zip(sides, drafts, verifies, strict=True)
    )
    outside = _both(timings, TREE_OUTSIDE)
    if len(outside) < 3:  # unknowns of the line below
        return low, high, None
    per_round, per_step, per_token = line([((1, *counts), seconds) for counts, seconds in outside.items()])
    return low, high, (per_round, per_step, per_token)


def batch_costs(timings: Timings, contexts: tuple[float, float]) -> BatchCosts | None:
    """Return the costs of batches that timings tell, at contexts of so many tokens; None where none was timed."""
    every = pooled([_batch_verify(timings, side) for side in CONTEXTS])
    if not every or not any(timings.named(what) for what in (BATCH_FIRST, BATCH_DRAFTS)):
        return None
    low, high = (_batch_side(timings, side, every, context) for side, context in zip(CONTEXTS, contexts, strict=True))
    outside = _both(timings, BATCH_OUTSIDE)
    if not outside:
        return BatchCosts(low, high)
    per_round, per_stream, per_token = line([((1, *counts), seconds) for counts, seconds in outside.items()])
    return BatchCosts(low, high, (per_round, per_stream, per_token), _plain_outside(timings))


def _plain_outside(timings: Timings) -> tuple[float, float] | None:
    """Return the seconds outside the models in a round of plain decoding: per round, per stream; None of none timed."""
    groups = _both(timings, BATCH_PLAIN_OUTSIDE)
    if len(groups) < 2:
        return next(((typical(seconds), 0.0) for seconds in groups.values()), None)
    per_round, per_stream = line([((1, streams), seconds) for (streams,), seconds in groups.items()])
    return per_round, per_stream


def _batch_side(timings: Timings, side: str, every: Groups, context: float) -> BatchTable:
    """Return the costs of batches at one context; what was never seen there is taken from both together."""
    here = _batch_verify(timings, side)
    verify: dict[int, list[tuple[int, float]]] = {}
    counted: dict[int, list[float]] = {}
    # `pooled` is in ascending order, so the points of each size rise, as `along` wants them.
    for (streams, tokens), seconds in every.items():
        timed = here.get((streams, tokens), seconds)
        verify.setdefault(streams, []).append((tokens, typical(timed)))
        counted.setdefault(streams, []).append(len(timed))
    second, later = _later_by_streams(timings.groups(BATCH_DRAFTS, side) or _both(timings, BATCH_DRAFTS))
    first, token = _first_by_streams(timings.groups(BATCH_FIRST, side) or _both(timings, BATCH_FIRST))
    # The first point, plain decoding, was timed in texts of its own and stays as it is.
    sizes = {n: (points[0], *never_falling(tuple(points[1:]), counted[n][1:])) for n, points in verify.items()}
    return BatchTable(context, first or second, token, later or first, sizes, second)


def _batch_verify(timings: Timings, side: str) -> dict[tuple[int, ...], Seconds]:
    """Return the timings of verifications by (streams, tokens); where nobody drafts it is plain decoding, timed alone."""
    out = timings.groups(BATCH_VERIFY, side)
    out.update({(streams, streams): seconds for (streams,), seconds in timings.groups(BATCH_PLAIN, side).items()})
    return out


def _first_by_streams(groups: Groups) -> tuple[Points, float]:
    """Return points (streams, seconds of a first draft step) and the seconds of each token read beyond one a stream.

    Args:
        groups: timings by (streams, tokens read).
    """
    if not groups:
        return (), 0.0
    known = sorted({streams for streams, _ in groups})
    # One unknown for each number of streams and one for a token more: in one fit, since all sizes share that price.
    *steps, token = line(
        [([*(streams == n for n in known), read - streams], seconds) for (streams, read), seconds in groups.items()]
    )
    return tuple(zip(known, steps, strict=True)), token


def _later_by_streams(groups: Groups) -> tuple[Points, Points]:
    """Return points (streams, seconds) of the second draft step of a round, and of each one after it.

    Args:
        groups: timings by (streams, steps after the first, which were timed together).
    """
    second, later = [], []
    for n in sorted({streams for streams, _ in groups}):
        own: Groups = {(steps + 1,): seconds for (streams, steps), seconds in groups.items() if streams == n}
        if found := _later(own):
            # One that came out as nothing was lost in noise, as no step takes no time.
            second.append((n, found[0] or found[1]))
            later.append((n, found[1] or found[0]))
    return tuple(second), tuple(later)
