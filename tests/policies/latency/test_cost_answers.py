"""All answers about costs rest on one line: at, between and beyond the contexts and sizes that were measured."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.optimize import lsq_linear
from specstop.policies.costs import CostTable, along
from specstop.policies.joint.grid import SingleStreamCosts
from specstop.policies.latency.robust_fits import between, extended, line
from specstop.policies.profile import Profile

DEPTH = 5
CONTEXTS = (64.0, 512.0)
ASKED = (0, 10, 64, 100, 288, 512, 700, 4096)


def random_profile(seed: int, rising: bool = True) -> Profile:
    """Return a profile of random tables; `rising` = nothing is cheaper in a longer context."""
    chance = np.random.default_rng(seed)

    def table(context: float, base: np.ndarray) -> CostTable:
        one, more, token, later, second, *verify = base.tolist()
        return CostTable(context, (one, one + more), token, tuple(verify), later, second_draft_s=second)

    low = chance.uniform(0.5, 2.0, 5 + DEPTH + 1)
    high = low * chance.uniform(1.0 if rising else 0.2, 1.1, len(low))  # 0 tokens of context cost more than a quarter
    return Profile(table(CONTEXTS[0], low), table(CONTEXTS[1], high), 0.0, 0.0, (0.0, 0.0))


def round_seconds(profile: Profile, context: float, drafted: int, verified: int, backlog: int = 1) -> float:
    columns = [np.array([n]) for n in (context, drafted, verified, backlog, 0)]
    return float(profile.round_seconds(*columns, 0.0)[0])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("context", ASKED)
def test_rounds_tables_and_batches_agree(seed: int, context: int) -> None:
    profile = random_profile(seed)
    padded = profile.padded()
    first, two, second, later = profile.between(context, lambda t: (*t.draft_s, t.second_s, t.later_s))
    verify = profile.between(context, lambda t: t.verify_s)
    batches = SingleStreamCosts(profile)
    for drafted in range(DEPTH + 1):
        drafts = [first, second, *[later] * DEPTH][:drafted]
        expected = sum(drafts) + verify[padded[drafted]]
        assert round_seconds(profile, context, drafted, drafted) == pytest.approx(expected, rel=1e-12)
        assert float(profile.chain_costs(context, 0.0)[drafted]) == pytest.approx(expected, rel=1e-12)
        assert float(batches.verify_s(1, drafted + 1, context)) == pytest.approx(verify[padded[drafted]], rel=1e-12)
    assert round_seconds(profile, context, 1, 1, 2) == pytest.approx(two + verify[padded[1]], rel=1e-12)
    assert float(profile.first_draft_s(np.array([context]))[0]) == pytest.approx(first, rel=1e-12)
    for of, seconds in ((batches.first_draft_s, first), (batches.second_draft_s, second), (batches.draft_s, later)):
        assert float(of(1, context)) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_costs_go_through_the_measured_points_and_on_along_their_line(seed: int) -> None:
    profile = random_profile(seed)
    by_context = np.array([profile.between(context, lambda t: t.verify_s) for context in ASKED])
    for context, side in zip(CONTEXTS, (profile.low, profile.high), strict=True):
        np.testing.assert_allclose(by_context[ASKED.index(int(context))], side.verify_s, rtol=1e-12)
    slope = (by_context[1:] - by_context[:-1]) / np.diff(ASKED)[:, None]
    np.testing.assert_allclose(slope, np.broadcast_to(slope[:1], slope.shape), rtol=1e-6)
    assert (slope >= 0).all()


@pytest.mark.parametrize("seed", range(8))
def test_noisy_tables_never_give_time_back(seed: int) -> None:
    profile = random_profile(seed, rising=False)
    profile = dataclasses.replace(profile, low=profile.high, high=dataclasses.replace(profile.low, context=80.0))
    for context in (0, 1, 60, 1000, 10**6):
        assert min(profile.between(context, lambda t: (*t.draft_s, t.later_s, *t.verify_s))) > 0
        assert round_seconds(profile, context, 3, 3) > 0


@pytest.mark.parametrize("seed", range(8))
def test_tables_by_tokens_agree(seed: int) -> None:
    chance = np.random.default_rng(seed)
    table = tuple(np.sort(chance.uniform(1.0, 2.0, 6)).tolist())
    points = tuple(enumerate(table))
    rise = (table[-1] - table[0]) / 5
    expected = [*table, *(table[-1] + rise * n for n in range(1, 7))]
    for found in (between(points, range(12)), along(points, range(12)), extended(table, 12)):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    side = CostTable(1.0, (1.0, 1.0), 0.0, table)
    np.testing.assert_allclose(side.tree_verify(11), expected, rtol=1e-12)
    assert float(along(points, 2.5)) == pytest.approx((table[2] + table[3]) / 2)


@pytest.mark.parametrize("seed", range(30))
def test_lines_are_the_best_of_all_that_have_no_negative_coefficient(seed: int) -> None:
    """Against an interior-point solver; leaving out the most negative coefficient, one by one, is not enough."""
    chance = np.random.default_rng(seed)
    groups, columns = int(chance.integers(3, 9)), int(chance.integers(2, 5))
    counts = chance.uniform(0.0, 1.0, (groups, columns)) * 10.0 ** chance.integers(0, 4, columns)
    seconds = chance.uniform(-0.2, 1.0, groups).clip(0.001)
    found = np.array(line([(row.tolist(), [y]) for row, y in zip(counts, seconds, strict=True)]))
    assert (found >= 0).all()
    scale = np.linalg.norm(counts, axis=0)
    best = lsq_linear(counts / scale, seconds, (0.0, np.inf), tol=1e-13)
    assert np.square(counts @ found - seconds).sum() / 2 <= best.cost * (1 + 1e-6) + 1e-12
