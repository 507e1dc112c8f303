"""Policy iteration: heads are fitted on the rounds that the policy with these heads plays, until those settle.

Policies skip easy runs, so the anchors they visit are harder than the average one, and HISTORY features tell of the policy's
own play (METHODS D5). Each fit changes both. The loop goes round until the visits stay where they are, or the held-out rate
stops rising; the best round by held-out replay wins, the last one need not be it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

MOST_ROUNDS = 4
SETTLED = 0.02
"""Share of the visits that may still move: below it another fit would see the same rounds."""

GAIN = 1e-3
"""Relative rise of the held-out rate that one more round must have brought for another to be tried."""

S = TypeVar("S")
P = TypeVar("P")


@dataclass(frozen=True)
class Turn(Generic[S, P]):
    """One fit.

    Attributes:
        made: what was fitted.
        rate: tokens per second on held-out prompts.
        visits: [N] how often it visits each anchor of the training traces.
        state: what the next fit starts from.
    """

    made: P
    rate: float
    visits: Tensor
    state: S


@dataclass(frozen=True)
class Settled(Generic[P]):
    """The end of the loop.

    Attributes:
        made: what was fitted in the best round.
        best: the number of that round, from 0.
        rates: held-out tokens per second, round by round.
        moved: share of the visits that moved, against the round before; the first is against the start.
    """

    made: P
    best: int
    rates: tuple[float, ...]
    moved: tuple[float, ...]


def iterate(fit: Callable[[S, int], Turn[S, P]], start: S, visits: Tensor, rounds: int = MOST_ROUNDS) -> Settled[P]:
    """Fit until the visits settle.

    Args:
        fit: (state, number of the round) -> what came of it.
        start: state of the first fit, such as the rounds of a fixed length.
        visits: [N] of the start.
        rounds: most of them.
    """
    state, turns, moved = start, [], []
    for number in range(max(rounds, 1)):
        turn = fit(state, number)
        turns.append(turn)
        moved.append(distance(visits, turn.visits))
        state, visits = turn.state, turn.visits
        rates = [t.rate for t in turns]
        # Two fits in a row without a gain: a single one may fall back while the visits still move.
        stalled = number >= 2 and max(rates[-2:]) < (1.0 + GAIN) * max(rates[:-2])
        if moved[-1] < SETTLED or stalled:
            break
    best = rates.index(max(rates))
    return Settled(turns[best].made, best, tuple(rates), tuple(moved))


def distance(one: Tensor, other: Tensor) -> float:
    """Return the total variation between two distributions of visits over the same anchors: 0 the same, 1 none shared."""
    a, b = (v.double() / v.double().sum().clamp_min(1.0) for v in (one, other))
    return float(0.5 * (a - b).abs().sum())
