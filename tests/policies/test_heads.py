"""Heads, calibration and rules against slow numpy references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from specstop.policies.calibration import Calibrator
from specstop.policies.errors import PolicyError
from specstop.policies.features import FEATURES, Kind
from specstop.policies.heads import Basis, LinearHead, MLPHead, TreesHead, build_head
from specstop.policies.heads_trees import MANY, PART
from specstop.policies.rules import Derived, Threshold, build_rule, derived_thresholds

NAMES = ("entropy", "top1", "anchor_top1", "mean_accepted", "mean_full")  # two PRE, one ANCHOR, two HISTORY
PROBABILITIES = [1, 2, 4]
WIDTH = len(NAMES) + len(PROBABILITIES)
NEAR = 1e-4  # float32 sums, and log-odds of float32 probabilities


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def features(*shape: int, seed: int = 5) -> torch.Tensor:
    values = draw(*shape, len(NAMES), seed=seed).abs()
    values[..., PROBABILITIES] = values[..., PROBABILITIES].clamp(0, 2) / 2
    return values


def linear_tensors() -> dict[str, torch.Tensor]:
    return {
        "mean": draw(WIDTH),
        "scale": draw(WIDTH, seed=1).abs() + 0.2,
        "weight": draw(3, WIDTH, seed=2),
        "bias": draw(3, seed=3),
    }


def mlp_tensors() -> dict[str, torch.Tensor]:
    base = {k: v for k, v in linear_tensors().items() if k in ("mean", "scale")}
    sizes = [(6, WIDTH + 1), (4, 6), (2, 4)]
    layers = {f"weight.{i}": draw(*s, seed=10 + i) for i, s in enumerate(sizes)}
    return {**base, **layers, **{f"bias.{i}": draw(s[0], seed=20 + i) for i, s in enumerate(sizes)}}


def trees_tensors(trees: int = 5, depth: int = 3) -> dict[str, torch.Tensor]:
    inner = 2**depth - 1
    generator = torch.Generator().manual_seed(4)
    return {
        "feature": torch.randint(0, len(NAMES), (2, trees, inner), generator=generator),
        "threshold": torch.rand(2, trees, inner, generator=generator),
        "missing_left": torch.rand(2, trees, inner, generator=generator) < 0.5,
        "leaf": draw(2, trees, 2**depth), "base": draw(2, seed=9),
    }  # fmt: skip


def resnet_tensors(blocks: int = 2, width: int = 6) -> dict[str, torch.Tensor]:
    base = {k: v for k, v in linear_tensors().items() if k in ("mean", "scale")}
    return {
        **base,
        "enter.weight": draw(width, WIDTH + 1, seed=33), "enter.bias": draw(width, seed=34),
        "block.weight": 0.5 * draw(blocks, width, width, seed=35), "block.bias": draw(blocks, width, seed=36),
        "leave.weight": 0.2 * draw(2, width, seed=37), "leave.bias": draw(2, seed=38),
    }  # fmt: skip


TENSORS = {"logistic": linear_tensors, "mlp": mlp_tensors, "xgboost": trees_tensors, "resnet": resnet_tensors}
"""Kinds that any scalar features will do for."""


def slow_basis(x: np.ndarray, depth: int, tensors: dict[str, Any]) -> np.ndarray:
    """Standardised features and log-odds; at depth 0 only what is known before drafting."""
    known = [FEATURES[n].kind in (Kind.ANCHOR, Kind.HISTORY) or depth > 0 for n in NAMES]
    edge = float(np.float32(1) - np.float32(1e-6))
    probs = [min(max(float(x[i]), 1e-6), edge) for i in PROBABILITIES]
    columns = [*x, *(math.log(p / (1 - p)) for p in probs)]
    scaled = (np.array(columns) - tensors["mean"].numpy()) / tensors["scale"].numpy()
    return scaled * [*known, *(known[i] for i in PROBABILITIES)]


def slow_linear(x: np.ndarray, depth: int, t: dict[str, Any]) -> list[float]:
    scores = t["weight"].numpy() @ slow_basis(x, depth, t) + t["bias"].numpy()
    return [scores[0], scores[2] if depth == 0 else scores[1]]


def slow_mlp(x: np.ndarray, depth: int, t: dict[str, Any]) -> list[float]:
    hidden = np.append(slow_basis(x, depth, t), float(depth == 0))
    for i in range(3):
        hidden = t[f"weight.{i}"].numpy() @ hidden + t[f"bias.{i}"].numpy()
        if i < 2:
            hidden = hidden / (1 + np.exp(-hidden))
    return hidden.tolist()


def slow_trees(x: np.ndarray, depth: int, t: dict[str, Any]) -> list[float]:
    sums = t["base"].tolist()
    for output in range(2):
        for tree in range(t["leaf"].shape[1]):
            node, inner = 0, t["feature"].shape[2]
            while node < inner:
                value, limit = (
                    x[int(t["feature"][output, tree, node])],
                    float(t["threshold"][output, tree, node]),
                )
                left = bool(t["missing_left"][output, tree, node]) if math.isnan(value) else value < limit
                node = 2 * node + (1 if left else 2)
            sums[output] += float(t["leaf"][output, tree, node - inner])
    return sums


def slow_resnet(x: np.ndarray, depth: int, t: dict[str, Any]) -> list[float]:
    a = {name: value.double().numpy() for name, value in t.items()}
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
    x = features(7, 3)
    logits = head.logits(x, depth)
    assert logits.shape == (7, 3, 2)
    for s in range(7):
        for b in range(3):
            expected = SLOW[kind](x[s, b].numpy(), depth, tensors)
            assert logits[s, b].tolist() == pytest.approx(expected, rel=NEAR, abs=NEAR)


@pytest.mark.parametrize("kind", ["logistic", "mlp", "resnet"])
def test_what_is_not_known_at_depth_0_does_not_matter_there(kind: str) -> None:
    head = build_head(kind, NAMES, TENSORS[kind]())
    x, y = features(4), features(4)
    y[..., :2] = 0.77
    assert torch.equal(head.logits(x, 0)[..., 1], head.logits(y, 0)[..., 1])
    assert not torch.equal(head.logits(x, 1)[..., 1], head.logits(y, 1)[..., 1])


def test_the_basis_at_depth_0_is_0_where_nothing_is_known() -> None:
    tensors = linear_tensors()
    basis = Basis(NAMES, tensors["mean"], tensors["scale"])
    x = features(6)
    for depth in (0, 1, 3):
        expected = np.stack([slow_basis(row.numpy(), depth, tensors) for row in x])
        np.testing.assert_allclose(basis(x, depth).numpy(), expected, rtol=NEAR, atol=NEAR)
    assert not basis(x, 0)[:, [0, 1, 5]].any()


@pytest.mark.parametrize("first", [False, True])
def test_folded_weights_do_on_raw_columns_what_the_weights_do_on_the_basis(first: bool) -> None:
    tensors = linear_tensors()
    basis = Basis(NAMES, tensors["mean"], tensors["scale"])
    weight, bias = basis.fold(tensors["weight"], tensors["bias"], first)
    x = features(6)
    expected = basis(x, 0 if first else 1) @ tensors["weight"].T + tensors["bias"]
    torch.testing.assert_close(basis.expand(x) @ weight.T + bias, expected, rtol=NEAR, atol=NEAR)


def test_a_hand_made_tree_sends_rows_left_below_the_threshold_and_unknown_ones_where_it_says() -> None:
    """Two trees of depth 1 for each output; the second output's send unknown values left."""
    head = TreesHead(("entropy", "top1"), {
        "feature": torch.tensor([[[0], [1]], [[0], [1]]]),
        "threshold": torch.tensor([[[0.5], [0.25]], [[0.5], [0.25]]]),
        "missing_left": torch.tensor([[[False], [False]], [[True], [True]]]),
        "leaf": torch.tensor([[[1.0, 2.0], [10.0, 20.0]], [[3.0, 4.0], [30.0, 40.0]]]),
        "base": torch.tensor([100.0, 200.0]),
    })  # fmt: skip
    nan = float("nan")
    logits = head.logits(torch.tensor([[0.4, 0.2], [0.5, 0.25], [0.6, nan], [nan, 0.0]]), 1)
    accept, following = logits.unbind(-1)
    assert accept.tolist() == [111.0, 122.0, 122.0, 112.0]
    assert following.tolist() == [233.0, 244.0, 234.0, 233.0]


