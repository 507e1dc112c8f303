"""Heads, calibration and rules against slow numpy references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import xgboost
from feature_head import with_ranges
from head_tensors import (
    HIGH,
    LOW,
    NAMES,
    NEAR,
    PROBABILITIES,
    TENSORS,
    WIDTH,
    Array,
    features,
    linear_tensors,
    mlp_tensors,
    slow_basis,
    trees_tensors,
    zeros,
)
from specstop.policies.errors import PolicyError
from specstop.policies.heads import HEADS, build_head
from specstop.policies.heads.base import Basis
from specstop.policies.heads.layers import LinearHead, MLPHead
from specstop.policies.heads.tables import TreesHead
from specstop.train.heads.base import basis_columns


def slow_linear(x: Array, depth: int, t: dict[str, Array]) -> list[float]:
    scores = t["weight"] @ slow_basis(x, depth, t) + t["bias"]
    return [scores[0], scores[2] if depth == 0 else scores[1]]


def slow_mlp(x: Array, depth: int, t: dict[str, Array]) -> list[float]:
    hidden = np.append(slow_basis(x, depth, t), float(depth == 0))
    for i in range(3):
        hidden = t[f"weight.{i}"] @ hidden + t[f"bias.{i}"]
        if i < 2:
            hidden = hidden / (1 + np.exp(-hidden))
    return hidden.tolist()


def slow_trees(x: Array, depth: int, t: dict[str, Array]) -> list[float]:
    sums = t["base"].tolist()
    for output in range(2):
        for tree in range(t["leaf"].shape[1]):
            node, inner = 0, t["feature"].shape[2]
            while node < inner:
                value, limit = x[t["feature"][output, tree, node]], t["threshold"][output, tree, node]
                left = bool(t["missing_left"][output, tree, node]) if math.isnan(value) else value < limit
                node = 2 * node + (1 if left else 2)
            sums[output] += float(t["leaf"][output, tree, node - inner])
    return sums


def slow_resnet(x: Array, depth: int, t: dict[str, Array]) -> list[float]:
    a = {name: value.astype(np.float64) for name, value in t.items()}
    h = a["enter.weight"] @ np.append(slow_basis(x, depth, t), float(depth == 0)) + a["enter.bias"]
    for weight, bias in zip(a["block.weight"], a["block.bias"], strict=True):
        z = weight @ h + bias
        h = h + z / (1 + np.exp(-z))
    return (a["leave.weight"] @ h + a["leave.bias"]).tolist()


SLOW = {"logistic": slow_linear, "mlp": slow_mlp, "xgboost": slow_trees, "resnet": slow_resnet}


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("kind", list(TENSORS))
def test_a_head_scores_as_its_slow_reference(kind: str, depth: int) -> None:
    tensors = TENSORS[kind]()
    head = build_head(kind, NAMES, tensors)
    x = features(21)
    x[:3, PROBABILITIES] = np.array([0.0, 1.0, 0.5], dtype=np.float32)[:, None]
    if kind == "xgboost":
        x[np.random.default_rng(2).random(x.shape) < 0.3] = np.nan
    scores = head.scores(x, depth)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, [SLOW[kind](row, depth, tensors) for row in x], rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("kind", ["logistic", "mlp", "resnet"])
def test_what_is_not_known_at_depth_0_does_not_matter_there(kind: str) -> None:
    head = build_head(kind, NAMES, TENSORS[kind]())
    x, y = features(4), features(4)
    y[..., :2] = 0.77
    assert np.array_equal(head.scores(x, 0)[..., 1], head.scores(y, 0)[..., 1])
    assert not np.array_equal(head.scores(x, 1)[..., 1], head.scores(y, 1)[..., 1])


def test_the_basis_at_depth_0_is_0_where_nothing_is_known() -> None:
    tensors = linear_tensors()
    basis = Basis(NAMES, tensors["mean"], tensors["scale"])
    x = features(6)
    for depth in (0, 1, 3):
        expected = np.stack([slow_basis(row, depth, tensors) for row in x])
        found = basis_columns(basis, torch.from_numpy(x), torch.full((len(x),), depth))
        np.testing.assert_allclose(found, expected, rtol=NEAR, atol=NEAR)
        assert depth or not found[:, [0, 1, 5]].any()


@pytest.mark.parametrize("first", [False, True])
def test_folded_weights_do_on_raw_columns_what_the_weights_do_on_the_basis(first: bool) -> None:
    tensors = linear_tensors()
    basis = Basis(NAMES, tensors["mean"], tensors["scale"])
    weight, bias = basis.fold(tensors["weight"], tensors["bias"], first)
    x = features(6)
    depth = torch.full((len(x),), 0 if first else 1)
    expected = basis_columns(basis, torch.from_numpy(x), depth) @ tensors["weight"].T + tensors["bias"]
    np.testing.assert_allclose(basis.expand(x) @ weight.T + bias, expected, rtol=NEAR, atol=NEAR)


def test_silu_of_what_has_no_exponential_is_0_or_the_number() -> None:
    """e^1000 is infinite: no warning, no NaN."""
    tensors = {**mlp_tensors(), "bias.0": np.array([-1e3, 1e3, -1e30, 1e30, 0.0, 0.0], dtype=np.float32)}
    scores = build_head("mlp", NAMES, tensors).scores(features(5), 1)
    assert np.isfinite(scores).all()


@pytest.mark.filterwarnings("error")
def test_what_is_unknown_to_a_sum_makes_it_unknown() -> None:
    x = features(3)
    x[1, 1] = np.nan
    for kind in ("logistic", "mlp", "resnet"):
        scores = build_head(kind, NAMES, TENSORS[kind]()).scores(x, 1)
        assert np.isnan(scores).any(1).tolist() == [False, True, False]


def test_a_hand_made_tree_sends_rows_left_below_the_threshold_and_unknown_ones_where_it_says() -> None:
    """Two trees of depth 1 for each output; the second output's send unknown values left."""
    head = TreesHead(("entropy", "top1"), {
        "feature": np.array([[[0], [1]], [[0], [1]]]),
        "threshold": np.array([[[0.5], [0.25]], [[0.5], [0.25]]], dtype=np.float32),
        "missing_left": np.array([[[False], [False]], [[True], [True]]]),
        "leaf": np.array([[[1.0, 2.0], [10.0, 20.0]], [[3.0, 4.0], [30.0, 40.0]]], dtype=np.float32),
        "base": np.array([100.0, 200.0], dtype=np.float32),
    })  # fmt: skip
    rows = [[0.4, 0.2], [0.5, 0.25], [0.6, math.nan], [math.nan, 0.0]]
    accept, next_ = head.scores(np.array(rows, dtype=np.float32), 1).T
    assert accept.tolist() == [111.0, 122.0, 122.0, 112.0]
    assert next_.tolist() == [233.0, 244.0, 234.0, 233.0]


