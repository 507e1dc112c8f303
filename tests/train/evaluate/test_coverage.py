"""A seeded sample of the worlds of `simulated_worlds`, and its truths beside simulations."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import simulated_worlds
from specstop.policies.fixed import Confidence, FixedLength
from specstop.train.evaluate.importance import COLUMNS, observed_rounds
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay

STANDARD_ERRORS = 5.0  # of a simulated mean around its truth: a false alarm in two million


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    return simulated_worlds


@pytest.mark.parametrize("seed", [3, 4])
def test_the_closed_form_of_a_text_is_what_replay_takes_on_average(coverage: ModuleType, seed: int) -> None:
    chance = np.random.default_rng(seed)
    world = coverage.draw_world(chance)
    arrays = trace_arrays(coverage.sample_dense(world, 1500, chance))
    for policy in (FixedLength(0), FixedLength(3), coverage.DEEPER, coverage.LOGGING):
        seconds = replay(arrays, policy, world.profile).seconds.numpy()
        error = seconds.std() / len(seconds) ** 0.5
        assert abs(seconds.mean() - coverage.true_seconds(world, policy)) < STANDARD_ERRORS * error, policy.name


@pytest.mark.parametrize("seed", [5, 6])
def test_the_closed_form_of_a_round_is_what_rounds_bring_on_average(coverage: ModuleType, seed: int) -> None:
    chance = np.random.default_rng(seed)
    world = coverage.draw_world(chance)
    arrays = trace_arrays(coverage.sample_live(world, 600, Confidence(0.0, coverage.DEPTH), 0.5, chance), extra=COLUMNS)
    for policy in (FixedLength(2), coverage.DEEPER, coverage.LOGGING):
        shown = observed_rounds(arrays, policy, world.profile)
        assert shown.observed.all()
        for values, truth in zip((shown.tokens, shown.seconds), coverage.true_round(world, policy), strict=True):
            by_prompt = values.reshape(600, -1).mean(1)
            error = by_prompt.std() / 600**0.5
            assert abs(by_prompt.mean() - truth) <= STANDARD_ERRORS * error + 1e-9, policy.name


def test_a_sample_of_worlds_is_covered(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 worlds: at 95% each, 6 or fewer hits of 10 in a row of figures happen once in 900; over rows they hang together."""
    monkeypatch.setattr(coverage, "LENGTHS", np.array([12, 18, 28]))
    found = [one for seed in range(10) for one in coverage.dense_world(seed)]
    hits = {what: [f.covered for f in found if f.what == what] for what in {f.what for f in found}}
    assert set(map(len, hits.values())) == {10}
    assert len(hits) == 4
    assert min(map(sum, hits.values())) >= 7, hits


def test_a_sample_of_live_worlds_is_covered_without_bias(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "LIVE_SIZES", (40,))
    found = [one for seed in range(20) for one in coverage.live_world(seed)]
    for what in ("tokens", "seconds", "rate", "to recorded"):
        mine = [f for f in found if (f.method, f.what) == ("importance", what)]
        errors = np.array([f.error for f in mine])
        assert len(mine) == 20
        assert sum(f.covered for f in mine) >= 14, what
        assert abs(errors.mean()) < STANDARD_ERRORS * errors.std() / 20**0.5, what