def test_no_tree_at_all_is_the_base() -> None:
    empty = {k: v[:, :0] if v.dim() > 1 else v for k, v in trees_tensors().items()}
    logits = TreesHead(NAMES, empty).logits(features(3), 1)
    assert logits.shape == (3, 2)
    torch.testing.assert_close(logits, empty["base"].expand(3, 2))


@pytest.mark.parametrize(("trees", "depth"), [(5, 3), (7, 0), (9, 5)])
@pytest.mark.parametrize("unknown", ["left and right", "left"])
def test_many_rows_score_as_few_do(trees: int, depth: int, unknown: str) -> None:
    tensors = trees_tensors(trees, depth)
    if unknown == "left":
        tensors["missing_left"][:] = True
    head = TreesHead(NAMES, tensors)
    rows = features(2 * PART + 3, seed=8)
    rows[::7, 1] = float("nan")
    few = torch.cat([head.logits(row[None], 1) for row in rows])
    assert torch.equal(head.logits(rows, 1), few)
    assert torch.equal(head.logits(rows[: MANY + 1], 1), few[: MANY + 1])


@pytest.mark.parametrize("kind", list(TENSORS))
def test_a_head_is_made_again_from_its_tensors(kind: str) -> None:
    head = build_head(kind, NAMES, TENSORS[kind]())
    again = build_head(kind, NAMES, head.tensors())
    for depth in (0, 2):
        assert torch.equal(head.logits(features(5), depth), again.logits(features(5), depth))