@pytest.mark.parametrize("depth", [1, 4, 7])
def test_trees_score_as_xgboost_does(depth: int) -> None:
    """A booster grown to the bottom, read node by node from its dump."""
    chance = np.random.default_rng(depth)
    x = features(3000, seed=depth)
    x[chance.random(x.shape) < 0.1] = np.nan
    label = (np.nan_to_num(x[:, 0]) + x[:, 3] > chance.random(len(x)) + 1).astype(np.float32)
    settings = {"max_depth": depth, "eta": 0.3, "objective": "binary:logistic", "base_score": 0.5, "nthread": 1}
    booster = xgboost.train(settings, xgboost.DMatrix(x, label), 20)
    inner = 2**depth - 1
    tensors: dict[str, Array] = {
        "feature": np.zeros((2, 20, inner), dtype=np.int64),
        "threshold": np.zeros((2, 20, inner), dtype=np.float32),
        "missing_left": np.zeros((2, 20, inner), dtype=bool),
        "leaf": np.zeros((2, 20, inner + 1), dtype=np.float32),
        "base": np.zeros(2, dtype=np.float32),
    }
    table = booster.trees_to_dataframe().set_index("ID")
    for tree in range(20):
        stack = [(f"{tree}-0", 0)]
        while stack:
            name, node = stack.pop()
            row = table.loc[name]
            if row.Feature == "Leaf":  # the same for all below it
                first = last = node
                while first < inner:
                    first, last = 2 * first + 1, 2 * last + 2
                tensors["leaf"][:, tree, first - inner : last - inner + 1] = row.Gain
                continue
            tensors["feature"][:, tree, node] = int(row.Feature[1:])
            tensors["threshold"][:, tree, node] = row.Split
            tensors["missing_left"][:, tree, node] = row.Missing == row.Yes
            stack += [(row.Yes, 2 * node + 1), (row.No, 2 * node + 2)]
    scores = build_head("xgboost", NAMES, tensors).scores(x, 1)
    expected = booster.predict(xgboost.DMatrix(x), output_margin=True)
    np.testing.assert_allclose(scores[:, 0], expected, atol=1e-5)
    assert np.array_equal(scores[:, 0], scores[:, 1])


