"""How noisy timings are: figures of made-up series, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from specstop.policies.measurements import REMEDY, Key, Measurements, Noise, collected, judge

MS = 1e-3


def noise(repetitions: Sequence[Sequence[float]], what: str = "verify", **more: Sequence[Sequence[float]]) -> Noise:
    """Return the figures of a verification of 4 tokens timed so often, in milliseconds, and of other series."""
    texts = [{Key(what, "short", (4,)): [MS * t for t in times]} for times in repetitions]
    for name, others in more.items():
        for text, times in zip(texts, others, strict=True):
            text[Key(name, "short", (0,))] = [MS * t for t in times]
    found = judge(collected(texts))
    assert found is not None
    return found


def test_timings_that_agree_are_quiet() -> None:
    found = noise([[5.0] * 4] * 6)
    assert (found.spread, found.stalls, found.phases) == (0.0, 0.0, 0.0)
    assert found.drift == pytest.approx(0.0, abs=1e-12)
    assert (found.block, found.reasons, found.is_noisy) == (1, [], False)
    assert "quiet" in found.text
    assert found.to_dict()["machine"] == "quiet"


def test_the_spread_is_between_quartiles_and_weighs_by_seconds() -> None:
    assert noise([[4.0, 5.0, 6.0, 7.0, 8.0]]).spread == pytest.approx(2.0 / 6.0)
    both = noise([[4.0, 5.0, 6.0, 7.0, 8.0]], outside=[[1.0] * 10])
    assert both.spread == pytest.approx((30 * 2.0 / 6.0 + 0.0) / 40)


def test_stalls_are_what_is_beyond_twice_the_median() -> None:
    found = noise([[5.0] * 9 + [30.0]])
    assert found.stalls == pytest.approx((30.0 - 10.0) / 75.0)
    assert found.reasons == ["stalls took 27% of the time"]
    assert "busy" in found.text and found.text.endswith(REMEDY)
    assert found.to_dict()["machine"] == "busy"


def test_a_stall_makes_no_phase() -> None:
    """A second of it is one timing, which counts as twice the usual."""
    found = noise([[5.0] * 10] * 10 + [[5.0] * 9 + [1000.0]])
    assert found.phases == pytest.approx(0.1)


def test_slow_repetitions_are_a_phase() -> None:
    found = noise([[5.0] * 4] * 8 + [[6.0] * 4] * 4)
    assert found.phases == pytest.approx(0.2)
    assert "the slowest repetition took 1.20 times as long as the fastest" in found.reasons


@pytest.mark.parametrize(("sign", "word"), [(1, "slower"), (-1, "faster")])
def test_a_drift_is_the_rise_of_a_line(sign: int, word: str) -> None:
    found = noise([[5.0 * (1 + sign * 0.02 * (at - 5))] * 3 for at in range(11)])
    assert found.drift == pytest.approx(sign * 0.2)
    assert f"it grew {word} by 20% while measuring" in found.reasons


def test_the_pace_takes_things_of_any_length_together() -> None:
    """What is timed in a repetition differs; what it takes beside its own median does not."""
    found = noise([[5.0] * 4, [5.0] * 9, [5.0]], outside=[[], [0.1], [0.1] * 7])
    assert found.phases == pytest.approx(0.0) and found.repetitions == 3


def test_too_few_timings_tell_nothing() -> None:
    assert judge(Measurements()) is None
    assert judge(collected([{Key("verify", "short", (1,)): [1.0, 2.0, 3.0]}])) is None
    assert judge(collected([{Key("verify", "short", (1,)): [0.0] * 9}])) is None