def replaced(kind: str, name: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = {**TENSORS[kind](), **({} if value is None else {name: value})}
    if value is None:
        del tensors[name]
    return tensors


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("logistic", "bias", None, "missing or unknown: bias"),
        ("logistic", "colour", torch.zeros(1), "missing or unknown: colour"),
        ("logistic", "bias", torch.zeros(2), r"bias of shape \[3\], got \[2\]"),
        ("logistic", "mean", torch.zeros(9), r"mean of shape \[8\], got \[9\]"),
        ("logistic", "weight", torch.full((3, WIDTH), float("nan")), "weight has values that are not finite"),
        ("mlp", "weight.0", torch.zeros(6, WIDTH), r"weight.0 of shape \[6, 9\]"),
        ("mlp", "bias.1", None, "missing or unknown: bias.1"),
        ("mlp", "weight.2", torch.zeros(3, 4), r"weight.2 of shape \[2, 4\]"),
        ("xgboost", "leaf", torch.zeros(2, 5, 7), "weights: expected"),
        ("xgboost", "threshold", torch.zeros(2, 5, 6), "threshold of shape"),
        ("xgboost", "base", torch.zeros(3), "base of shape"),
        ("xgboost", "feature", torch.full((2, 5, 7), 5), r"feature outside 0\.\.4"),
        ("xgboost", "feature", torch.full((2, 5, 7), -1), "outside"),
        ("xgboost", "feature", torch.zeros(2, 5, 7), "feature"),
    ],
)
def test_wrong_names_shapes_or_numbers_are_refused(
    kind: str, name: str, value: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        build_head(kind, NAMES, replaced(kind, name, value))


def test_an_mlp_needs_two_outputs_and_a_layer() -> None:
    base = {"mean": torch.zeros(WIDTH), "scale": torch.ones(WIDTH)}
    for more in ({}, {"weight.0": torch.zeros(3, WIDTH + 1), "bias.0": torch.zeros(3)}):
        with pytest.raises(PolicyError, match="mlp head: expected 2 outputs"):
            MLPHead(NAMES, {**base, **more})


def test_an_unknown_head_is_refused() -> None:
    with pytest.raises(PolicyError, match="unknown head 'forest'; expected one of logistic, mlp, xgboost"):
        build_head("forest", NAMES, {})
    assert isinstance(build_head("logistic", NAMES, linear_tensors()), LinearHead)


# Calibration


def knots(seed: int = 0, n: int = 7) -> torch.Tensor:
    return torch.stack(
        [
            draw(n, seed=seed).sort().values * 3,
            torch.rand(n, generator=torch.Generator().manual_seed(seed)).sort().values,
        ]
    )


MAPS = [
    Calibrator(),
    Calibrator("temperature", 2.5),
    Calibrator("isotonic", knots=knots()),
    Calibrator("isotonic", knots=knots(1, 2)),
]


@pytest.mark.parametrize("calibrate", MAPS, ids=lambda c: f"{c.kind}-{c.knots.shape[1]}")
def test_calibration_is_monotone_and_between_0_and_1(calibrate: Calibrator) -> None:
    x = torch.linspace(-40, 40, 2001)
    y = calibrate(x)
    assert bool((y.diff() >= 0).all())
    assert 0 <= float(y.min()) < float(y.max()) <= 1
    assert torch.equal(calibrate(x.view(3, -1)), y.view(3, -1))


def test_temperature_divides_the_logit() -> None:
    x = torch.tensor([-3.0, 0.0, 2.0])
    assert Calibrator("temperature", 2.0)(x).tolist() == pytest.approx([1 / (1 + math.exp(-v / 2)) for v in x.tolist()])
    assert Calibrator()(x).tolist() == pytest.approx([1 / (1 + math.exp(-v)) for v in x.tolist()])


@pytest.mark.parametrize("seed", range(4))
def test_isotonic_interpolates_as_numpy_does(seed: int) -> None:
    table = knots(seed)
    x = torch.cat([torch.linspace(-12, 12, 301), table[0]])
    expected = np.interp(x.double().numpy(), table[0].double().numpy(), table[1].double().numpy())
    np.testing.assert_allclose(Calibrator("isotonic", knots=table)(x).numpy(), expected, atol=1e-5)


def test_isotonic_steps_are_as_sharp_as_the_data_they_were_fitted_on() -> None:
    """Blocks of an isotonic fit end and begin at neighbouring logits; gaps of 1e-6 occur among many."""
    edges = torch.linspace(-8, 8, 51)
    x = torch.stack([edges, torch.nextafter(edges + 1e-6, edges + 1)], 1).flatten()
    y = torch.linspace(0, 1, 52).repeat_interleave(2)[1:-1]
    found = Calibrator("isotonic", knots=torch.stack([x, y]))(x)
    np.testing.assert_allclose(found.numpy(), y.numpy(), atol=1e-3)
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


@pytest.mark.parametrize(
    ("kind", "temperature", "table"),
    [
        ("platt", 1.0, None),
        ("temperature", 0.0, None),
        ("temperature", -1.0, None),
        ("temperature", float("nan"), None),
        ("isotonic", 1.0, None),
        ("isotonic", 1.0, torch.zeros(2, 1)),
        ("isotonic", 1.0, torch.zeros(3, 4)),
        ("isotonic", 1.0, torch.tensor([[1.0, 0.0], [0.0, 1.0]])),
        ("isotonic", 1.0, torch.tensor([[0.0, 1.0], [1.0, 0.0]])),
        ("isotonic", 1.0, torch.tensor([[0.0, 1.0], [0.0, float("nan")]])),
        ("isotonic", 1.0, torch.tensor([[0.0, 1.0], [0.0, 1.5]])),
    ],
)
def test_a_calibration_that_is_no_monotone_map_to_probabilities_is_refused(
    kind: str, temperature: float, table: torch.Tensor | None
) -> None:
    with pytest.raises(PolicyError, match="calibration"):
        Calibrator(kind, temperature, table)


# Rules


@pytest.mark.parametrize("seed", range(6))
def test_the_derived_rule_keeps_where_some_look_ahead_pays(seed: int) -> None:
    """Against the maximum over m of S next (1 + a_{j+2} + ...) - rho (cost(j + m) - cost(j))."""
    chance = np.random.default_rng(seed)
    depth = 6
    costs = np.sort(chance.random(depth + 1)) + chance.random(depth + 1) * 0.3
    a, rho = chance.random(depth + 1), chance.random() * 2 + 0.2
    rule = Derived(derived_thresholds(rho, torch.tensor(costs), a.tolist()))
    kept = 0
    for j in range(depth):
        for _ in range(60):
            survival, following = chance.random(2)
            best = -math.inf
            for m in range(1, depth - j + 1):
                run = sum(math.prod(a[j + 1 + i] for i in range(n)) for n in range(m))
                best = max(best, survival * following * run - rho * (costs[j + m] - costs[j]))
            keep = bool(rule.keep(j, torch.tensor(0.5), torch.tensor(survival), torch.tensor(following)))
            assert keep == (best > 0)
            kept += keep
    assert 0 < kept < 60 * depth


def test_step_reads_accept_and_survival_reads_the_product() -> None:
    accept, survival = torch.tensor([0.9, 0.5, 0.4]), torch.tensor([0.4, 0.5, 0.9])
    assert Threshold("step", 0.5).keep(3, accept, survival, accept * 0).tolist() == [True, True, False]
    assert Threshold("survival", 0.5).keep(3, accept, survival, accept * 0).tolist() == [False, True, True]


@pytest.mark.parametrize(
    "rule",
    [Threshold("step", 0.3), Threshold("survival", 1.0), Derived([0.1, -2.0]), Derived([0.3], 1)],
    ids=["step", "survival", "derived", "derived from 1"],
)
def test_a_rule_is_made_again_from_its_dictionary(rule: Any) -> None:
    again = build_rule(rule.to_dict())
    assert again.to_dict() == rule.to_dict()
    assert again.first == rule.first


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"kind": "guess"}, "unknown rule 'guess'; expected step, survival, any, derived"),
        ({}, "lacks or mangles 'kind'"),
        ({"kind": "step"}, "lacks or mangles 'threshold'"),
        ({"kind": "step", "threshold": 1.5}, "between 0 and 1"),
        ({"kind": "survival", "threshold": float("nan")}, "between 0 and 1"),
        ({"kind": "step", "threshold": "x"}, "lacks or mangles"),
        ({"kind": "derived", "thresholds": [], "first": 0}, "one number for each depth"),
        ({"kind": "derived", "thresholds": [float("nan")], "first": 0}, "one number"),
        ({"kind": "derived", "thresholds": 3, "first": 0}, "lacks or mangles"),
        ({"kind": "derived", "thresholds": [0.1]}, "lacks or mangles 'first'"),
        ({"kind": "derived", "thresholds": [0.1], "first": 2}, "expected first to be a depth up to 1, not 2"),
        ({"kind": "derived", "thresholds": [0.1], "first": "0"}, "expected first to be a depth up to 1, not '0'"),
        ([], "lacks or mangles"),
    ],
)
def test_a_mangled_rule_is_refused(raw: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        build_rule(raw)
