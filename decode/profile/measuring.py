"""Timing several things in turns until the machine is quiet or the budget is spent.

A shared machine changes its pace within seconds, and not equally for all programs. So what will be compared is timed in
turns, one repetition of all of it after the other. Quiet cases rest, noisy ones are timed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...policies.arguments import check_limits
from ...policies.display import Progress, silent
from ...policies.measurements import Key, Measurements, measure_noise, merge_repetitions

Seconds = Mapping[Key, Sequence[float]]
"""Timings of one repetition, by what was timed."""

Case = Callable[[int], Seconds]
"""Times something; called with the number of the repetition. Number 0 warms up, and its timings are dropped."""

Clock = Callable[[], float]

BUDGET_S = 90.0
MIN_QUIET = 10
"""Repetitions that suffice if they agree."""

JUDGED_EACH = 20
"""Repetitions from which on not each is followed by a judgement, which takes longer the more there are."""

MIN_REPETITIONS = 3
"""Minimum number of repetitions, independent of the time they take."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        budget_s: after `MIN_REPETITIONS`, no repetition begins that would end later.
        fewest: repetitions from which on a quiet case rests.
        repetitions: exact number, regardless of noise and budget; None = as they require.
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
        if len(timed) < self.fewest or len(timed) % (1 + len(timed) // JUDGED_EACH):
            return False
        noise = measure_noise(merge_repetitions(timed))
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
        cases: by name; what must be compared within the same moments belongs into one case.
        effort: how long.
        clock: seconds, for the budget.
        progress: see `Progress`; the total grows if the machine is noisy.

    Returns:
        All timings of all cases, without those of the warm-up.
    """
    effort, begin, done, number = effort or Effort(), clock(), 0, 0
    planned = (1 + (effort.repetitions or effort.fewest)) * len(cases)  # with the warm-up, which may take minutes too
    timed: dict[str, list[Seconds]] = {name: [] for name in cases}
    progress("profile", done, planned)
    turns = list(cases)
    while turns:
        last = clock()
        for at in range(len(turns)):
            name = turns[(at + number) % len(turns)]
            seconds = cases[name](number)
            if number:
                timed[name].append(seconds)
            done += 1
            progress("profile", done, planned)
        number, turns = number + 1, [name for name in cases if not effort.is_enough(timed[name])]
        if effort.repetitions is None:
            planned = max(planned, done + len(turns))
            # The next repetition is assumed to last as long as this one.
            if number > MIN_REPETITIONS and 2 * clock() - last > begin + effort.budget_s:
                break
    if effort.repetitions is None:
        progress("profile", done, done)
    return Measurements(
        {key: series for parts in timed.values() for key, series in merge_repetitions(parts).series.items()}
    )
