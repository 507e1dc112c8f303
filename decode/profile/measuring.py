"""Time several cases in alternation until their timings agree or the budget is used up.

The speed of a shared machine changes within seconds, and not equally for all programs. Therefore cases that are compared are
timed in alternation, one repetition of each after the other. Cases whose timings agree are not repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...policies.arguments import check_limits
from ...policies.display import Progress, silent
from ...policies.measurements import Key, Measurements, measure_noise, merge_repetitions

Seconds = Mapping[Key, Sequence[float]]
"""Timings of one repetition, by key."""

Case = Callable[[int], Seconds]
"""Returns timings; called with the number of the repetition. Number 0 is the warm-up, whose timings are discarded."""

Clock = Callable[[], float]

BUDGET_S = 90.0
MIN_QUIET = 10
"""Minimum number of repetitions after which a case whose timings agree is complete."""

JUDGED_EACH = 20
"""Number of repetitions up to which the noise is estimated after each one. The estimate takes longer the more there are."""

MIN_REPETITIONS = 3
"""Minimum number of repetitions, regardless of the budget."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        budget_s: seconds. After `MIN_REPETITIONS`, no repetition starts that would exceed them.
        quiet_after: minimum number of repetitions after which a case whose timings agree is complete.
        repetitions: exact number of repetitions; None = depends on noise and budget.
    """

    budget_s: float = BUDGET_S
    quiet_after: int = MIN_QUIET
    repetitions: int | None = None

    def __post_init__(self) -> None:
        check_limits(budget=self.budget_s, repeats=self.repetitions)

    def is_enough(self, timed: Sequence[Seconds]) -> bool:
        """Whether a case is complete, regardless of the budget."""
        if self.repetitions is not None:
            return len(timed) >= self.repetitions
        if len(timed) < self.quiet_after or len(timed) % (1 + len(timed) // JUDGED_EACH):
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
    """Return all timings of cases, see `measure_each`; the cases time different things."""
    return merge_cases(measure_each(cases, effort, clock=clock, progress=progress).values())


def merge_cases(timed: Iterable[Sequence[Seconds]]) -> Measurements:
    """Return the measurements of the repetitions of several cases."""
    merged = [merge_repetitions(parts).series for parts in timed]
    return Measurements({key: series for one in merged for key, series in one.items()})


def measure_each(
    cases: Mapping[str, Case],
    effort: Effort | None = None,
    *,
    clock: Clock = time.perf_counter,
    progress: Progress = silent,
) -> dict[str, list[Seconds]]:
    """Time cases in alternation. The first case changes from repetition to repetition.

    Args:
        cases: cases by name. Timings that are compared directly should belong to one case.
        effort: how long to measure.
        clock: returns seconds, for the budget.
        progress: see `Progress`; the total grows if the machine is noisy.

    Returns:
        The timings of each repetition by case, except those of the warm-up.
    """
    effort, begin, done, number = effort or Effort(), clock(), 0, 0
    planned = (1 + (effort.repetitions or effort.quiet_after)) * len(cases)  # includes the warm-up
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
    return timed
