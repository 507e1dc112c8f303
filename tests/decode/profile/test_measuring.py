"""Measuring in turns: the order of the calls, the end, and clocks of noisy machines."""

from __future__ import annotations

from collections import Counter

import pytest
import simulated_machines as machines
from specstop.decode.profile.measuring import MIN_QUIET, MIN_REPETITIONS, Case, Effort, Seconds, measure
from specstop.policies.measurements import Key

SEED, BUDGET_S = 5, 15.0


class Calls:
    """Cases that advance a clock by the seconds in a list, by repetition; the last entry holds for later ones too."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[tuple[str, int]]()

    def case(self, name: str, *seconds: float) -> Case:
        def call(number: int) -> Seconds:
            self.calls.append((name, number))
            duration = seconds[min(number, len(seconds) - 1)]
            self.now += 5 * duration
            return {Key("call", name): [duration] * 5}

        return call

    def series(self, effort: Effort, *seconds: float) -> list[int]:
        """Return the nanoseconds of a single case by repetition."""
        measured = measure({"a": self.case("a", *seconds)}, effort, clock=lambda: self.now)
        return [values[0] for values in measured.series[Key("call", "a")]]


def test_cases_take_turns_in_rotating_order() -> None:
    calls = Calls()
    cases = {name: calls.case(name, 9.0, 1.0) for name in "abc"}
    measured = measure(cases, Effort(repetitions=3), clock=lambda: calls.now)
    assert "".join(name for name, _ in calls.calls) == "abc" + "bca" + "cab" + "abc"
    assert [number for _, number in calls.calls] == [number for number in range(4) for _ in "abc"]
    assert measured.series == {Key("call", name): ((10**9,) * 5,) * 3 for name in "abc"}, "without the warm-up"


def test_noisy_cases_are_repeated_and_quiet_ones_rest() -> None:
    calls = Calls()
    cases = {"quiet": calls.case("quiet", 0.01), "noisy": calls.case("noisy", *([0.01] * 5 + [0.02] * 5))}
    measure(cases, Effort(60.0), clock=lambda: calls.now)
    times = Counter(name for name, _ in calls.calls)
    assert times["quiet"] == MIN_QUIET + 1 < 10 * MIN_QUIET < times["noisy"]
    assert 59.0 < calls.now <= 60.0


def test_the_number_of_repetitions_follows_noise_budget_and_request() -> None:
    assert len(Calls().series(Effort(1e6), 1.0)) == MIN_QUIET
    assert len(Calls().series(Effort(1.0), 100.0)) == MIN_REPETITIONS, "a machine slower than the budget"
    seconds = Calls().series(Effort(1.0, repetitions=5), 1.0, 9.0, 1.0, 9.0, 1.0)
    assert seconds == [s * 10**9 for s in (9, 1, 9, 1, 1)]
    calls = Calls()
    calls.series(Effort(47.0), 1.0, 1.0, 2.0)
    assert calls.now == 5 * (1 + 1 + 2 + 2 + 2) <= 47.0 < calls.now + 5 * 2, "ends before the budget is exceeded"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("half the time a fifth slower, 6 s", "slowest repetition"), ("one slow second", "slowest repetition"),
        ("time slices of another process", "stalls"), ("jitter of a third", "quartiles"),
        ("slower by a third in 10 s", "slower"), ("faster by a quarter in 10 s", "faster"),
        *((kind, "") for kind in ("much jitter", "fast machine", "jitter, hiccups and wandering")),
    ],
)  # fmt: skip
def test_a_noisy_machine_is_reported_with_the_reason_and_a_quiet_one_is_not(kind: str, reason: str) -> None:
    noise, seconds = machines.profiled({**machines.NOISY, **machines.QUIET}[kind], SEED, BUDGET_S)
    assert noise.is_noisy == bool(reason) and reason in noise.text
    assert ("busy" if reason else "quiet") in noise.text
    if not reason:
        assert noise.repetitions == MIN_QUIET and seconds < 10.0
