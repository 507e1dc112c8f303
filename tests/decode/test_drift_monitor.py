"""The drift monitor detects a learned policy whose predicted acceptance differs from the observed one."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import pytest
from joint_policies import linear_head
from specstop.decode.drift_monitor import DEVIATIONS, SLACK, WINDOW, DriftMonitor
from specstop.decode.loop import Settings, Speculator
from specstop.decode.plain import plain_texts
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.errors import SpecstopWarning
from specstop.policies.learned import Calibrator, LearnedPolicy, TrainingMetadata
from specstop.policies.profile import Profile
from specstop.policies.rules import Threshold

TABLE = CostTable(10.0, (1e-3, 1e-3), 0.0, tuple(5e-3 + 1e-4 * k for k in range(5)))
PROFILE = Profile(TABLE, TABLE, 0.0, 0.0, (0.0, 0.0))


def promising(accept: float, depth: int = 4, profile: dict[str, Any] | None = None) -> LearnedPolicy:
    """Return a policy that predicts this acceptance of every token and always drafts on."""
    head = linear_head(("depth",), np.zeros((3, 1)), [math.log(accept / (1 - accept))] * 3)
    rule, metadata = Threshold("survival", 0.0), TrainingMetadata(profile=profile or {})
    return LearnedPolicy("promising", ("depth",), head, Calibrator(), Calibrator(), rule, depth, metadata)


def test_the_band_has_the_mean_and_variance_of_the_accepted_length():
    """The distribution of min(A, 3) with survival .8, .4, .3."""
    chances = {0: 0.2, 1: 0.4, 2: 0.1, 3: 0.3}
    mean = sum(a * p for a, p in chances.items())
    variance = sum(a * a * p for a, p in chances.items()) - mean**2
    monitor = DriftMonitor(promising(0.8), "warn")
    for _ in range(WINDOW):
        monitor.add((0.8, 0.4, 0.3), 2)
    half = DEVIATIONS * math.sqrt(variance / WINDOW) + SLACK * mean
    assert monitor.band() == pytest.approx((2.0, mean - half, mean + half))


@pytest.fixture(scope="module")
def endless_pair(pair):
    return dataclasses.replace(pair, eos=())


@pytest.mark.parametrize("mode", ["off", "warn", "fallback"])
def test_a_wrong_prediction_causes_one_warning_and_a_fixed_length_only_on_request(endless_pair, prompt_ids, mode):
    settings = Settings(0.7, 100, 4, fallback=1, drift=mode, verification="match")
    speculator = Speculator(endless_pair, promising(0.99), settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = [list(speculator.generate(p, i).tokens) for i, p in enumerate(prompt_ids[:3])]
    assert texts == plain_texts(endless_pair, prompt_ids[:3], [0, 1, 2], 100, 0.7).tokens
    assert [(w.category, "calibration" in str(w.message)) for w in caught] == [(SpecstopWarning, True)] * (
        mode != "off"
    )
    assert speculator.policy.name == ("fixed:1" if mode == "fallback" else "promising")


def best_length(policy: LearnedPolicy, *rounds: tuple[int, int], streams: int = 1) -> int:
    """Return the best length after rounds of (accepted, verified) tokens."""
    monitor = DriftMonitor(policy, "fallback", 3, streams)
    for accepted, verified in rounds:
        monitor.add([0.9] * verified, accepted)
    return monitor.best_length()


def test_the_best_fixed_length_follows_acceptance_and_costs():
    policy = promising(0.9, 4, PROFILE.to_dict())
    half = max(range(5), key=lambda k: (2 - 0.5**k) / (5e-3 + 1.1e-3 * k))
    for accepted, expected in ((0, 0), (1, half), (2, 4)):
        assert best_length(policy, (accepted, 2)) == expected
    for saved in (None, {"kind": "odd"}):
        assert best_length(promising(0.9, 4, saved), (1, 2)) == 3, "the fallback, without a profile"
    batch = BatchTable(10.0, ((1, 1e-3), (4, 4e-3)), {4: ((4, 5e-3), (20, 0.1))})
    policy = promising(0.9, 4, dataclasses.replace(PROFILE, batch=BatchCosts(batch, batch)).to_dict())
    assert best_length(policy, (1, 2), streams=4) == 0 < best_length(policy, (1, 2))