def test_no_tree_at_all_is_the_base() -> None:
    empty = {k: v[:, :0] if v.ndim > 1 else v for k, v in trees_tensors().items()}
    scores = TreesHead(NAMES, empty).scores(features(3), 1)
    assert scores.tolist() == [empty["base"].tolist()] * 3


def test_trees_without_a_split_are_their_leaf() -> None:
    tensors = trees_tensors(7, 0)
    expected = tensors["base"] + tensors["leaf"].astype(np.float64).sum((1, 2))
    np.testing.assert_allclose(TreesHead(NAMES, tensors).scores(features(3), 1), [expected] * 3)


@pytest.mark.parametrize("kind", list(TENSORS))
def test_a_head_is_made_again_from_its_tensors(kind: str) -> None:
    head = build_head(kind, NAMES, TENSORS[kind]())
    again = build_head(kind, NAMES, head.tensors())
    for depth in (0, 2):
        assert np.array_equal(head.scores(features(5), depth), again.scores(features(5), depth))


def test_rows_of_another_width_or_type_are_not_read() -> None:
    """A kernel that read beyond a row would answer with whatever lies there."""
    for kind in ("logistic", "mlp", "xgboost"):
        head = build_head(kind, NAMES, TENSORS[kind]())
        with pytest.raises(ValueError, match="another number of features"):
            head.scores(np.zeros((2, len(NAMES) - 1), dtype=np.float32), 1)
        for wrong in (features(2).astype(np.float64), features(4)[::2], np.asfortranarray(features(2))):
            with pytest.raises(TypeError, match="No matching definition"):
                head.scores(wrong, 1)


# Ranges


@pytest.mark.parametrize("kind", list(TENSORS))
def test_a_feature_counts_as_the_end_of_its_range_that_it_is_beyond(kind: str) -> None:
    plain = build_head(kind, NAMES, TENSORS[kind]())
    ranged = build_head(kind, NAMES, with_ranges(TENSORS[kind](), LOW, HIGH))
    x = features(300)
    x[::3] *= 5
    within = x.clip(LOW, HIGH)
    assert np.array_equal(ranged.scores(x, 2), plain.scores(within, 2))
    assert not np.array_equal(ranged.scores(x, 2), plain.scores(x, 2))
    first = np.concatenate([x[:, :2], within[:, 2:]], 1)  # what is drafted is not known there, and not moved
    assert np.array_equal(ranged.scores(x, 0), plain.scores(first, 0))
    again = build_head(kind, NAMES, ranged.tensors())
    assert np.array_equal(ranged.scores(x, 1), again.scores(x, 1))


