"""The short cut for one row: features, heads, calibration and policies as their tensor forms have them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from specstop.policies.baselines import Confidence
from specstop.policies.contract import DraftStep
from specstop.policies.features import FEATURES, Kind, Layout, Rows, compute
from specstop.policies.heads import build_head
from specstop.policies.history import HISTORY_FEATURES, History, HistoryOne
from specstop.policies.learned import LearnedPolicy
from specstop.policies.rules import Derived, Rule, Threshold
from specstop.policies.single import Row, compute_row
from test_heads import MAPS, NAMES, TENSORS, features

NODE = tuple(name for name, f in FEATURES.items() if f.kind in (Kind.PRE, Kind.POST))
NEAR = {torch.float32: 2e-5, torch.float64: 1e-6}  # sums in another order; features are float32 in either case
FAR = 2e-4  # float32 logits near 500 have steps of 3e-5, and the entropy of one row subtracts two of that size


def logits(kind: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    values = 3 * torch.randn(1, width, generator=torch.Generator().manual_seed(width), dtype=dtype)
    if kind == "masked":
        values[0, ::2] = -float("inf")
    if kind == "tied":
        values[0, :] = 1.5
    if kind == "certain":
        values[0, 1] = 300.0
    if kind == "shifted":
        values += 500.0
    return values


@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("width", [4, 48, 1000])
@pytest.mark.parametrize("kind", ["plain", "masked", "tied", "certain", "shifted"])
def test_features_of_one_row_are_those_of_rows(kind: str, width: int, temperature: float, dtype: torch.dtype) -> None:
    raw = logits(kind, width, dtype)
    scores = raw + torch.rand(1, width, generator=torch.Generator().manual_seed(1), dtype=dtype)
    token = int(scores.argmax())
    rows = Rows(raw, temperature, scores, torch.tensor([token]), raw.new_tensor([-1.25]), 3)
    one = Row(raw, temperature, scores, token, -1.25, 3)
    found = compute_row(NODE, one)
    near = FAR if kind == "shifted" and dtype == torch.float32 else NEAR[dtype]
    np.testing.assert_allclose(found, compute(NODE, rows)[0].numpy(), rtol=near, atol=near)


def test_one_row_is_laid_out_as_many_are() -> None:
    for names in (NAMES, ("top1", "mean_full", "anchor_top1"), ("anchor_prob",), ("depth",), ()):
        layout = Layout(names)
        base = torch.rand(1, len(layout.anchor) + len(layout.history))
        nodes = torch.rand(1, len(layout.node))
        for part in (None, nodes):
            one = layout.step_one(base[0].tolist(), None if part is None else part[0].tolist())
            assert one == layout.step(base, part)[0].tolist()


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
