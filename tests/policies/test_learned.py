"""Learned policies on chains and trees of branches: calibration, survival along parents, stop rules, recalibration."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from head_tensors import DRAFT, NAMES, TENSORS, draw, feature_policy, features, kept_by, knots, random_policy, zeros
from specstop.decode.device_policies import calibrated
from specstop.policies.contract import Array
from specstop.policies.errors import PolicyError
from specstop.policies.heads import build_head
from specstop.policies.learned import Calibrator, LearnedPolicy, SurvivalMaps, build_rule
from specstop.policies.rules import BatchRule, Derived, Rule, Threshold
from specstop.train.fit.rules import derived_thresholds
from steps import draft_step
from trees import make_tree_policy

# Calibration


@pytest.mark.parametrize(
    "calibrator",
    [
        Calibrator(), Calibrator("temperature", 2.5),
        *(Calibrator("isotonic", knots=knots(seed, n)) for seed, n in ((0, 7), (1, 2), (2, 7), (3, 7))),
    ],
    ids=lambda c: f"{c.kind}-{c.knots.shape[1]}",
)  # fmt: skip
def test_a_calibration_map_is_its_closed_form_and_monotone(calibrator):
    x = np.concatenate([np.linspace(-40, 40, 2001), calibrator.knots[0]])
    if calibrator.kind == "isotonic":
        expected = np.interp(x, *calibrator.knots.astype(np.float64))
    else:
        expected = 1 / (1 + np.exp(-x / calibrator.temperature))
    np.testing.assert_allclose(calibrator(x), expected, atol=1e-5)
    scores = np.append(x, np.nan)
    on_device = calibrated(torch.from_numpy(scores), torch.from_numpy(calibrator.pieces))
    np.testing.assert_allclose(on_device, calibrator(scores), rtol=1e-12)
    y = calibrator(x[:2001])
    assert (np.diff(y) >= 0).all() and 0 <= y.min() < y.max() <= 1
    assert np.array_equal(calibrator(x[:2001].reshape(3, -1)), y.reshape(3, -1))


def test_isotonic_steps_are_as_sharp_as_the_fitted_data():
    """Blocks of an isotonic fit end and begin at neighbouring logits; gaps of 1e-6 occur among many."""
    edges = np.linspace(-8, 8, 51, dtype=np.float32)
    x = np.stack([edges, np.nextafter(edges + np.float32(1e-6), edges + 1)], 1).reshape(-1)
    y = np.linspace(0, 1, 52, dtype=np.float32).repeat(2)[1:-1]
    np.testing.assert_allclose(Calibrator("isotonic", knots=np.stack([x, y]))(x), y, atol=1e-3)


# Survival


@pytest.mark.parametrize("first", [0, 1])
def test_survival_is_the_product_along_the_parents_of_live_branches(first):
    rng, widths, rule, expected = np.random.default_rng(first), (1, 3, 4, 3), Rule(), np.ones((7, 1))
    rule.first = first
    policy = feature_policy(rule, 4)
    state = policy.start(7, np.arange(7))
    for depth in range(first, 4):
        shape = (7, widths[depth])
        parent = rng.integers(0, widths[depth - 1] if depth > 1 else 1, shape)
        alive, accept = rng.random(shape) < (0.7 if depth else 1.0), rng.random(shape) if depth else np.ones(shape)
        features = np.stack([accept, np.full(shape, 0.5)], -1) * alive[..., None]
        kept, state = policy.keep(draft_step(depth, features, alive, parent), state)
        expected = (np.take_along_axis(expected, parent, 1) if depth > 1 else 1.0) * accept * alive
        assert np.array_equal(kept, alive)
        np.testing.assert_allclose(state, expected, rtol=1e-6)


def test_a_lagging_head_scores_the_token_before():
    """S at depth j is the product over x_1 .. x_{j-1}: SpecDec++'s sum starts at the second step."""
    policy, state, product = random_policy("specdec", Threshold("survival", 0.9999)), None, np.ones(7)
    for depth in range(1, 5):
        hidden = draw(7, 1, DRAFT, seed=depth)
        kept, state = policy.keep(draft_step(depth, zeros(7, 1, 0), hidden={"draft_hidden": hidden}), state)
        if depth == 1:
            assert kept.all(), "at least two tokens are drafted"
        else:
            product *= policy.accept(policy.head.scores(zeros(7, 0), depth, {"draft_hidden": hidden[:, 0]}))[:, 0]
        np.testing.assert_allclose(state[:, 0], product, rtol=1e-6)


# Recalibration of survival by depth

DEPTH, KNOTS = 4, 33


def survival_tables(starts: int = 3, depth: int = DEPTH, power: float = 0.0) -> Array:
    """Return tables [L, K, 2, n]: S^(1 + power (depth + start)), the identity at depth 2 and with power 0."""
    grid = np.linspace(0.0, 1.0, KNOTS, dtype=np.float32)
    tables = np.broadcast_to(grid, (starts, depth, 2, KNOTS)).copy()
    for start in range(starts):
        for at in (d for d in range(depth) if d != 1):
            tables[start, at, 1] = grid ** (1.0 + power * (at + 1 + start))
    return tables


