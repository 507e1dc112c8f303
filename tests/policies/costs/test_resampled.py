"""A profile drawn from its own measurements: estimated as the profile is, whole repetitions at a time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specstop.policies.errors import InputError
from specstop.policies.measurements import (
    CONTEXTS,
    DECISIONS,
    FIRST,
    LATER,
    OUTSIDE,
    PLAIN,
    PREFILL,
    VERIFY,
    Key,
    Measurements,
    collected,
)
from specstop.policies.profile import Profile

DEPTH, REPETITIONS = 3, 12
EXACT = 1e-6


def measured(pace: Callable[[int], float], repetitions: int = REPETITIONS, jitter: float = 0.0) -> Profile:
    """Return the profile of a machine that is `pace` times as slow in each repetition; a verification is 4, 5, ... ms."""
    rng = np.random.default_rng(0)
    texts = []
    for repetition in range(repetitions):

        def times(seconds: float, now: float = pace(repetition)) -> list[float]:
            return (seconds * now * (1.0 + jitter * rng.standard_normal(5))).tolist()

        text: dict[Key, list[float]] = {}
        for side in CONTEXTS:
            text[Key(PREFILL, side, (12 if side == "short" else 48,))] = times(6e-3)
            text[Key(PLAIN, side)] = times(4e-3)
            for n in range(DEPTH + 1):
                text[Key(VERIFY, side, (n,))] = times((4 + n) * 1e-3)
                text[Key(OUTSIDE, side, (n,))] = times(2e-4 + 1e-5 * n)
                text[Key(LATER, side, (n,))] = times((n - 1) * 1e-3)
            del text[Key(LATER, side, (0,))], text[Key(LATER, side, (1,))]
            text[Key(FIRST, side, (1,))] = times(1e-3)
            text[Key(FIRST, side, (2,))] = times(1.1e-3)
        text[Key(DECISIONS, "confidence", (1,))] = times(6e-5)
        text[Key(DECISIONS, "confidence", (3,))] = times(1.4e-4)
        texts.append(text)
    return Profile.measured(collected(texts), (20.0, 60.0), DEPTH, 0.7, {"device": "none"})


def steady(repetition: int) -> float:
    return 1.0


def test_the_costs_are_those_that_were_timed() -> None:
    profile = measured(steady)
    assert profile.low.verify_s == pytest.approx([4e-3, 5e-3, 6e-3, 7e-3], rel=EXACT)
    assert (profile.low.draft_s, profile.low.later_draft_s) == (pytest.approx((1e-3, 1.1e-3)), pytest.approx(1e-3))
    assert (profile.step_s, profile.round_s) == pytest.approx((1e-5, 2e-4), rel=1e-4)
    assert profile.decision("confidence") == pytest.approx((6e-5 + 1.4e-4) / 4, rel=EXACT)


def test_a_first_draft_step_that_always_reads_several_tokens_is_never_priced_as_a_later_one() -> None:
    """A drafter that reads all anew has never one token to read, and its later steps may read nothing."""
    timed: dict[Key, list[float]] = {}
    for side in CONTEXTS:
        timed |= {Key(PLAIN, side): [4e-3], Key(VERIFY, side, (1,)): [5e-3], Key(LATER, side, (2,)): [2e-4]}
        timed |= {Key(FIRST, side, (2,)): [6e-3], Key(FIRST, side, (3,)): [6.1e-3]}
    low = Profile.measured(collected([timed]), (20.0, 60.0), 2, 0.7).low
    assert low.draft_s == pytest.approx((6e-3, 6e-3), rel=EXACT)
    assert low.later_s == pytest.approx(2e-4, rel=EXACT)


def test_without_noise_every_draw_is_the_profile() -> None:
    profile = measured(steady)
    drawn = profile.resampled(np.random.default_rng(1))
    assert not drawn.measurements
    for side in ("low", "high"):
        mine, theirs = getattr(profile, side), getattr(drawn, side)
        assert theirs.verify_s == pytest.approx(mine.verify_s) and theirs.draft_s == pytest.approx(mine.draft_s)
    assert (drawn.step_s, drawn.round_s, *drawn.prefill_s) == pytest.approx(
        (profile.step_s, profile.round_s, *profile.prefill_s)
    )
    assert drawn.decision("confidence") == pytest.approx(profile.decision("confidence"))
    assert drawn.resampled(np.random.default_rng(1)) is drawn, "a draw has nothing to be drawn from"


def test_a_draw_is_the_same_for_the_same_generator() -> None:
    profile = measured(steady, jitter=0.1)
    first, again, other = (profile.resampled(np.random.default_rng(seed)).to_dict() for seed in (1, 1, 2))
    assert first == again != other


def test_a_slow_repetition_is_slow_for_all_costs_of_a_draw() -> None:
    """Every third repetition takes twice as long: the costs of a draw vary, their ratios do not."""
    profile = measured(lambda repetition: 1.0 + (repetition % 3 == 0))
    draws = [profile.resampled(np.random.default_rng(seed)) for seed in range(40)]
    plain = np.array([draw.low.verify_s[0] for draw in draws])
    assert plain.std() / plain.mean() > 0.05
    for draw in draws:
        share = draw.low.verify_s[0] / profile.low.verify_s[0]
        assert draw.high.verify_s == pytest.approx([share * s for s in profile.high.verify_s], rel=1e-4)
        assert draw.round_s == pytest.approx(share * profile.round_s, rel=1e-3)
        assert draw.decision("confidence") == pytest.approx(share * profile.decision("confidence"), rel=1e-3)


@pytest.mark.parametrize("repetitions", [6, 12, 40])
def test_costs_scatter_in_draws_as_students_t_does(repetitions: int) -> None:
    """Variance of a mean of n repetitions, from themselves: (n - 1) / (n - 3) times s^2 / n."""
    chance = np.random.default_rng(3).standard_normal(repetitions)
    profile = measured(lambda repetition: 1.0 + 0.05 * float(chance[repetition]), repetitions)
    draws = [profile.resampled(np.random.default_rng(seed)).low.verify_s[2] for seed in range(400)]
    expected = 0.05 * chance.std(ddof=1) / repetitions**0.5 * ((repetitions - 1) / (repetitions - 3)) ** 0.5
    assert np.std(draws) / profile.low.verify_s[2] == pytest.approx(expected, rel=0.15)


def test_a_phase_of_several_repetitions_is_drawn_in_one_piece() -> None:
    """Slow for 5 repetitions of 10: draws of single ones would take the phases for luck that evens out."""
    slow = measured(lambda repetition: 1.0 + (repetition % 10 < 5), 40)
    assert slow.noise is not None and slow.noise.block >= 3
    mixed = measured(lambda repetition: 1.0 + (repetition % 2), 40)
    assert mixed.noise is not None and mixed.noise.block == 1
    scatter = [
        np.std([p.resampled(np.random.default_rng(seed)).low.verify_s[0] for seed in range(100)]) for p in (slow, mixed)
    ]
    assert scatter[0] > 1.4 * scatter[1]


def test_costs_that_nobody_measured_stay_as_they_are(profile: Profile) -> None:
    assert profile.resampled(np.random.default_rng(0)) is profile
    assert profile.noise is None


def test_costs_that_were_edited_or_scaled_are_no_longer_drawn() -> None:
    """What of them was measured, the decisions, still is."""
    whole = measured(steady, jitter=0.1)
    edited = dataclasses.replace(whole, low=dataclasses.replace(whole.low, verify_s=(1.0, 2.0, 3.0, 4.0)))
    drawn = edited.resampled(np.random.default_rng(0))
    assert drawn.same_costs(edited.to_dict()) and edited.noise is None
    assert drawn.decision("confidence") != edited.decision("confidence")
    priced = whole.with_decisions({"confidence": 1e-4, "mine": 2e-4})
    drawn = priced.resampled(np.random.default_rng(0))
    assert drawn.decision_s == priced.decision_s and not drawn.same_costs(priced.to_dict())


def test_measured_decisions_are_priced_kept_and_drawn(profile: Profile) -> None:
    timed = collected([{Key(DECISIONS, "mine", (2,)): [1e-4 * (at + 1)] * 3} for at in range(8)])
    more = profile.with_measured_decisions(timed)
    assert more.decision("mine") == pytest.approx(0.5e-4 * 4.5)
    assert more.measurements == timed and more.same_costs(profile.to_dict())
    prices = {more.resampled(np.random.default_rng(seed)).decision("mine") for seed in range(20)}
    assert len(prices) > 5
    again = more.with_measured_decisions(collected([{Key(DECISIONS, "mine", (2,)): [1e-3]}]))
    assert again.decision("mine") == pytest.approx(0.5e-3) and len(again.measurements.series) == 1


def test_a_profile_comes_back_from_its_file_with_its_measurements(tmp_path: Path) -> None:
    profile = measured(steady, jitter=0.1)
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again == profile
    assert again.resampled(np.random.default_rng(5)) == profile.resampled(np.random.default_rng(5))
    again.save(tmp_path / "q.json")
    assert (tmp_path / "q.json").read_bytes() == (tmp_path / "p.json").read_bytes()
    assert "measurements" not in profile.to_dict(), "policies keep the costs of their profile, not its timings"
    raw = json.loads((tmp_path / "p.json").read_text())
    del raw["measurements"]
    (tmp_path / "old.json").write_text(json.dumps(raw))
    assert Profile.load(tmp_path / "old.json") == dataclasses.replace(profile, measurements=Measurements())


@pytest.mark.parametrize(
    "series",
    [
        3,
        [3],
        [{"what": "verify"}],
        [{"what": "verify", "of": "short", "counts": [1], "ns": [[1.5]]}],
        [{"what": "verify", "of": "short", "counts": [1], "ns": [[-1]]}],
        [{"what": "verify", "of": "short", "counts": [1], "ns": [[True]]}],
        [{"what": "verify", "of": "short", "counts": [1], "ns": [[], []]}],
        [{"what": "verify", "of": "short", "counts": ["1"], "ns": [[1]]}],
        [{"what": 7, "of": "short", "counts": [1], "ns": [[1]]}],
        [{"what": "verify", "of": "short", "counts": [1], "ns": [[1]]}] * 2,
        [{"what": "verify", "of": "middle", "counts": [1], "ns": [[1]]}],
        [{"what": "wait", "of": "short", "counts": [1], "ns": [[1]]}],
        [{"what": "verify", "of": "short", "counts": [1, 2], "ns": [[1]]}],
        [{"what": "decisions", "of": "confidence", "counts": [0], "ns": [[1]]}],
    ],
)
def test_mangled_measurements_are_refused(tmp_path: Path, profile: Profile, series: Any) -> None:
    (tmp_path / "p.json").write_text(json.dumps({**profile.to_dict(), "measurements": series}))
    with pytest.raises(InputError, match=r"profile: .*p\.json lacks or mangles"):
        Profile.load(tmp_path / "p.json")
