"""Profiles from timings: estimated costs, bootstrap draws of whole repetitions, and how noisy the machine was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import specstop.policies.measurements as m
from specstop.policies.measurements import Key, Noise, measure_noise, merge_repetitions
from specstop.policies.profile import Profile

DEPTH = 3
EXACT = 1e-6


def measured(pace: Callable[[int], float] = lambda r: 1.0, repetitions: int = 12, jitter: float = 0.0) -> Profile:
    """Return the profile of a machine that is `pace` times as slow in each repetition; a verification is 4, 5, ... ms."""
    rng = np.random.default_rng(0)
    costs: dict[Key, float] = {Key(m.DECISIONS, "confidence", (1,)): 6e-5, Key(m.DECISIONS, "confidence", (3,)): 1.4e-4}
    for side in m.CONTEXTS:
        costs |= {Key(m.PREFILL, side, (12 if side == "short" else 48,)): 6e-3, Key(m.PLAIN, side): 4e-3}
        costs |= {Key(m.FIRST, side, (1,)): 1e-3, Key(m.FIRST, side, (2,)): 1.1e-3}
        costs |= {Key(m.VERIFY, side, (n,)): (4 + n) * 1e-3 for n in range(DEPTH + 1)}
        costs |= {Key(m.OUTSIDE, side, (n,)): 2e-4 + 1e-5 * n for n in range(DEPTH + 1)}
        costs |= {Key(m.LATER, side, (n,)): (n - 1) * 1e-3 for n in range(2, DEPTH + 1)}
    texts = []
    for repetition in range(repetitions):
        scale = {key: pace(repetition) * (1.0 + jitter * rng.standard_normal(5)) for key in costs}
        texts.append({key: (s * scale[key]).tolist() for key, s in costs.items()})
    return Profile.measured(merge_repetitions(texts), (20.0, 60.0), DEPTH, 0.7, {"device": "none"})


def draws(profile: Profile, count: int) -> list[Profile]:
    return [profile.resampled(np.random.default_rng(seed)) for seed in range(count)]


def test_the_costs_are_the_timed_ones_and_draws_without_noise_equal_them() -> None:
    profile = measured()
    (draw,) = draws(profile, 1)
    for one in (profile, draw):
        assert one.low.verify_s == one.high.verify_s == pytest.approx([4e-3, 5e-3, 6e-3, 7e-3], rel=EXACT)
        assert (one.low.draft_s, one.low.later_draft_s) == (pytest.approx((1e-3, 1.1e-3)), pytest.approx(1e-3))
        assert (one.step_s, one.round_s) == pytest.approx((1e-5, 2e-4), rel=1e-4)
        assert one.prefill_seconds(np.array([30])) == pytest.approx(6e-3)
        assert one.decision("confidence") == pytest.approx((6e-5 + 1.4e-4) / 4, rel=EXACT)
    assert not draw.measurements and draw.resampled(np.random.default_rng(1)) is draw


def test_a_first_draft_step_that_reads_several_tokens_has_no_price_of_a_later_step() -> None:
    """A drafter that reads the text again never has one token to read, and its later steps may read nothing."""
    timed: dict[Key, list[float]] = {}
    for side in m.CONTEXTS:
        timed |= {Key(m.PLAIN, side): [4e-3], Key(m.VERIFY, side, (1,)): [5e-3], Key(m.LATER, side, (2,)): [2e-4]}
        timed |= {Key(m.FIRST, side, (2,)): [6e-3], Key(m.FIRST, side, (3,)): [6.1e-3]}
    low = Profile.measured(merge_repetitions([timed]), (20.0, 60.0), 2, 0.7).low
    assert (*low.draft_s, low.later_s) == pytest.approx((6e-3, 6e-3, 2e-4), rel=EXACT)


def test_a_slow_repetition_is_slow_for_all_costs_of_a_draw() -> None:
    """Every third repetition takes twice as long: the costs of a draw vary, their ratios do not."""
    profile = measured(lambda repetition: 1.0 + (repetition % 3 == 0))
    plain = np.array([draw.low.verify_s[0] for draw in draws(profile, 30)])
    assert plain.std() / plain.mean() > 0.05
    for draw in draws(profile, 30):
        share = draw.low.verify_s[0] / profile.low.verify_s[0]
        assert draw.high.verify_s == pytest.approx([share * s for s in profile.high.verify_s], rel=1e-4)
        assert draw.round_s == pytest.approx(share * profile.round_s, rel=1e-3)
        assert draw.decision("confidence") == pytest.approx(share * profile.decision("confidence"), rel=1e-3)


@pytest.mark.parametrize("repetitions", [6, 12])
def test_costs_of_draws_scatter_as_students_t(repetitions: int) -> None:
    """Variance of a mean of n repetitions, from themselves: (n - 1) / (n - 3) times s^2 / n."""
    noise = np.random.default_rng(3).standard_normal(repetitions)
    profile = measured(lambda repetition: 1.0 + 0.05 * float(noise[repetition]), repetitions)
    values = [draw.low.verify_s[2] for draw in draws(profile, 300)]
    expected = 0.05 * noise.std(ddof=1) / repetitions**0.5 * ((repetitions - 1) / (repetitions - 3)) ** 0.5
    assert np.std(values) / profile.low.verify_s[2] == pytest.approx(expected, rel=0.15)


def test_a_phase_of_several_repetitions_is_drawn_in_one_piece() -> None:
    """Slow for 5 repetitions of 10: draws of single repetitions would treat the phases as luck that evens out."""
    slow, mixed = (measured(lambda r, n=n: 1.0 + (r % (2 * n) < n), 40) for n in (5, 1))  # type: ignore[misc]
    assert slow.noise is not None and slow.noise.block >= 3
    assert mixed.noise is not None and mixed.noise.block == 1
    scatter = [np.std([draw.low.verify_s[0] for draw in draws(p, 80)]) for p in (slow, mixed)]
    assert scatter[0] > 1.4 * scatter[1]


def test_only_measured_costs_are_drawn(profile: Profile) -> None:
    """Costs that were edited stay; the decisions of the same profile are drawn."""
    rng = np.random.default_rng
    assert profile.resampled(rng(0)) is profile and profile.noise is None
    whole = measured(jitter=0.1)
    first, again, other = (whole.resampled(rng(seed)).to_dict() for seed in (1, 1, 2))
    assert first == again != other
    edited = dataclasses.replace(whole, low=dataclasses.replace(whole.low, verify_s=(1.0, 2.0, 3.0, 4.0)))
    draw = edited.resampled(rng(0))
    assert draw.same_costs(edited.to_dict()) and edited.noise is None
    assert draw.decision("confidence") != edited.decision("confidence")
    priced = whole.with_decisions({"confidence": 1e-4, "mine": 2e-4})
    draw = priced.resampled(rng(0))
    assert draw.decision_s == priced.decision_s and not draw.same_costs(priced.to_dict())


def test_measured_decisions_are_priced_stored_and_drawn(profile: Profile) -> None:
    timed = merge_repetitions([{Key(m.DECISIONS, "mine", (2,)): [1e-4 * (at + 1)] * 3} for at in range(8)])
    more = profile.with_measured_decisions(timed)
    assert more.decision("mine") == pytest.approx(0.5e-4 * 4.5)
    assert more.measurements == timed and more.same_costs(profile.to_dict())
    assert len({draw.decision("mine") for draw in draws(more, 20)}) > 5
    again = more.with_measured_decisions(merge_repetitions([{Key(m.DECISIONS, "mine", (2,)): [1e-3]}]))
    assert again.decision("mine") == pytest.approx(0.5e-3) and len(again.measurements.series) == 1


# Noise


def noise(repetitions: Sequence[Sequence[float]], outside: Sequence[Sequence[float]] = ()) -> Noise:
    """Return the noise of a verification, and of the time outside models, timed in milliseconds by repetition."""
    texts = [{Key(m.VERIFY, "short", (4,)): [1e-3 * t for t in times]} for times in repetitions]
    for text, times in zip(texts, outside, strict=False):
        text[Key(m.OUTSIDE, "short", (0,))] = [1e-3 * t for t in times]
    result = measure_noise(merge_repetitions(texts))
    assert result is not None
    return result


def test_timings_that_agree_are_quiet() -> None:
    """Also if the repetitions timed different numbers of calls."""
    for quiet in (noise([[5.0] * 4] * 6), noise([[5.0] * 4, [5.0] * 9, [5.0]], [[], [0.1], [0.1] * 7])):
        assert (quiet.spread, quiet.stalls) == (0.0, 0.0) and quiet.phases == pytest.approx(0.0)
        assert quiet.drift == pytest.approx(0.0, abs=1e-12)
        assert (quiet.block, quiet.reasons, quiet.is_noisy, quiet.to_dict()["machine"]) == (1, [], False, "quiet")


def test_each_kind_of_noise_has_its_closed_form() -> None:
    times = [4.0, 5.0, 6.0, 7.0, 8.0]
    assert noise([times]).spread == pytest.approx(2.0 / 6.0), "between quartiles"
    assert noise([times], [[1.0] * 10]).spread == pytest.approx(30 * 2.0 / 6.0 / 40), "weighted by seconds"
    stalled = noise([[5.0] * 9 + [30.0]])
    assert stalled.stalls == pytest.approx((30.0 - 10.0) / 75.0), "beyond twice the median"
    assert "27%" in stalled.reasons[0] and stalled.to_dict()["machine"] == "busy"
    assert noise([[5.0] * 10] * 10 + [[5.0] * 9 + [1000.0]]).phases == pytest.approx(0.1), "a stall is no phase"
    assert noise([[5.0] * 4] * 8 + [[6.0] * 4] * 4).phases == pytest.approx(0.2)
    for sign, word in ((1, "slower"), (-1, "faster")):
        drifting = noise([[5.0 * (1 + sign * 0.02 * (at - 5))] * 3 for at in range(11)])
        assert drifting.drift == pytest.approx(sign * 0.2), "the rise of a line"
        assert any(word in reason and "20%" in reason for reason in drifting.reasons)


def test_few_timings_have_no_noise() -> None:
    assert measure_noise(m.Measurements()) is None
    for times in ([1.0, 2.0, 3.0], [0.0] * 9):
        assert measure_noise(merge_repetitions([{Key(m.VERIFY, "short", (1,)): times}])) is None
