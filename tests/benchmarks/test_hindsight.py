"""Thresholds settled in hindsight, which `benchmarks/heads.py` compares the derived rule with."""

from __future__ import annotations

import pytest
import torch
from benchmark_scripts import script
from specstop.collect.store import Trace
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay

hindsight = script("hindsight")
NEVER, cut_where_it_pays = hindsight.NEVER, hindsight.cut_where_it_pays


def test_a_cut_takes_what_pays_and_nothing_where_nothing_does() -> None:
    score, gain = torch.tensor([0.9, 0.2, 0.6, 0.4]), torch.tensor([1.0, -5.0, 2.0, -1.0])
    assert cut_where_it_pays(score, gain) == pytest.approx(0.5)
    assert cut_where_it_pays(score, -gain.abs()) == NEVER
    assert cut_where_it_pays(score[:0], gain[:0]) == NEVER
    assert cut_where_it_pays(torch.tensor([0.5, 0.5]), torch.tensor([3.0, -4.0])) == NEVER  # equal scores go together


def test_settled_thresholds_replay_as_planned_and_no_slower_than_derived_ones(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy
) -> None:
    arrays = trace_arrays(sides[0])
    settled, rate = hindsight.settle_thresholds(learned, arrays, full_profile)
    played = replay(arrays, settled, full_profile).rate
    assert played == rate
    assert played > 0.99 * replay(arrays, learned, full_profile).rate
