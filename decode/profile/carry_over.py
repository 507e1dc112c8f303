"""What a round costs the verifications after it, charged to the round.

The longer ago the target's weights were read, the fewer of them a cache that others use too still holds: a verification of
two tokens took 13% longer in a text of shuffled lengths than in one that drafts a single token throughout, and one of nine 5%
less than in a text of long drafts. It takes some rounds to settle. So what a verification takes is a line in the seconds of
the rounds before it, V = f + b P. In a long text each second of a round is then one second and b / (1 - b) more in the
verifications after it: what the parts of a round cost adds up to (f + the other parts) / (1 - b).

A cache that holds nothing of the target any more has no more to lose. So P counts no further than the longest chain that the
line is known for: rounds of trees take several times as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from ...policies.latency.estimate import (
    CONTEXTS,
    FIRST,
    LATER,
    OUTSIDE,
    PLAIN,
    PLAIN_OUTSIDE,
    TREE_VERIFY,
    VERIFY,
)
from ...policies.latency.measurements import NS, Key, Measurements, Seconds, Series, Timings
from ...policies.latency.profile import MOST_CARRIED
from ...policies.latency.robust_fits import STALL, line, typical

MEMORY, FINE = 8, 4
"""Rounds before one that it depends on, and parts of a token that their mean is rounded to: whole ones blur the slope."""

ROUND, TREE_ROUND = "round", "tree round"
"""Whole rounds, by the tokens verified: timed to tell how long the rounds before one were."""

VERIFYING = {VERIFY: ROUND, TREE_VERIFY: TREE_ROUND}
"""What is timed after other rounds: its counts are the tokens verified and those of `Before`."""

PARTS = (FIRST, LATER, OUTSIDE, PLAIN_OUTSIDE)
"""Of rounds of chains, what bears its share of what a round costs those after it."""

LEAST = 0.25
"""Share of its seconds that a verification keeps at least."""


class Before:
    """The mean of the tokens verified in the last rounds of a text.

    Not their seconds: where the machine is slow for a moment rounds are long and so are those after them, whatever the cache
    holds. What a script drafts is no consequence of the machine.
    """

    def __init__(self) -> None:
        self._verified: list[int] = []

    def add(self, verified: int) -> int | None:
        """Take a round in and return the mean before it, in parts of a token; None of the first one, after the prompt."""
        last = self._verified[-MEMORY:]
        self._verified.append(verified)
        return round(FINE * sum(last) / len(last)) if last else None


def charged(measured: Measurements) -> tuple[Measurements, float]:
    """Return the measurements of the parts of rounds with what each costs the verifications after it.

    Args:
        measured: verifications counted as `VERIFYING` says, and rounds.

    Returns:
        Those, with verifications by the tokens verified alone and without rounds; prefill, batches and decisions are as
        they were. And the share b.
    """
    timings = measured.pooled()
    rounds = {(what, side): _round_line(timings, what, side) for what in VERIFYING.values() for side in CONTEXTS}
    most = {side: _longest_chain(timings, rounds[ROUND, side], side) for side in CONTEXTS}
    share = _share(timings, rounds)
    # Of any backlog: drafters that go on from the target's states read two tokens at least.
    first = {side: typical([s for some in timings.groups(FIRST, side).values() for s in some]) for side in CONTEXTS}
    out: dict[Key, Series] = {}
    for key, series in measured.series.items():
        if key.what in VERIFYING:
            verified, before = key.counts
            # The rounds before count as the line says, not as they took: a slow moment of the machine is no cost of theirs.
            base, more = rounds[VERIFYING[key.what], key.of]
            lost, alike = base + more * before / FINE, Key(key.what, key.of, (verified,))
            if key.what == VERIFY:
                made = _scaled(series, share, lost)
            else:  # as after its like, however long: the other parts of a tree's round need then bear nothing
                after = min(base + more * verified, most[key.of])
                # The first draft step is priced as that of a chain, which bears its share already.
                borne = first[key.of] / (1.0 - share) if verified else 0.0
                made = _moved(series, share * (after - min(lost, most[key.of]) - borne))
            # One series a size, after whatever rounds; repetition stays with repetition.
            out[alike] = tuple(a + b for a, b in zip(out[alike], made, strict=True)) if alike in out else made
        elif key.what == PLAIN:
            # A plain round comes after its like, so the one before took as long as itself.
            alone = [timings.groups(what, key.of).get((), ()) for what in (PLAIN, PLAIN_OUTSIDE)]
            out[key] = _scaled(series, share, sum(map(typical, alone)))
        elif key.what not in VERIFYING.values():  # `estimate` knows no whole rounds
            out[key] = _scaled(series, share, 0.0) if key.what in PARTS else series
    return Measurements(out), share


def _scaled(series: Series, share: float, before: float) -> Series:
    """Return (timing - share x before) / (1 - share) of each timing, in nanoseconds; `before` in seconds."""
    less = share * before / NS
    return tuple(tuple(round(max(ns - less, LEAST * ns) / (1.0 - share)) for ns in repetition) for repetition in series)


def _moved(series: Series, seconds: float) -> Series:
    """Return each timing, in nanoseconds, and so many seconds more."""
    more = seconds / NS
    return tuple(tuple(round(max(ns + more, LEAST * ns)) for ns in repetition) for repetition in series)


def _longest_chain(timings: Timings, of: tuple[float, float], side: str) -> float:
    """Return the seconds of the longest round of a chain that was timed, by the line of these rounds."""
    base, more = of
    return base + more * max((verified for (verified,) in timings.groups(ROUND, side)), default=0)


def _round_line(timings: Timings, what: str, side: str) -> tuple[float, float]:
    """Return the seconds of a round that verifies nothing, and of each token more."""
    groups = timings.groups(what, side)
    base, more = line([((1, verified), seconds) for (verified,), seconds in groups.items()]) if groups else (0.0, 0.0)
    return base, more


def _share(timings: Timings, rounds: Mapping[tuple[str, str], tuple[float, float]]) -> float:
    """Return b: by which share of the seconds of the rounds before it a verification is longer, at least 0.

    Chains tell it: their script turns through all lengths, where random trees are much alike over some rounds.
    """
    shared, spread = 0.0, 0.0
    for side in CONTEXTS:
        by_size: dict[int, list[tuple[int, Seconds]]] = defaultdict(list)
        for (verified, before), seconds in timings.groups(VERIFY, side).items():
            by_size[verified].append((before, seconds))
        for parts in by_size.values():
            seconds = np.concatenate([some for _, some in parts])
            counts = np.repeat([count / FINE for count, _ in parts], [some.size for _, some in parts])
            # Least squares within sizes: seconds of the rounds before, centred by size, so that a size's own cost drops out.
            off = rounds[ROUND, side][1] * (counts - counts.mean())
            # Stalls are cut, as by `typical`: one of them would tilt the line.
            shared += float(off @ np.minimum(seconds, STALL * np.median(seconds)))
            spread += float(off @ off)
    return min(max(shared / spread, 0.0), MOST_CARRIED) if spread else 0.0
