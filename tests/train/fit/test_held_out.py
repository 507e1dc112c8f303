"""Speeds of prompts held out: of a policy that was fitted and calibrated without them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from specstop.collect.store.folder import Trace
from specstop.policies.latency.profile import Profile
from specstop.policies.learned.calibration import Calibrator
from specstop.policies.learned.policy import LearnedPolicy
from specstop.policies.rules.chains import Threshold
from specstop.train.fit.held_out import fitted_without, held_out_speed
from specstop.train.heads.crossfit import Calibrated, FoldHeads, calibrate, fit_folds, held_out_outputs, prompt_folds
from specstop.train.heads.rows import Visits
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays

NAMES, GRID = ("top1", "noisy_margin", "depth"), np.linspace(-3.0, 3.0, 7)


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0])


def fitted_on(arrays: TraceArrays, count: int, every: bool) -> tuple[LearnedPolicy, FoldHeads, Calibrated, Visits]:
    visited = Visits.once((~arrays.cut).nonzero()[:, 0])
    fitted = fit_folds(arrays, prompt_folds(arrays, count, 0), NAMES, visited, "logistic", every=every)
    calibrated = calibrate(held_out_outputs(fitted, arrays, NAMES, visited))
    # Of a kind that any label moves.
    calibrated = dataclasses.replace(calibrated, accept=Calibrator("temperature", 1.0))
    maps = calibrated.accept, calibrated.next, Threshold("survival", 0.3)
    policy = LearnedPolicy("mine", NAMES, fitted.heads[0], *maps, arrays.depth, survival=calibrated.tables)
    return policy, fitted, calibrated, visited


@pytest.mark.parametrize("every", [True, False])
def test_a_policy_is_calibrated_without_the_prompts_that_it_is_measured_on(arrays: TraceArrays, every: bool) -> None:
    policy, fitted, calibrated, visited = fitted_on(arrays, 2, every)
    parts = [*fitted_without(policy, fitted, calibrated, arrays, visited)]
    held = {arrays.prompt_ids[sequence] for sequence in fitted.folds.sequences(0)}
    assert len(parts) == (1 if every else 2)
    assert sorted(name for _, part in parts for name in part.prompt_ids) == sorted(held)
    for at, (made, part) in enumerate(parts):
        assert made.head is policy.head and made.rule is policy.rule
        mine = torch.tensor([name in part.prompt_ids for name in arrays.prompt_ids])[arrays.owner]
        other = dataclasses.replace(arrays, accepted=torch.where(mine, arrays.depth - arrays.accepted, arrays.accepted))
        again, _ = [*fitted_without(policy, fitted, calibrated, other, visited)][at]
        assert np.array_equal(again.accept(GRID), made.accept(GRID))
        whole = calibrate(held_out_outputs(fitted, other, NAMES, visited), like=calibrated)
        assert not np.array_equal(whole.accept(GRID), made.accept(GRID)), "what is kept is calibrated on them"


def test_speeds_are_of_all_parts_together(arrays: TraceArrays, full_profile: Profile) -> None:
    policy, *given = fitted_on(arrays, 2, every=False)
    played = [*fitted_without(policy, *given[:2], arrays, given[2])]
    found = held_out_speed(played, full_profile)
    made = [replay(part, one, full_profile) for one, part in played]
    tokens, seconds = (sum(float(getattr(one, of).sum()) for one in made) for of in ("tokens", "seconds"))
    assert found["held_out_tokens_per_s"] == pytest.approx(tokens / seconds)


def test_one_prompt_alone_has_no_speed_where_no_other_head_was_fitted(
    arrays: TraceArrays, full_profile: Profile
) -> None:
    policy, *given = fitted_on(arrays, len(set(arrays.prompt_ids)), every=False)
    played = [*fitted_without(policy, *given[:2], arrays, given[2])]
    assert played == [] and held_out_speed(played, full_profile) == {}
