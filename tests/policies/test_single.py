"""The short cut for one row: heads, calibration and policies as their tensor forms have them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from specstop.policies.baselines import Confidence
from specstop.policies.contract import DraftStep
from specstop.policies.heads import build_head
from specstop.policies.history import HISTORY_FEATURES, History, HistoryOne
from specstop.policies.learned import LearnedPolicy
from specstop.policies.rules import Derived, Rule, Threshold
from test_heads import MAPS, NAMES, TENSORS, features


def test_the_history_of_one_stream_is_that_of_many() -> None:
    """To the last bit: boosted trees split at values that were seen."""
    many, one = History.start(2), HistoryOne()
    chance = random.Random(0)
    for _ in range(300):
        verified = chance.randint(0, 8)
        accepted = chance.randint(0, verified)
        pair = torch.tensor([accepted, 0]), torch.tensor([verified, 0])
        many = many.after(*pair, torch.tensor([True, False]))
        one.add(accepted, verified)
        for names in (HISTORY_FEATURES, ("last_verified", "mean_full"), ()):
            assert many.values(names)[0].tolist() == torch.tensor(one.values(names)).tolist()
    assert not many.values()[1].any()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("kind", list(TENSORS))
def test_heads_score_one_row_as_many(kind: str, depth: int) -> None:
    head = build_head(kind, NAMES, TENSORS[kind]())
    x = features(40)
    x[:4, [1, 2, 4]] = torch.tensor([0.0, 1.0, 1.0])
    expected = head.logits(x, depth)
    for row, values in zip(x, expected, strict=True):
        assert head.logits_one(row.numpy(), depth) == pytest.approx(values.tolist(), rel=1e-4, abs=1e-4)


def test_unknown_values_take_the_same_branch() -> None:
    head = build_head("xgboost", NAMES, TENSORS["xgboost"]())
    x = features(60)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.3] = float("nan")
    for row, values in zip(x, head.logits(x, 1), strict=True):
        assert head.logits_one(row.numpy(), 1) == pytest.approx(values.tolist(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("calibrate", MAPS, ids=lambda c: f"{c.kind}-{c.knots.shape[1]}")
def test_calibration_of_one_logit(calibrate: Any) -> None:
    x = torch.cat([torch.linspace(-40, 40, 401), calibrate.knots[0]])
    assert [calibrate.one(float(v)) for v in x] == pytest.approx(calibrate(x).tolist(), abs=1e-5)
    assert [calibrate.one(v) for v in (-1e4, 1e4)] == pytest.approx(calibrate(torch.tensor([-1e4, 1e4])).tolist())


@pytest.mark.parametrize(
    "rule",
    [Derived([0.1, 0.3, 0.2, 0.2]), Derived([0.01, 0.01], 1), Threshold("step", 0.5), Threshold("survival", 0.3)],
    ids=["derived", "derived from 1", "step", "survival"],
)
@pytest.mark.parametrize("kind", list(TENSORS))
def test_a_policy_decides_alone_as_it_does_among_many(kind: str, rule: Rule) -> None:
    policy = LearnedPolicy("mine", NAMES, build_head(kind, NAMES, TENSORS[kind]()), MAPS[2], MAPS[1], rule, 4)
    streams = 50
    alive, parent = torch.ones(streams, 1, dtype=torch.bool), torch.zeros(streams, 1, dtype=torch.int64)
    state, alone, decided = None, [None] * streams, []
    for depth in range(policy.first, 4):
        x = features(streams, 1, seed=depth)
        keep, state = policy.keep(DraftStep(depth, alive, parent, x), state)
        for s in range(streams):
            one, alone[s] = policy.keep_one(depth, x[s, 0].numpy(), alone[s])
            assert alone[s] == pytest.approx(float(state[s, 0]), abs=1e-5)
            assert one == bool(keep[s, 0])
        decided += keep[:, 0].tolist()
    assert 0 < sum(decided) < len(decided) or (rule.kind, rule.first) == ("derived", 1), "the others decide both ways"


def test_the_confidence_rule_decides_alone_as_among_many() -> None:
    policy = Confidence(0.4)
    values = torch.tensor([0.0, 0.3999, 0.4, 0.41, 1.0])
    step = DraftStep(2, torch.ones(5, 1, dtype=torch.bool), torch.zeros(5, 1, dtype=torch.int64), values[:, None, None])
    expected = policy.keep(step, None)[0][:, 0].tolist()
    assert [policy.keep_one(2, np.array([v], dtype=np.float32), None)[0] for v in values.numpy()] == expected