def test_what_is_unknown_stays_so_within_its_range() -> None:
    plain = build_head("xgboost", NAMES, trees_tensors())
    ranged = build_head("xgboost", NAMES, with_ranges(trees_tensors(), LOW, HIGH))
    x = features(40).clip(LOW, HIGH)
    x[np.random.default_rng(0).random(x.shape) < 0.5] = np.nan
    assert np.array_equal(ranged.scores(x, 1), plain.scores(x, 1))


def test_a_range_that_is_not_known_is_none() -> None:
    """A feature that was never known in training has neither a least nor a largest."""
    low, high = LOW.copy(), HIGH.copy()
    low[0], high[0], low[3] = np.nan, np.nan, -np.inf
    tensors = with_ranges(trees_tensors(), low, high)
    assert all(np.isfinite(tensors[name]).all() for name in ("low", "high"))
    x = 5 * features(50)
    within = x.clip(np.nan_to_num(low, nan=-np.inf, neginf=-np.inf), np.nan_to_num(high, nan=np.inf))
    plain, ranged = (build_head("xgboost", NAMES, t).scores for t in (trees_tensors(), tensors))
    assert np.array_equal(ranged(x, 1), plain(within, 1))


@pytest.mark.parametrize(
    ("low", "high"),
    [(LOW, None), (LOW[:4], HIGH), (LOW, HIGH.astype(np.float64)), (HIGH, LOW), (LOW, HIGH * np.inf)],
)
def test_invalid_ranges_are_refused(low: Array, high: Array | None) -> None:
    ranges = {"low": low} if high is None else {"low": low, "high": high}
    for kind in TENSORS:
        with pytest.raises(PolicyError, match=r"low|high"):
            build_head(kind, NAMES, {**TENSORS[kind](), **ranges})


# What is refused


def replaced(kind: str, name: str, value: Any) -> dict[str, Any]:
    tensors = {**TENSORS[kind](), **({} if value is None else {name: value})}
    if value is None:
        del tensors[name]
    return tensors


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("logistic", "bias", None),
        ("logistic", "colour", zeros(1)),
        ("logistic", "bias", zeros(2)),
        ("logistic", "bias", [0.0] * 3),
        ("logistic", "mean", zeros(9)),
        ("logistic", "scale", zeros(8)),
        ("logistic", "weight", zeros(3, WIDTH) * np.nan),
        ("mlp", "weight.0", zeros(6, WIDTH)),
        ("mlp", "bias.1", None),
        ("mlp", "bias.1", zeros()),
        ("mlp", "weight.2", zeros(3, 4)),
        ("xgboost", "leaf", zeros(2, 5, 7)),
        ("xgboost", "threshold", zeros(2, 5, 6)),
        ("xgboost", "base", zeros(3)),
        ("xgboost", "feature", np.full((2, 5, 7), 5)),
        ("xgboost", "feature", np.full((2, 5, 7), -1)),
        ("xgboost", "feature", zeros(2, 5, 7)),
        ("xgboost", "missing_left", zeros(2, 5, 7)),
    ],
)
def test_wrong_names_shapes_or_numbers_are_refused(kind: str, name: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=f"{name}|feature|weight"):
        build_head(kind, NAMES, replaced(kind, name, value))


def test_an_mlp_needs_two_outputs_and_a_layer() -> None:
    base = {"mean": zeros(WIDTH), "scale": np.ones(WIDTH, dtype=np.float32)}
    for more in ({}, {"weight.0": zeros(3, WIDTH + 1), "bias.0": zeros(3)}):
        with pytest.raises(PolicyError, match=r"weight\.0"):
            MLPHead(NAMES, {**base, **more})


def test_an_unknown_head_is_refused() -> None:
    kinds = ", ".join(sorted(HEADS))
    assert {"dynasd-hard", "dynasd-soft", "logistic", "mlp", "resnet", "specdec", "tokens", "xgboost"} <= set(HEADS)
    with pytest.raises(PolicyError, match=f"^unknown head 'forest'; expected one of {kinds}$"):
        build_head("forest", NAMES, {})
    assert isinstance(build_head("logistic", NAMES, linear_tensors()), LinearHead)
