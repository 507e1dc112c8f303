"""Measuring in turns: who is called when, when it ends, and machines whose clock strays."""

from __future__ import annotations

from collections import Counter

import pytest
import simulated_machines as machines
from specstop.decode.profile.measuring import MIN_QUIET, MIN_REPETITIONS, Case, Effort, Seconds, measure
from specstop.policies.measurements import Key

SEED, BUDGET_S = 5, 15.0


class Calls:
    """Cases on a clock that they move: each takes what its list says, repetition by repetition, the last one for ever."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, [("", 0)][:0]

    def clock(self) -> float:
        return self.now

    def case(self, name: str, *seconds: float) -> Case:
        def call(number: int) -> Seconds:
            self.calls.append((name, number))
            taken = seconds[min(number, len(seconds) - 1)]
            self.now += 5 * taken
            return {Key("call", name): [taken] * 5}

        return call


def test_cases_take_turns_and_the_order_turns_too() -> None:
    made = Calls()
    cases = {name: made.case(name, 9.0, 1.0) for name in "abc"}
    found = measure(cases, Effort(repetitions=3), clock=made.clock)
    assert "".join(name for name, _ in made.calls) == "abc" + "bca" + "cab" + "abc"
    assert [number for _, number in made.calls] == [number for number in range(4) for _ in "abc"]
    assert found.series == {Key("call", name): ((10**9,) * 5,) * 3 for name in "abc"}, "warming up is not measured"


def test_a_quiet_machine_is_measured_no_more_often_than_needed() -> None:
    made = Calls()
    found = measure({"a": made.case("a", 1.0)}, Effort(1e6), clock=made.clock)
    assert len(found.series[Key("call", "a")]) == MIN_QUIET


def test_what_is_noisy_is_timed_again_while_the_rest_rests() -> None:
    made = Calls()
    cases = {"quiet": made.case("quiet", 0.01), "noisy": made.case("noisy", *([0.01] * 5 + [0.02] * 5))}
    measure(cases, Effort(60.0), clock=made.clock)
    times = Counter(name for name, _ in made.calls)
    assert times["quiet"] == MIN_QUIET + 1 < 10 * MIN_QUIET < times["noisy"]
    assert 59.0 < made.now <= 60.0


def test_the_budget_ends_it_before_it_is_exceeded() -> None:
    made, seen = Calls(), []
    measure({"a": made.case("a", 1.0, 1.0, 2.0)}, Effort(47.0), clock=made.clock, progress=lambda *c: seen.append(c))
    assert seen[-1] == ("profile", 5, 5) and seen[:5] == [("profile", done, 11) for done in range(5)]
    assert made.now == 5 * (1 + 1 + 2 + 2 + 2) <= 47.0 < made.now + 5 * 2


def test_a_machine_slower_than_the_budget_is_measured_a_few_times() -> None:
    made = Calls()
    found = measure({"a": made.case("a", 100.0)}, Effort(1.0), clock=made.clock)
    assert len(found.series[Key("call", "a")]) == MIN_REPETITIONS


def test_repetitions_that_were_asked_for_are_made_however_noisy_and_long() -> None:
    made, seen = Calls(), []
    cases = {"a": made.case("a", 1.0, 9.0, 1.0, 9.0, 1.0)}
    found = measure(cases, Effort(1.0, repetitions=5), clock=made.clock, progress=lambda *call: seen.append(call))
    assert [ns[0] for ns in found.series[Key("call", "a")]] == [9 * 10**9, 10**9, 9 * 10**9, 10**9, 10**9]
    assert seen == [("profile", done, 6) for done in range(7)], "with the warm-up"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("half the time a fifth slower, 6 s", "the slowest repetition took"),
        ("one slow second", "the slowest repetition took"),
        ("stalls of 40 ms", "stalls took"),
        ("time slices of another process", "stalls took"),
        ("jitter of a third", "between their quartiles"),
        ("slower by a third in 10 s", "it grew slower by"),
        ("faster by a quarter in 10 s", "it grew faster by"),
    ],
)
def test_a_clock_that_strays_is_warned_of(kind: str, reason: str) -> None:
    noise, _ = machines.profiled(machines.NOISY[kind], SEED, BUDGET_S)
    assert noise.is_noisy and reason in noise.text
    assert noise.text.startswith("this machine was busy: ")
    assert noise.text.endswith("; close other programs and measure again, or raise --budget")


@pytest.mark.parametrize("kind", ["steady", "much jitter", "fast machine", "jitter, hiccups and wandering"])
def test_a_quiet_clock_is_not(kind: str) -> None:
    noise, seconds = machines.profiled(machines.QUIET[kind], SEED, BUDGET_S)
    assert not noise.is_noisy and noise.repetitions == MIN_QUIET and seconds < 10.0
    assert noise.text.startswith("this machine was quiet: ")


def test_a_noisy_phase_that_passes_leaves_the_right_costs_behind() -> None:
    """One second three times as slow: measuring goes on, it weighs little, and the costs are nearly those without it."""
    tables = []
    for kind in (machines.NOISY["one slow second"], machines.Disturbance()):
        machine = machines.Machine(kind, SEED)
        found = measure({"chains": machine.texts}, Effort(60.0), clock=machine.clock)
        tables.append(machines.profile(found).low.verify_s)
    for with_phase, without in zip(*tables, strict=True):
        assert with_phase / without == pytest.approx(1.0, rel=0.05)
