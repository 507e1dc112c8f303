"""Profiles: prices of rounds against plain sums, fits against closed forms, bootstrap draws, noise, and the file."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import specstop.policies.measurements as m
from damage import damage_json
from hypothesis import given, settings, strategies as st
from specstop.policies.costs import MIN_SHARE, BatchCosts, BatchTable, interpolate, read_curve
from specstop.policies.errors import InputError
from specstop.policies.measurements import Key, Measurements, Noise, measure_noise, merge_repetitions
from specstop.policies.profile import Profile
from timed import timed_profile

DECISION_S = 6e-5


def seconds(profile: Profile, context: float, *counts: int) -> float:
    """Return the seconds of one round: drafted, verified, backlog, decisions."""
    out = profile.round_seconds(np.array([context]), *(np.array([n]) for n in counts), DECISION_S)
    assert out.dtype == np.float64
    return float(out.item())


PADDED = (0, 1, 2, 3, 5, 5, 6)
"""Tokens that are verified instead of 0..6: 5 are cheaper than 4 in the profile of these tests."""


def slow_seconds(p: Profile, context: float, drafted: int, verified: int, backlog: int, decisions: int) -> float:
    calls = []
    for table in (p.low, p.high):
        total = table.verify_s[PADDED[verified]]
        if drafted:
            total += table.draft_s[1 if backlog > 1 else 0] + max(0, backlog - 2) * table.draft_token_s
            total += (drafted - 1) * table.draft_s[0]
        calls.append(total)
    weight = (context - p.low.context) / (p.high.context - p.low.context)
    both = max(calls[0] + (calls[1] - calls[0]) * weight, MIN_SHARE * min(calls))
    return both + p.round_s + drafted * p.step_s + decisions * DECISION_S


ROUNDS = [(0, 0, 1, 0), (0, 0, 9, 1), (1, 1, 1, 1), (1, 0, 2, 1), (4, 4, 1, 4), (5, 2, 2, 5), (6, 6, 31, 6)]


def test_a_round_costs_the_sum_of_its_parts(profile):
    """At the measured contexts, between, below and beyond them; many streams as each alone."""
    rows = np.array([(context, *counts) for context in (0, 8, 21.5, 40, 90, 500) for counts in ROUNDS])
    expected = [slow_seconds(profile, context, *map(int, counts)) for context, *counts in rows.tolist()]
    together = profile.round_seconds(rows[:, 0], *rows[:, 1:].astype(int).T, DECISION_S)
    assert together == pytest.approx(expected, rel=1e-13)
    assert together.tolist() == [seconds(profile, context, *map(int, counts)) for context, *counts in rows.tolist()]
    flat = dataclasses.replace(profile, high=profile.low)  # one context serves all
    assert seconds(flat, 5, 2, 2, 1, 2) == seconds(flat, 500, 2, 2, 1, 2) > 0


def test_a_verification_is_padded_to_a_cheaper_size(profile):
    assert profile.padded() == PADDED
    for low, high, sizes in (
        ((5.0, 5.0, 5.0), (5.0, 5.0, 5.0), (0, 1, 2)),  # no gain
        ((5.0, 5.0, 4.0), (5.0, 5.0, 5.0), (0, 1, 2)),  # a gain at one context only
        ((5.0, 4.9, 4.8), (5.0, 4.9, 4.8), (0, 1, 2)),  # no more than measurements differ
        ((5.0, 4.0, 3.0), (5.0, 4.0, 3.0), (0, 2, 2)),  # plain decoding, timed separately, stays
    ):
        sides = {name: dataclasses.replace(profile.low, verify_s=s) for name, s in (("low", low), ("high", high))}
        assert dataclasses.replace(profile, **sides).padded() == sizes


@pytest.mark.parametrize(("first", "depth"), [(0, None), (0, 4), (1, 1), (1, None)])
def test_chain_costs_are_the_rounds_of_each_length(profile, first, depth):
    deepest = profile.max_depth if depth is None else depth
    expected = []
    for k in range(deepest + 1):
        decisions = len([j for j in range(first, deepest) if j <= k]) if k >= first else 0
        expected.append(seconds(profile, 27.5, k, k, 1, decisions))
    assert profile.chain_costs(27.5, DECISION_S, first, depth).tolist() == pytest.approx(expected, rel=1e-9)


SECONDS = st.floats(1e-6, 1.0)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(SECONDS, min_size=1, max_size=6), st.floats(-5.0, 20.0))
def test_interpolation_is_linear_and_extrapolation_follows_the_ends(values, x):
    last = len(values) - 1
    rise = max(values[-1] - values[0], 0.0) / (last or 1)
    expected = np.interp(x, np.arange(last + 1), values) + rise * (min(x, 0.0) + max(x - last, 0.0))
    assert interpolate(x, np.arange(last + 1), values) == pytest.approx(max(expected, MIN_SHARE * min(values)))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(SECONDS, SECONDS, st.lists(st.integers(0, 40), min_size=2, max_size=6, unique=True))
def test_a_line_is_fitted_exactly_without_noise(constant, slope, counts):
    fitted = m.fit_line([((1, n), [constant + slope * n] * 3) for n in counts])
    assert fitted == pytest.approx([constant, slope], rel=1e-6, abs=1e-9)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 30), SECONDS), min_size=1, max_size=8))
def test_a_fitted_curve_never_falls_and_keeps_the_sum(timings):
    side = {(n,): np.array([value]) for n, value in timings}
    (curve,) = m.fit_curves([side])
    assert all(high >= low - 1e-12 for (_, low), (_, high) in pairwise(curve))
    predicted = sum(float(read_curve(curve, n)) for (n,) in side)
    assert predicted == pytest.approx(sum(float(values.sum()) for values in side.values()))


EXACT = 1e-6


def draws(profile: Profile, count: int) -> list[Profile]:
    return [profile.resampled(np.random.default_rng(seed)) for seed in range(count)]


def test_costs_and_draws_of_timings_without_noise_are_exact(profile):
    measured = timed_profile(profile, ["confidence"])
    (draw,) = draws(measured, 1)
    for one in (measured, draw):
        for side, true in ((one.low, profile.low), (one.high, profile.high)):
            assert side.verify_s == pytest.approx(true.verify_s, rel=EXACT)
            assert (*side.draft_s, side.later_s) == pytest.approx((*true.draft_s, true.later_s), rel=EXACT)
        assert (one.step_s, one.round_s) == pytest.approx((profile.step_s, profile.round_s), rel=1e-4)
        assert one.prefill_seconds(np.array([30])) == pytest.approx(profile.prefill_seconds(np.array([30])), rel=1e-4)
        assert one.decision("confidence") == pytest.approx(profile.decision("confidence"), rel=EXACT)
    assert not draw.measurements and draw.resampled(np.random.default_rng(1)) is draw


def test_a_slow_repetition_is_slow_for_all_costs_of_a_draw(profile):
    """Every third repetition takes twice as long: the costs of a draw vary, their ratios do not."""
    measured = timed_profile(profile, ["confidence"], paces=[2.0, 1.0, 1.0] * 4)
    plain = np.array([draw.low.verify_s[0] for draw in draws(measured, 30)])
    assert plain.std() / plain.mean() > 0.05
    for draw in draws(measured, 30):
        share = draw.low.verify_s[0] / measured.low.verify_s[0]
        assert draw.high.verify_s == pytest.approx([share * s for s in measured.high.verify_s], rel=1e-4)
        assert draw.round_s == pytest.approx(share * measured.round_s, rel=1e-3)
        assert draw.decision("confidence") == pytest.approx(share * measured.decision("confidence"), rel=1e-3)


@pytest.mark.parametrize("repetitions", [6, 12])
def test_costs_of_draws_scatter_as_students_t(profile, repetitions):
    """Variance of a mean of n repetitions, from themselves: (n - 1) / (n - 3) times s^2 / n."""
    noise = np.random.default_rng(3).standard_normal(repetitions)
    measured = timed_profile(profile, paces=(1.0 + 0.05 * noise).tolist())
    values = [draw.low.verify_s[2] for draw in draws(measured, 300)]
    expected = 0.05 * noise.std(ddof=1) / repetitions**0.5 * ((repetitions - 1) / (repetitions - 3)) ** 0.5
    assert np.std(values) / measured.low.verify_s[2] == pytest.approx(expected, rel=0.15)


def test_only_measured_costs_are_drawn(profile):
    """Costs that were edited stay; the decisions of the same profile are drawn."""
    rng = np.random.default_rng
    assert profile.resampled(rng(0)) is profile and profile.noise is None
    whole = timed_profile(profile, ["confidence"], jitter=0.1)
    first, again, other = (whole.resampled(rng(seed)).to_dict() for seed in (1, 1, 2))
    assert first == again != other
    edited = dataclasses.replace(whole, low=dataclasses.replace(whole.low, verify_s=tuple(range(1, 8))))
    draw = edited.resampled(rng(0))
    assert draw.same_costs(edited.to_dict()) and edited.noise is None
    assert draw.decision("confidence") != edited.decision("confidence")
    priced = whole.with_decisions({"confidence": 1e-4, "mine": 2e-4})
    draw = priced.resampled(rng(0))
    assert draw.decision_s == priced.decision_s and not draw.same_costs(priced.to_dict())


def test_measured_decisions_are_priced_stored_and_drawn(profile):
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


def test_each_kind_of_noise_has_its_closed_form():
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


# The file


def batch_profile(profile: Profile) -> Profile:
    """Return the profile with costs of trees and of batches."""
    points = (0, 4e-3), (1, 4.1e-3), (8, 6e-3), (14, 6.2e-3)
    more = {"later_draft_s": 1e-3, "tree_verify_s": points, "tree_draft_s": (1e-3, 1e-4)}
    low, high = (dataclasses.replace(table, **more) for table in (profile.low, profile.high))
    verify = {1: ((1, 4e-3), (5, 5e-3)), 4: ((4, 5e-3), (16, 5e-3), (17, 7e-3), (20, 7e-3))}
    batch = BatchCosts(*(BatchTable(context, ((1, 1e-3), (4, 1.5e-3)), verify) for context in (8.0, 40.0)))
    return dataclasses.replace(profile, low=low, high=high, tree_outside_s=(1e-4, 2e-5, 1e-6), batch=batch)


KINDS: dict[str, Callable[[Profile], Profile]] = {
    "chain": lambda p: dataclasses.replace(p, step_s=0.1 + 0.2, round_s=1 / 3).with_decisions({"mine": 1 / 3}),
    "batch": batch_profile,
    "measured": lambda p: timed_profile(p, ["confidence"], jitter=0.1, repetitions=6),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_round_trips_through_its_file(profile, tmp_path, kind):
    original = KINDS[kind](profile)
    original.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again == original
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "p.json").read_bytes()
    assert again.resampled(np.random.default_rng(5)) == original.resampled(np.random.default_rng(5))
    assert original.same_costs(again.with_decisions({"other": 1.0}).to_dict()), "costs without decisions"
    assert not original.same_costs({**again.to_dict(), "round_s": 1.0}) and not original.same_costs({})
    bare = original.to_dict()
    assert "measurements" not in bare, "policies store the costs of their profile, not its timings"
    (tmp_path / "p.json").write_text(json.dumps(bare))
    assert Profile.load(tmp_path / "p.json") == dataclasses.replace(original, measurements=Measurements())


def damaged(text: str, rng: random.Random) -> str:
    """Return the text with a damaged entry, with other times, or with other characters."""
    kind, at, raw = rng.randrange(5), rng.randrange(len(text)), json.loads(text)
    if kind == 0:
        return text[:at] + "".join(rng.choices('0123456789eE-+.,:"[]{}nN', k=rng.randint(0, 4))) + text[at + 1 :]
    if kind < 3:
        damage_json(raw, rng)
    elif kind == 3:  # possible but unlikely: each of another order of magnitude
        raw = json.loads(text, parse_float=lambda number: 10.0 ** rng.uniform(-9.0, 6.0))
    else:
        factor = rng.choice([-1.0, 0.0, 1e-300, 1e-3, 1e9, 1e300])
        raw = json.loads(text, parse_float=lambda number: float(number) * factor)
    return json.dumps(raw)


def prices(profile: Profile) -> list[Any]:
    """Return the seconds of all kinds of rounds."""
    k, streams = np.arange(profile.max_depth + 1), np.arange(40)
    seconds: list[Any] = [profile.prefill_seconds(np.array([1, 100]))]
    seconds += [profile.low.tree_draft(20), profile.high.tree_verify(20)]
    for context in (1.0, 20.0, 4096.0):
        fed = np.stack([k > 0, 2 * k, 0 * k], 1)
        for name in (*profile.decision_s, "other"):
            price = profile.decision(name)
            seconds.append(profile.chain_costs(context, price))
            seconds.append(profile.round_seconds(0 * k + context, k, k[::-1], 1 + 9 * k, k, price, fed))
        seconds += [profile.first_draft_s(streams, context), profile.draft_s(streams, context)]
        seconds += [profile.verify_s(streams, tokens * streams, context) for tokens in (1, 3, 9)]
    return seconds


@settings(max_examples=80, deadline=None, derandomize=True)
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**32))
def test_a_damaged_profile_is_refused_or_has_possible_prices(profile, tmp_path_factory, kind, seed):
    path = tmp_path_factory.mktemp("damaged") / "p.json"
    KINDS[kind](profile).save(path)
    path.write_text(damaged(path.read_text(), random.Random(seed)))
    try:
        loaded = Profile.load(path)
    except InputError as error:
        assert str(error).isprintable() and len(str(error)) < len(str(path)) + 250
        return
    loaded.save(path)
    assert Profile.load(path) == loaded
    for draw in (loaded, loaded.resampled(np.random.default_rng(0))):
        assert all((np.isfinite(s) & (np.asarray(s) >= 0)).all() for s in prices(draw))
