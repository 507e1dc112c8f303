"""Anything timed in turns, until it is quiet or the time is up: the one piece of code that measures a machine.

A shared machine changes its pace within seconds, and not equally for all that runs on it. So everything that will be compared
is timed in turns, one repetition of all of it after the other, and how far the repetitions differ says when to stop: what
is quiet rests, what is noisy is timed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...policies.display import Progress, silent
from ...policies.latency.measurements import Key, Measurements, collected
from ...policies.latency.noise import judge
from ...policies.limits import check_limits

Seconds = Mapping[Key, Sequence[float]]
"""Timings of one repetition, by what was timed."""

Case = Callable[[int], Seconds]
"""Something to time: called with the number of the repetition; 0 warms up, and its timings are dropped."""

Clock = Callable[[], float]

BUDGET_S = 90.0
FEWEST = 10
"""Repetitions from which on timings that agree are enough."""

JUDGED = 20
"""Repetitions from which on not each is followed by a judgement: it takes the longer the more there are."""

LEAST = 3
"""Repetitions that are made however long they take."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        budget_s: no repetition is begun that would end later, after the first `LEAST`.
        fewest: repetitions from which on a quiet case rests.
        repetitions: exactly so many, however noisy and however long; None = as the noise and the budget say.
    """

    budget_s: float = BUDGET_S
    fewest: int = FEWEST
    repetitions: int | None = None

    def __post_init__(self) -> None:
        check_limits(budget=self.budget_s, repeats=self.repetitions)

    def is_enough(self, timed: Sequence[Seconds]) -> bool:
        """Whether a case has been timed often enough; the budget is another matter."""
        if self.repetitions is not None:
            return len(timed) >= self.repetitions
        # After every repetition up to `JUDGED`, after every second one up to twice that, and so on.
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
        cases: by name; what has to be compared in the same moments belongs into one case.
        effort: how long.
        clock: seconds; what the budget is counted by.
        progress: see `Progress`; cases timed, whose total grows where the machine is noisy.

    Returns:
        All timings of all cases, without those of the warm-up.
    """
    effort, names = effort or Effort(), list(cases)
    fewest = effort.fewest if effort.repetitions is None else effort.repetitions
    started = clock()
    done, number, least = 0, 0, (1 + fewest) * len(names)  # the warm-up counts: it may take minutes too
    progress("profile", done, least)
    for name in names:
        cases[name](0)
        done += 1
        progress("profile", done, least)
    timed: dict[str, list[Seconds]] = {name: [] for name in names}
    while noisy := [name for name in names if not effort.is_enough(timed[name])]:
        number, begun, total = number + 1, clock(), least
        if effort.repetitions is None:  # how many there will be is not known while the noise decides
            total = max(least, done + len(noisy) + 1)
        for turn in range(len(noisy)):
            name = noisy[(turn + number) % len(noisy)]
            timed[name].append(cases[name](number))
            done += 1
            progress("profile", done, total)
        now = clock()
        # The next repetition is taken to last as long as this one.
        if effort.repetitions is None and number >= LEAST and now + (now - begun) > started + effort.budget_s:
            break
    if effort.repetitions is None:
        progress("profile", done, done)
    merged = Measurements()
    for repetitions in timed.values():
        merged = merged.with_series(collected(repetitions))
    return merged
