"""The stop rules of chains on probabilities made by hand, and their JSON form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from feature_head import kept_by
from specstop.policies.errors import PolicyError
from specstop.policies.learned import build_rule
from specstop.policies.rules import Derived, Threshold
from specstop.train.fit.rules import derived_thresholds


@pytest.mark.parametrize("seed", range(6))
def test_the_derived_rule_keeps_where_some_look_ahead_pays(seed: int) -> None:
    """Against the maximum over m of S next (1 + a_{j+2} + ...) - rho (cost(j + m) - cost(j))."""
    chance = np.random.default_rng(seed)
    depth = 6
    costs = np.sort(chance.random(depth + 1)) + chance.random(depth + 1) * 0.3
    a, rho = chance.random(depth + 1), chance.random() * 2 + 0.2
    rule = Derived(derived_thresholds(rho, costs, a.tolist()))
    kept = 0
    for j in range(depth):
        for _ in range(60):
            survival, next_ = chance.random() if j else 1.0, float(np.float32(chance.random()))
            best = -math.inf
            for m in range(1, depth - j + 1):
                run = sum(math.prod(a[j + 1 + i] for i in range(n)) for n in range(m))
                best = max(best, survival * next_ * run - rho * (costs[j + m] - costs[j]))
            keep = bool(kept_by(rule, j, np.array([[survival]]), np.ones((1, 1)), np.array([[next_]])))
            assert keep == (best > 0)
            kept += keep
    assert 0 < kept < 60 * depth


def test_step_reads_accept_and_survival_reads_the_product() -> None:
    before, accept = np.array([[0.5, 1.0, 1.0]]), np.array([[0.75, 0.5, 0.25]])
    assert kept_by(Threshold("step", 0.5), 3, before, accept, accept).tolist() == [[True, True, False]]
    assert kept_by(Threshold("step", 0.5), 3, np.ones((1, 3)), accept, accept).tolist() == [[True, True, False]]
    assert kept_by(Threshold("survival", 0.5), 3, before, accept, accept).tolist() == [[False, True, False]]
    assert kept_by(Threshold("survival", 0.25), 3, before, accept, accept).tolist() == [[True, True, True]]


@pytest.mark.parametrize(
    "rule",
    [
        Threshold("step", 0.3), Threshold("survival", 1.0), Derived([0.1, -2.0]), Derived([0.3], 1),
        Derived([0.3], 1, [(1, None), (4, 2)], [(1, 1.0), (4, 1.5)]),
    ],
    ids=["step", "survival", "derived", "derived from 1", "derived by batch size"],
)  # fmt: skip
def test_a_rule_is_made_again_from_its_dictionary(rule: Any) -> None:
    again = build_rule(rule.to_dict())
    assert again.to_dict() == rule.to_dict()
    assert again.first == rule.first


def test_thresholds_are_multiplied_by_the_size_of_each_streams_batch() -> None:
    rule = Derived([0.2, 0.4], 1, scales=[(2, 1.5), (4, 2.5)])
    batch = np.array([0, 1, 0, -1, 2, 2, 2, 2, 2, 0])  # 0 has three streams, 1 one, 2 five
    assert rule.threshold_at(0, batch)[batch >= 0] == pytest.approx(
        0.2 * np.array([2.0, 1.5, 2.0, 2.5, 2.5, 2.5, 2.5, 2.5, 2.0])
    )
    assert rule.threshold_at(3, batch)[:2] == pytest.approx([0.8, 0.6]), "beyond the last depth that one holds"
    assert Derived([0.2, 0.4], 1).threshold_at(1, batch).tolist() == [0.4]


@pytest.mark.parametrize("times", [[(2, 1.0), (1, 1.0)], [(0, 1.0)], [(1, 0.0)], [(1, math.inf)], [(1, math.nan)]])
def test_times_are_of_rising_sizes_and_above_0(times: list[tuple[int, float]]) -> None:
    with pytest.raises(PolicyError, match="streams rising"):
        Derived([0.2], scales=times)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"kind": "guess"},
            "unknown rule 'guess'; expected survival, step, any, derived, batch, gain$",
        ),
        ({}, "lacks or mangles 'kind'"),
        ({"kind": "step"}, "lacks or mangles .*'threshold'"),
        ({"kind": "step", "threshold": 1.5}, "between 0 and 1"),
        ({"kind": "survival", "threshold": float("nan")}, "between 0 and 1"),
        ({"kind": "step", "threshold": "x"}, "lacks or mangles"),
        ({"kind": "derived", "thresholds": [], "first": 0}, "one number for each depth"),
        ({"kind": "derived", "thresholds": [float("nan")], "first": 0}, "one number"),
        ({"kind": "derived", "thresholds": 3, "first": 0}, "lacks or mangles"),
        ({"kind": "derived", "thresholds": [0.1], "last": 0}, "lacks or mangles .*'last'"),
        ({"kind": "derived", "thresholds": [0.1], "first": 2}, "first a whole number from 0 to 1"),
        ({"kind": "derived", "thresholds": [0.1], "first": "0"}, "first a whole number"),
        ([], "lacks or mangles"),
    ],
)
def test_a_mangled_rule_is_refused(raw: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        build_rule(raw)
