"""Costs estimated from timings: the same function gives the costs of a profile and of each bootstrap draw of it.

What is timed (`Key.what`), at each of the two contexts, with what it is counted by (`Key.counts`):

    verify (tokens)                 a verification in a round that may have drafted
    plain ()                        a verification of plain decoding, in texts of its own: no draft has emptied the caches
    first draft (backlog)           the first draft step of a round, which reads so many tokens
    later drafts (drafted)          the other ones of a round that drafted so many, together
    outside (drafted)               all of a round except models and policy
    plain outside ()                the same of plain decoding
    prefill (prompt tokens)         reading a prompt
    tree verify (tokens)            a verification of a tree
    tree outside (drafted)          all of a round of a tree except models and policy
    batch plain (streams)           a round of plain decoding, of several texts side by side
    batch verify (streams, tokens)  a round except drafting and decisions, the streams' anchors included
    batch first draft (streams)     the first draft step of a round
    batch drafts (streams, steps)   the other ones of a round, together
    decisions (calls)               all decisions of a policy in a round

Averages are means, not medians: sums are predicted, and slow moments are a part of them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from .costs import BatchCosts, BatchTable, Costs, CostTable, Points, along
from .errors import InputError
from .measurements import CONTEXTS, DECISIONS, VERIFY, Groups, Measurements, Seconds, Timings, groups

PLAIN, FIRST, LATER, OUTSIDE, PREFILL = "plain", "first draft", "later drafts", "outside", "prefill"
PLAIN_OUTSIDE = "plain outside"
TREE_VERIFY, TREE_OUTSIDE = "tree verify", "tree outside"
BATCH_PLAIN, BATCH_VERIFY = "batch plain", "batch verify"
BATCH_FIRST, BATCH_DRAFTS = "batch first draft", "batch drafts"

MIN_COUNTS: Mapping[str, tuple[int, ...]] = {
    VERIFY: (0,), PLAIN: (), FIRST: (1,), LATER: (2,), OUTSIDE: (0,), PLAIN_OUTSIDE: (), PREFILL: (1,), TREE_VERIFY: (1,),
    TREE_OUTSIDE: (0,), DECISIONS: (1,), BATCH_PLAIN: (1,), BATCH_VERIFY: (1, 1), BATCH_FIRST: (1,), BATCH_DRAFTS: (1, 1),
}  # fmt: skip
"""The smallest counts of each part."""

LONG_BACKLOG = 8
"""The price of a token of backlog is estimated from first draft steps that read more tokens than this."""


def check_measurements(measurements: Measurements) -> Measurements:
    """Return the measurements; raises `ValueError` if costs cannot be estimated from one of them."""
    for (what, of, counts), series in measurements.series.items():
        minima = (1, counts[0]) if what == BATCH_VERIFY and counts else MIN_COUNTS.get(what)  # the anchors are included
        if minima is None or len(counts) != len(minima) or any(n < m for n, m in zip(counts, minima, strict=True)):
            raise ValueError(f"measurements: no cost is estimated from {what!r} of {list(counts)}")
        if what != DECISIONS and of not in CONTEXTS:
            raise ValueError(f"measurements: {what!r} at the context {of!r}, which is neither short nor long")
        if what in (VERIFY, PLAIN, TREE_VERIFY, BATCH_PLAIN, BATCH_VERIFY) and not all(map(all, series)):
            raise ValueError(f"measurements: a verification of {list(counts)} in no time")
    return measurements


def mean(seconds: ArrayLike) -> float:
    """Return the mean of timings; 0 of none."""
    return float(np.asarray(seconds, dtype=np.float64).mean()) if np.size(seconds) else 0.0


def fit_line(timed: Sequence[tuple[Sequence[float], ArrayLike]]) -> list[float]:
    """Return the non-negative least-squares coefficients [C] of timings.

    Args:
        timed: (counts [C], timings) of rounds that consisted of the same.
    """
    from scipy.optimize import nnls  # slow to import, and needed only where costs are estimated

    weight = np.sqrt([np.size(values) for _, values in timed])
    x = np.array([counts for counts, _ in timed], dtype=np.float64) * weight[:, None]  # [G, C]
    y = np.array([mean(values) for _, values in timed]) * weight
    # Tokens come in thousands, rounds one by one: scaled columns condition the problem.
    length = np.linalg.norm(x, axis=0)
    length[length == 0.0] = 1.0
    solution, _ = nnls(x / length, y, maxiter=100 * x.shape[1])
    return [float(value) for value in solution / length]


def per_unit(timed: Sequence[tuple[int, Seconds]]) -> float:
    """Return seconds per unit, a ratio of sums, of timings of so many units each."""
    units = sum(count * seconds.size for count, seconds in timed)
    return float(sum(seconds.sum() for _, seconds in timed)) / units if units else 0.0


def fit_curves(sides: Sequence[Groups]) -> list[Points]:
    """Return for each side the seconds of a call by tokens: never falling, linear between powers of two.

    All sides share the shape of the curve, which is fitted to all timings, and each has a scale of its own. Single sizes come
    up too seldom to be priced alone: the best tree would be the one that was timed in a lucky moment.

    Args:
        sides: timings by (tokens,).
    """
    timed = [(tokens, seconds) for side in sides for (tokens,), seconds in side.items()]
    most = max(tokens for tokens, _ in timed)
    knots = [*(2**k for k in range((most - 1).bit_length())), most]

    def parts(tokens: int) -> list[float]:
        """Return (1, tokens between each two knots): with slopes >= 0 the curve never falls."""
        return [1.0, *(float(np.clip(tokens - low, 0, high - low)) for low, high in pairwise(knots))]

    per_call, *rises = fit_line([(parts(tokens), seconds) for tokens, seconds in timed])
    curve = tuple((n, per_call + float(np.dot(rises, parts(n)[1:]))) for n in knots)
    out = []
    for side in sides:
        expected = sum(float(along(curve, tokens)) * seconds.size for (tokens,), seconds in side.items())
        taken = float(sum(seconds.sum() for seconds in side.values()))
        scale = taken / expected if expected else 1.0
        out.append(tuple((n, scale * seconds) for n, seconds in curve))
    return out


def estimate(timings: Timings, contexts: tuple[float, float], depth: int) -> Costs:
    """Return all costs that timings give.

    Args:
        timings: see the top of this module.
        contexts: tokens in the cache at the short and the long context.
        depth: K, the longest chain.

    Raises:
        InputError: no round was timed.
    """
    low, high = (_chain_table(timings, side, context, depth) for side, context in zip(CONTEXTS, contexts, strict=True))
    outside, plain, prefill = (groups(timings, what) for what in (OUTSIDE, PLAIN_OUTSIDE, PREFILL))
    step_s, round_s = 0.0, mean(next(iter(outside.values()), ()))
    if len(outside) > 1:
        step_s, round_s = fit_line([((drafted, 1), seconds) for (drafted,), seconds in outside.items()])
    constant, slope = fit_line([((1, tokens), s) for (tokens,), s in prefill.items()]) if prefill else (0.0, 0.0)
    tree_outside = None
    if groups(timings, TREE_VERIFY):
        curves = fit_curves([groups(timings, TREE_VERIFY, side) for side in CONTEXTS])
        low, high = (
            dataclasses.replace(table, tree_verify_s=((0, table.verify_s[0]), *curve))  # of no tokens: plain decoding
            for table, curve in zip((low, high), curves, strict=True)
        )
        timed = groups(timings, TREE_OUTSIDE)
        if len(timed) > 1:  # unknowns
            per_round, per_token = fit_line([((1, drafted), seconds) for (drafted,), seconds in timed.items()])
            tree_outside = per_round, 0.0, per_token
    return Costs(
        low, high, step_s, round_s, (constant, slope), decision_prices(timings), tree_outside_s=tree_outside,
        batch=batch_costs(timings, contexts), plain_outside_s=mean(plain[()]) if plain else None,
    )  # fmt: skip


def decision_prices(timings: Timings) -> dict[str, float]:
    """Return the seconds of a decision of each policy, by `cost_name`."""
    names = sorted({key.of for key in timings if key.what == DECISIONS})
    return {name: per_unit([(n, s) for (n,), s in groups(timings, DECISIONS, name).items()]) for name in names}


def _chain_table(timings: Timings, side: str, context: float, depth: int) -> CostTable:
    """Return the costs at one context; what was not timed there is taken from both contexts together."""

    def timed(what: str) -> Groups:
        return {**groups(timings, what), **groups(timings, what, side)}

    verify, first, later = timed(VERIFY), timed(FIRST), groups(timings, LATER, side) or groups(timings, LATER)
    # 0 is a part that was never timed: `or` goes on to the next best source.
    later_s = per_unit([(drafted - 1, seconds) for (drafted,), seconds in later.items()])
    # A drafter that reads anew all that was committed never reads one token alone: its first step reads two.
    one = mean(first.get((1,), first.get((2,), ()))) or later_s
    two = max(mean(first.get((2,), ())) or one, one)  # reading more is never cheaper: a smaller mean is noise
    slopes = [(seconds - two) / (backlog - 2) for (backlog,), seconds in first.items() if backlog > LONG_BACKLOG]
    token = max(mean(np.concatenate(slopes)), 0.0) if slopes else 0.0
    plain = mean(timed(PLAIN).get((), ())) or mean(verify.get((0,), ()))
    seconds = [plain, *(mean(verify.get((n,), ())) for n in range(1, depth + 1))]
    known = [n for n, value in enumerate(seconds) if value > 0]
    if not known:
        raise InputError("profile: no round was timed; give more new tokens or more repeats")
    # A length without timings costs as the nearest one, the longer if in doubt.
    nearest = (min(known, key=lambda k: (abs(k - n), -k)) for n in range(depth + 1))
    return CostTable(context, (one, two), token, tuple(seconds[n] for n in nearest), later_s or one)


def batch_costs(timings: Timings, contexts: tuple[float, float]) -> BatchCosts | None:
    """Return the costs of batches, at contexts of so many tokens; None if no batch was timed."""
    if not groups(timings, BATCH_VERIFY) or not (groups(timings, BATCH_FIRST) or groups(timings, BATCH_DRAFTS)):
        return None
    low, high = (_batch_table(timings, side, context) for side, context in zip(CONTEXTS, contexts, strict=True))
    return BatchCosts(low, high)


def _batch_table(timings: Timings, side: str, context: float) -> BatchTable:
    """Return the costs of batches at one context; what was not timed there is taken from both together."""
    verify: dict[int, dict[int, float]] = defaultdict(dict)
    for of in (None, side):
        for (streams, tokens), seconds in groups(timings, BATCH_VERIFY, of).items():
            verify[streams][tokens] = mean(seconds)
        for (streams,), seconds in groups(timings, BATCH_PLAIN, of).items():
            verify[streams][streams] = mean(seconds)
    curves = {streams: tuple(sorted(timed.items())) for streams, timed in sorted(verify.items())}
    first = {**groups(timings, BATCH_FIRST), **groups(timings, BATCH_FIRST, side)}
    drafts = groups(timings, BATCH_DRAFTS, side) or groups(timings, BATCH_DRAFTS)
    first_s = tuple((n, mean(seconds)) for (n,), seconds in first.items())
    later: dict[int, list[tuple[int, Seconds]]] = defaultdict(list)
    for (streams, steps), seconds in drafts.items():
        later[streams].append((steps, seconds))
    later_s = tuple((streams, per_unit(steps)) for streams, steps in later.items())
    return BatchTable(context, later_s or first_s, curves, first_s)
