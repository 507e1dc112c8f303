"""Timing several things in turns until the machine is quiet or the budget is spent.

A shared machine changes its pace within seconds, and not equally for all that runs on it. So what will be compared is timed
in turns, one repetition of all of it after the other. What is quiet rests, what is noisy is timed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...policies.display import Progress, silent
from ...policies.limits import check_limits
from ...policies.measurements import Key, Measurements, collected, judge

Seconds = Mapping[Key, Sequence[float]]
"""Timings of one repetition, by what was timed."""

Case = Callable[[int], Seconds]
"""Something to time, called with the number of the repetition; 0 warms up, and its timings are dropped."""

Clock = Callable[[], float]

BUDGET_S = 90.0
MIN_QUIET = 10
"""Repetitions from which on timings that agree are enough."""

JUDGED = 20
"""Repetitions from which on not each is followed by a judgement, which takes longer the more there are."""

MIN_REPETITIONS = 3
"""Repetitions that are made however long they take."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        budget_s: no repetition begins that would end later, after the first `MIN_REPETITIONS`.
        fewest: repetitions from which on a quiet case rests.
        repetitions: exactly so many, however noisy and long; None = as noise and budget say.
    """

    budget_s: float = BUDGET_S
    fewest: int = MIN_QUIET
    repetitions: int | None = None

    def __post_init__(self) -> None:
        check_limits(budget=self.budget_s, repeats=self.repetitions)

    def is_enough(self, timed: Sequence[Seconds]) -> bool:
        """Whether a case has been timed often enough, the budget aside."""
        if self.repetitions is not None:
            return len(timed) >= self.repetitions
        if len(timed) < self.fewest or len(timed) % (1 + len(timed) // JUDGED):
            return False
        noise = judge(collected(timed))
        return noise is None or not noise.is_noisy


def measure(
    cases: Mapping[str, Case],
    effort: Effort | None = None,
    *,
    clock: Clock = time.perf_counter,
    progress: Progress = silent,
) -> Measurements:
    """Time every case in turns, the order of the turns changing from repetition to repetition.

    Args:
        cases: by name; what is compared within the same moments belongs into one case.
        effort: how long.
        clock: seconds, for the budget.
        progress: see `Progress`; the total grows where the machine is noisy.

    Returns:
        All timings of all cases, without those of the warm-up.
    """
    effort, names = effort or Effort(), list(cases)
    is_fixed, begun = effort.repetitions is not None, clock()
    least = (1 + (effort.repetitions or effort.fewest)) * len(names)  # with the warm-up, which may take minutes too
    done = number = 0
    progress("profile", done, least)
    for name in names:
        cases[name](0)
        done += 1
        progress("profile", done, least)
    timed: dict[str, list[Seconds]] = {name: [] for name in names}
    while noisy := [name for name in names if not effort.is_enough(timed[name])]:
        number, last = number + 1, clock()
        total = least if is_fixed else max(least, done + len(noisy) + 1)
        for turn in range(len(noisy)):
            name = noisy[(turn + number) % len(noisy)]
            timed[name].append(cases[name](number))
            done += 1
            progress("profile", done, total)
        # The next repetition is assumed to last as long as this one.
        if not is_fixed and number >= MIN_REPETITIONS and 2 * clock() - last > begun + effort.budget_s:
            break
    if not is_fixed:
        progress("profile", done, done)
    return Measurements({key: series for parts in timed.values() for key, series in collected(parts).series.items()})
