"""The price of a round against a plain sum of its parts; interpolation and fits against closed forms."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import specstop.policies.measurements as m
from hypothesis import given, settings, strategies as st
from specstop.policies.costs import MIN_SHARE, PADDING_GAIN, interpolate, read_curve
from specstop.policies.fixed import Confidence
from specstop.policies.measurements import Key
from specstop.policies.profile import Profile

DECISION_S = 6e-5


def seconds(profile: Profile, context: float, *counts: int) -> float:
    """Return the seconds of one round: drafted, verified, backlog, decisions."""
    out = profile.round_seconds(np.array([context]), *(np.array([n]) for n in counts), DECISION_S)
    assert out.dtype == np.float64
    return float(out.item())


def slow_padded(p: Profile, verified: int) -> int:
    """Return the cheapest size that verifies at least so many tokens, if it is clearly cheaper at both contexts."""
    best = verified
    if not verified:
        return 0  # plain decoding
    for size in range(verified, len(p.low.verify_s)):
        if p.low.verify_s[size] + p.high.verify_s[size] < p.low.verify_s[best] + p.high.verify_s[best]:
            best = size
    pays = all(side.verify_s[best] < (1.0 - PADDING_GAIN) * side.verify_s[verified] for side in (p.low, p.high))
    return best if pays else verified


def slow_seconds(p: Profile, context: float, drafted: int, verified: int, backlog: int, decisions: int) -> float:
    calls = []
    for table in (p.low, p.high):
        total = table.verify_s[slow_padded(p, verified)]
        if drafted:
            total += table.draft_s[1 if backlog > 1 else 0] + max(0, backlog - 2) * table.draft_token_s
            total += (drafted - 1) * table.draft_s[0]
        calls.append(total)
    weight = (context - p.low.context) / (p.high.context - p.low.context)
    both = max(calls[0] + (calls[1] - calls[0]) * weight, MIN_SHARE * min(calls))
    return both + p.round_s + drafted * p.step_s + decisions * DECISION_S


ROUNDS = [(0, 0, 1, 0), (0, 0, 9, 1), (1, 1, 1, 1), (1, 0, 2, 1), (4, 4, 1, 4), (5, 2, 2, 5), (6, 6, 31, 6)]


def test_a_round_costs_the_sum_of_its_parts(profile: Profile) -> None:
    """At the measured contexts, between, below and beyond them; many streams as each alone."""
    rows = np.array([(context, *counts) for context in (0, 8, 21.5, 40, 90, 500) for counts in ROUNDS])
    expected = [slow_seconds(profile, context, *map(int, counts)) for context, *counts in rows.tolist()]
    together = profile.round_seconds(rows[:, 0], *rows[:, 1:].astype(int).T, DECISION_S)
    assert together == pytest.approx(expected, rel=1e-13)
    assert together.tolist() == [seconds(profile, context, *map(int, counts)) for context, *counts in rows.tolist()]
    flat = dataclasses.replace(profile, high=profile.low)  # one context serves all
    assert seconds(flat, 5, 2, 2, 1, 2) == seconds(flat, 500, 2, 2, 1, 2) > 0


def test_a_verification_is_padded_to_a_cheaper_size(profile: Profile) -> None:
    assert profile.padded() == (0, 1, 2, 3, 5, 5, 6) == tuple(slow_padded(profile, n) for n in range(7))
    assert seconds(profile, 20, 5, 4, 1, 0) == seconds(profile, 20, 5, 5, 1, 0) < seconds(profile, 20, 5, 6, 1, 0)
    for low, high, sizes in (
        ((5.0, 5.0, 5.0), (5.0, 5.0, 5.0), (0, 1, 2)),  # no gain
        ((5.0, 5.0, 4.0), (5.0, 5.0, 5.0), (0, 1, 2)),  # a gain at one context only
        ((5.0, 4.9, 4.8), (5.0, 4.9, 4.8), (0, 1, 2)),  # no more than measurements differ
        ((5.0, 4.0, 3.0), (5.0, 4.0, 3.0), (0, 2, 2)),  # plain decoding, timed separately, stays
    ):
        sides = {name: dataclasses.replace(profile.low, verify_s=s) for name, s in (("low", low), ("high", high))}
        assert dataclasses.replace(profile, **sides).padded() == sizes


@pytest.mark.parametrize(("first", "depth"), [(0, None), (0, 4), (1, 1), (1, None)])
def test_chain_costs_are_the_rounds_of_each_length(profile: Profile, first: int, depth: int | None) -> None:
    deepest = profile.max_depth if depth is None else depth
    expected = []
    for k in range(deepest + 1):
        decisions = len([j for j in range(first, deepest) if j <= k]) if k >= first else 0
        expected.append(seconds(profile, 27.5, k, k, 1, decisions))
    assert profile.chain_costs(27.5, DECISION_S, first, depth).tolist() == pytest.approx(expected, rel=1e-9)


def test_prefill_and_decisions_have_their_measured_prices(profile: Profile) -> None:
    assert profile.prefill_seconds(np.array([0, 7])).tolist() == pytest.approx([5e-3, 5.7e-3])
    more = profile.with_decisions({"mine": 1e-3})
    assert [more.decision(name) for name in (Confidence(0.25).cost_name, "mine", "other")] == [6e-5, 1e-3, 0.0]
    assert "mine" not in profile.decision_s


SECONDS = st.floats(1e-6, 1.0)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(SECONDS, min_size=1, max_size=6), st.floats(-5.0, 20.0))
def test_interpolation_is_linear_and_extrapolation_follows_the_ends(values: list[float], x: float) -> None:
    last = len(values) - 1
    rise = max(values[-1] - values[0], 0.0) / (last or 1)
    expected = np.interp(x, np.arange(last + 1), values) + rise * (min(x, 0.0) + max(x - last, 0.0))
    assert interpolate(x, np.arange(last + 1), values) == pytest.approx(max(expected, MIN_SHARE * min(values)))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(SECONDS, SECONDS, st.lists(st.integers(0, 40), min_size=2, max_size=6, unique=True))
def test_a_line_is_fitted_exactly_without_noise(constant: float, slope: float, counts: list[int]) -> None:
    fitted = m.fit_line([((1, n), [constant + slope * n] * 3) for n in counts])
    assert fitted == pytest.approx([constant, slope], rel=1e-6, abs=1e-9)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 30), SECONDS), min_size=1, max_size=8))
def test_a_fitted_curve_never_falls_and_keeps_the_sum(timings: list[tuple[int, float]]) -> None:
    side = {(n,): np.array([value]) for n, value in timings}
    (curve,) = m.fit_curves([side])
    assert all(high >= low - 1e-12 for (_, low), (_, high) in pairwise(curve))
    predicted = sum(float(read_curve(curve, n)) for (n,) in side)
    assert predicted == pytest.approx(sum(float(values.sum()) for values in side.values()))


def test_the_first_draft_step_of_a_batch_has_a_separate_price() -> None:
    timings: m.Timings = {
        Key(what, side, counts): np.array([value])
        for side in ("short", "long")
        for what, counts, value in (
            (m.VERIFY, (1,), 4.0), (m.BATCH_VERIFY, (2, 4), 5.0), (m.BATCH_FIRST, (2,), 3.0), (m.BATCH_DRAFTS, (2, 4), 8.0),
        )
    }  # fmt: skip
    costs = m.estimate(timings, (10.0, 40.0), 1)
    assert costs.first_draft_s([0, 2], 20.0).tolist() == pytest.approx([0.0, 3.0])
    assert costs.draft_s([0, 2], 20.0).tolist() == pytest.approx([0.0, 2.0])
    drafted = np.array([3, 3])
    assert costs.batch_seconds(np.array([20, 20]), drafted, np.array([1, 1]), drafted, 0.5) == pytest.approx(13.5)