@pytest.mark.parametrize("power", [0.0, 0.2])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_each_depth_is_recalibrated_before_the_next_factor(first, power):
    maps, head = SurvivalMaps(survival_tables(power=power)), build_head("logistic", NAMES, TENSORS["logistic"])
    rule = Derived([0.1] * DEPTH, first)
    policy = LearnedPolicy("mine", NAMES, head, Calibrator(), Calibrator(), rule, DEPTH, survival=maps)
    assert maps.changed == ([1, 3, 4] if power else [])
    x, survival, start, grid = features(5, DEPTH + 1), np.ones(5), max(first, 1), np.linspace(0, 1, KNOTS)
    state, alone = policy.start(5, np.arange(5)), policy.start(1, np.arange(1))
    for depth in range(first, DEPTH + 1):
        _, state = policy.keep(draft_step(depth, x[:, depth, None]), state)
        _, alone = policy.keep(draft_step(depth, x[2:3, depth, None]), alone)
        if depth:
            survival = survival * policy.probabilities(x[:, depth], depth)[0]
        if depth and depth != 2:
            survival = np.interp(survival, grid, grid ** (1.0 + power * (depth + start - 1)))
        np.testing.assert_allclose(state[:, 0], survival, atol=1e-6, rtol=1e-6)
        assert np.array_equal(alone, state[2:3])


# Stop rules


@pytest.mark.parametrize("seed", range(4))
def test_the_derived_rule_continues_while_some_look_ahead_pays(seed):
    """Against the maximum over m of S next (1 + a_{j+2} + ...) - rho (cost(j + m) - cost(j))."""
    rng, depth = np.random.default_rng(seed), 6
    costs = np.sort(rng.random(depth + 1)) + rng.random(depth + 1) * 0.3
    a, rho = rng.random(depth + 1), rng.random() * 2 + 0.2
    rule = Derived(derived_thresholds(rho, costs, a.tolist()))
    kept = 0
    for j in range(depth):
        for _ in range(60):
            survival, next_ = rng.random() if j else 1.0, float(np.float32(rng.random()))
            best = -math.inf
            for m in range(1, depth - j + 1):
                run = sum(math.prod(a[j + 1 + i] for i in range(n)) for n in range(m))
                best = max(best, survival * next_ * run - rho * (costs[j + m] - costs[j]))
            keep = bool(kept_by(rule, j, np.array([[survival]]), np.ones((1, 1)), np.array([[next_]])))
            assert keep == (best > 0)
            kept += keep
    assert 0 < kept < 60 * depth


def test_threshold_rules_compare_accept_survival_or_the_best_branch():
    before, accept = np.array([[0.5, 1.0, 1.0]]), np.array([[0.75, 0.5, 0.25]])
    for rule, survival, expected in (
        (Threshold("step", 0.5), before, [True, True, False]), (Threshold("step", 0.5), np.ones((1, 3)), [True, True, False]),
        (Threshold("survival", 0.5), before, [False, True, False]), (Threshold("survival", 0.25), before, [True] * 3),
        (Threshold("any", 0.375), before, [True] * 3), (Threshold("any", 0.75), before, [False] * 3),
    ):  # fmt: skip
        assert kept_by(rule, 3, survival, accept, accept).tolist() == [expected]


def test_a_dead_branch_has_no_vote():
    """A dead branch contains zeros, which may have any score."""
    tensors = {"weight.0": zeros(1, DRAFT), "bias.0": zeros(1) + 1, "first": zeros(1)}
    tensors["weight.0"][0, 0] = -1.0
    head = build_head("dynasd-soft", (), tensors)
    policy = LearnedPolicy("d", (), head, Calibrator(), Calibrator(), Threshold("any", 0.4), 4)
    hidden = zeros(2, 3, DRAFT)
    hidden[:, 1:, 0] = 9.0  # a score of sigmoid(-8); zeros have sigmoid(1)
    step = draft_step(2, zeros(2, 3, 0), [[False, True, True], [True] * 3], hidden={"draft_hidden": hidden})
    assert policy.keep(step, np.ones((2, 3)))[0].tolist() == [[False] * 3, [True] * 3]


def altered(rule: Rule, **entries: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(rule.to_dict())), **entries}


DERIVED, TREE = Derived([0.1]), make_tree_policy().rule
BAD_RATES: list[Any] = [[(2, 1.0), (1, 1.0)], [(0, 1.0)], [(1, math.nan)], "none"]


@pytest.mark.parametrize(
    ("raw", "noun"),
    [
        ({"kind": "guess"}, "guess"), ([], "rule"), ({"kind": "step", "threshold": 1.5}, "threshold"),
        ({"kind": "survival", "threshold": math.nan}, "threshold"), (altered(DERIVED, thresholds=[]), "depth"),
        (altered(DERIVED, first=2), "first"),
        *((altered(DERIVED, scales=rates), "rule") for rates in BAD_RATES),
        *((altered(BatchRule(), lengths=lengths), "rule") for lengths in ([(8, 1), (2, 1)], [(0, 1)], [(2, -1)])),
        (altered(BatchRule(), send="some"), "send"),
        *((altered(TREE, **{name: value}), "gain") for name, value in (
            ("rate", math.nan), ("verify_s", [-1.0]), ("shares", [(1.0,)]), ("children", [[3], [1]]), ("unknown", 1))),
    ],
)  # fmt: skip
def test_an_invalid_rule_is_refused(raw, noun):
    for valid in (DERIVED, TREE, BatchRule()):
        assert build_rule(altered(valid)).to_dict() == valid.to_dict()
    with pytest.raises(PolicyError, match=noun):
        build_rule(raw)
