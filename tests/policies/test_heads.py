"""Heads against slow references: numpy sums, loops over trees, plain torch modules; and what a head refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import head_tensors as ht
import numpy as np
import pytest
import torch
from head_tensors import HIGH, LOW, NAMES, RANDOM_HEADS, TENSORS, draw, random_head, scalars, zeros
from specstop.decode.device_policies import SCORES, score_function
from specstop.decode.summaries import StateReducer
from specstop.policies.errors import PolicyError
from specstop.policies.features import FEATURES, Kind
from specstop.policies.heads import build_head
from specstop.policies.heads.layers import HARD_FEATURES
from specstop.policies.heads.tables import HashedFeatures, TokenHead
from torch import Tensor

NEAR = 1e-4
"""Float32 weights that are folded, and log-odds of float32 probabilities."""

HIDDEN = [name for name in RANDOM_HEADS if random_head(name)[1].sizes]


def perceptron(x: Tensor, t: dict[str, Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
    count = sum(name.startswith("weight.") for name in t)
    for i in range(count):
        x = x @ t[f"weight.{i}"].T + t[f"bias.{i}"]
        x = activation(x) if i + 1 < count else x
    return x


def residual_outputs(x: Tensor, t: dict[str, Tensor], order: Iterable[int]) -> Tensor:
    """Return the two outputs of SpecDec++'s blocks, as in the paper, and of a last layer."""
    for at in order:
        x = x + torch.nn.functional.silu(x @ t["block.weight"][at].T + t["block.bias"][at])
    return x @ t["leave.weight"].T + t["leave.bias"]


def slow_basis(x: ht.Array, depth: int, tensors: dict[str, ht.Array]) -> ht.Array:
    """Return standardised features and log-odds; at depth 0 those that exist before drafting, 0 for the others."""
    exists = [FEATURES[n].kind in (Kind.ANCHOR, Kind.HISTORY) or depth > 0 for n in NAMES]
    edge = float(np.float32(1) - np.float32(1e-6))
    probs = [min(max(float(x[i]), 1e-6), edge) for i in ht.PROBABILITIES]
    columns = [*x, *(math.log(p / (1 - p)) for p in probs)]
    scaled = (np.array(columns) - tensors["mean"]) / tensors["scale"]
    return np.where([*exists, *(exists[i] for i in ht.PROBABILITIES)], scaled, 0.0)


def slow_trees(x: ht.Array, t: dict[str, ht.Array]) -> list[float]:
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


def slow_tokens(row: ht.Array, depth: int, t: dict[str, ht.Array]) -> list[float]:
    anchor, entropy, drawn, parent = row.tolist()
    scores = []
    for output, weight in ((0, 0), (1, 1 if depth else 2)):
        # At depth 0 the entropy is unknown and counts as its mean.
        value = 0.0 if depth == 0 else (entropy - 0.5) / 2.0
        total = float(t["bias"][output, min(depth, 3)]) + value * float(t["weight"][weight, 0])
        for column, token in enumerate((anchor, drawn, parent)):
            if (column == 0) == (depth == 0) and 0 <= token < ht.TOKENS:
                total += float(t["table"][output, column, int(token)])
        if depth:
            interval = (entropy > 0.25) + (entropy > 0.5)  # an edge belongs to the interval below
            sums = (drawn + 5 * parent, 3 * anchor + drawn + 2 * depth, 4 * interval + drawn)
            total += sum(float(t["hashed"][output, at, int(index) % ht.BUCKETS]) for at, index in enumerate(sums))
        scores.append(total)
    return scores


def reference(name: str, x: ht.Array, hidden: dict[str, ht.Array], depth: int) -> Any:
    """Return [R, 2] of rows [R, F]."""
    kind, names, arrays = RANDOM_HEADS[name]
    if kind == "xgboost":
        return [slow_trees(row, arrays) for row in x]
    if kind == "tokens":
        return [slow_tokens(row, depth, arrays) for row in x]
    t = {key: torch.from_numpy(value) for key, value in arrays.items()}
    states = {key: torch.from_numpy(value) for key, value in hidden.items()}
    rows = torch.from_numpy(x)
    if kind in ("dynasd-soft", "dynasd-hard", "specdec") and depth == 0:
        return t["first"].expand(len(x), 2)
    if kind.startswith("dynasd"):
        return perceptron(rows if names else states["draft_hidden"], t, torch.relu).expand(-1, 2)
    if kind == "specdec":
        logits = residual_outputs(states["draft_hidden"], t, t["order"].tolist())
        return (logits[:, 1] - logits[:, 0])[:, None].expand(-1, 2)
    inputs = torch.full((len(x), 1), float(depth == 0))
    if names:
        inputs = torch.cat(
            [torch.stack([torch.from_numpy(slow_basis(r, depth, arrays)).float() for r in x]), inputs], 1
        )
    if kind == "logistic":
        return (inputs[:, :-1] @ t["weight"].T + t["bias"])[:, [0, 2 if depth == 0 else 1]]
    if kind == "mlp":
        return perceptron(inputs, t, torch.nn.functional.silu)
    entered = inputs @ t["enter.weight"].T + t["enter.bias"]
    for state, values in states.items():
        if depth or state == "target_hidden":
            entered = entered + ((values - t[f"mean.{state}"]) / t[f"scale.{state}"]) @ t[f"enter.{state}"].T
    return residual_outputs(entered, t, range(len(t["block.weight"])))


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("name", RANDOM_HEADS)
def test_scores_equal_a_slow_reference(name, depth):
    names, head = random_head(name)
    x, hidden = scalars(names, 40), {n: h.astype(np.float16) for n, h in ht.hidden_states(name, 40).items()}
    hidden = {state: values.astype(np.float32) for state, values in hidden.items()}
    if names == NAMES:
        x[:3, ht.PROBABILITIES] = np.array([0.0, 1.0, 0.5], dtype=np.float32)[:, None]
        x[3, 1] = np.nan if depth else 0.0  # an unknown feature makes a sum unknown
    if name.startswith("xgboost"):
        x[np.random.default_rng(2).random(x.shape) < 0.3] = np.nan
    scores = head.scores(x, depth, hidden)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, reference(name, x, hidden, depth), rtol=NEAR, atol=NEAR)
    if depth and type(head) in SCORES:
        states = [StateReducer(head.reductions[n])(torch.from_numpy(values)) for n, values in hidden.items()]
        score, near = score_function(head, torch.device("cpu")), NEAR if hidden or name == "resnet" else 1e-12
        np.testing.assert_allclose(score(features=torch.from_numpy(x), states=states, depth=depth), scores, near, near)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", RANDOM_HEADS)
def test_a_row_scores_the_same_in_any_batch(name, depth):
    """To the bit where the arithmetic is ours; a matrix product of a library may add in another order."""
    names, head = random_head(name)
    x, hidden = scalars(names, 600), ht.hidden_states(name, 600)
    exact = RANDOM_HEADS[name][0] not in ("resnet", "dynasd-soft", "specdec")
    if exact and names != ht.TOKEN_NAMES:  # unknown and extreme numbers too
        x[::5, 1], x[1::5, 1], x[2::5, 2], x[3::5, 0] = np.nan, 1.0, 0.0, 1e30
    many = head.scores(x, depth, hidden)
    for size in (7, 1):
        parts = [slice(start, start + size) for start in range(0, 300, size)]
        scores = np.concatenate([head.scores(x[at], depth, {k: v[at] for k, v in hidden.items()}) for at in parts])
        if exact:
            assert scores.tobytes() == many[: len(scores)].tobytes()
        else:
            np.testing.assert_allclose(scores, many[: len(scores)], rtol=NEAR, atol=NEAR)
    assert head.scores(x[:0], depth, {k: v[:0] for k, v in hidden.items()}).shape == (0, 2)


def test_hash_tables_are_read_at_the_places_used_in_training():
    """A table that contains the number of each place returns the places."""
    t, x = ht.token_tensors(), scalars(ht.TOKEN_NAMES, 100)
    hashed = HashedFeatures(ht.TOKEN_NAMES, t["strides"], t["edges"], ht.BUCKETS)
    silent = {name: np.zeros_like(t[name]) for name in ("weight", "bias", "table")}
    depths = 1 + np.arange(100) % 4
    places = hashed.places(x, depths)
    for cross in range(3):
        only = zeros(2, 3, ht.BUCKETS)
        only[:, cross] = cross * ht.BUCKETS + np.arange(ht.BUCKETS)
        head = TokenHead(ht.TOKEN_NAMES, {**t, **silent, "hashed": only})
        scores = [head.scores(x[i : i + 1], int(depths[i]))[0] for i in range(100)]
        assert np.array_equal(scores, np.stack([places[:, cross]] * 2, 1))


# Ranges


@pytest.mark.parametrize("name", [*TENSORS, "tokens", "dynasd-hard", "resnet of both"])
def test_a_feature_beyond_its_range_counts_as_the_end_of_the_range(name):
    kind, names, tensors = RANDOM_HEADS[name]
    low, high = (LOW, HIGH) if names == NAMES else (np.full(len(names), v, dtype=np.float32) for v in (0.3, 0.6))
    ranged, plain = build_head(kind, names, {**tensors, "low": low, "high": high}), build_head(kind, names, tensors)
    x, hidden = scalars(names, 200), ht.hidden_states(name, 200)
    x[::3] *= 5
    if kind == "xgboost":
        x[np.random.default_rng(0).random(x.shape) < 0.3] = np.nan  # stays unknown
    within = x.clip(low, high)
    if kind == "tokens":  # the next id is another word, not a similar one
        within[:, [0, 2, 3]] = x[:, [0, 2, 3]]
    assert np.array_equal(ranged.scores(x, 2, hidden), plain.scores(within, 2, hidden))
    assert not np.array_equal(ranged.scores(x, 2, hidden), plain.scores(x, 2, hidden))
    if names == NAMES:  # drafted features do not exist at depth 0
        first = np.concatenate([x[:, :2], within[:, 2:]], 1)
        assert np.array_equal(ranged.scores(x, 0, hidden), plain.scores(first, 0, hidden), equal_nan=True)


# What is refused


@pytest.mark.parametrize("name", RANDOM_HEADS)
def test_each_tensor_needs_its_name_type_shape_and_finite_numbers(name):
    kind, names, tensors = RANDOM_HEADS[name]
    build_head(kind, names, tensors)
    optional = ("strides", "edges", "hashed")
    for key, value in tensors.items():
        if not value.size:
            continue
        damaged = [value.astype(np.int32), value[None], np.array(1.0, dtype=np.float32)]
        if value.dtype == np.float32:
            damaged += [np.full_like(value, np.nan), value.astype(np.float64)]
        if key not in ("order", *optional):
            damaged.append(np.concatenate([value, value]))
        if key.startswith("scale"):
            damaged.append(np.zeros_like(value))
        for bad in damaged:
            with pytest.raises(PolicyError):
                build_head(kind, names, {**tensors, key: bad})
        if key not in optional:
            with pytest.raises(PolicyError):
                build_head(kind, names, {k: v for k, v in tensors.items() if k != key})
    with pytest.raises(PolicyError, match="colour"):
        build_head(kind, names, {**tensors, "colour": zeros(1)})


def changed(head: Any, **tensors: Any) -> Any:
    return head[0], head[1], {**head[2], **{name.replace("__", "."): value for name, value in tensors.items()}}


def dynasd(*sizes: int) -> dict[str, ht.Array]:
    return ht.fill({**ht.layers(*sizes), "first": (1,)})


BOTH, TOKEN_HEAD, TREES = RANDOM_HEADS["resnet of both"], RANDOM_HEADS["tokens"], RANDOM_HEADS["xgboost"]
WRONG: list[tuple[Any, str]] = [
    (("forest", NAMES, {}), "unknown head 'forest'"),
    *((("logistic", NAMES, {**TENSORS["logistic"], **ranges}), "low|high") for ranges in (
        {"low": LOW}, {"low": LOW[:4], "high": HIGH}, {"low": HIGH, "high": LOW}, {"low": LOW, "high": HIGH * np.inf})),
    (changed(TREES, feature=np.full((2, 5, 7), 5)), "feature"),
    (changed(BOTH, enter__other_hidden=draw(6, 5)), "other_hidden"),
    (("resnet", (), ht.residual(0)), "scalar features"),
    (("dynasd-soft", (), dynasd(ht.DRAFT, 4, 2)), "weight.1"),
    (("dynasd-hard", HARD_FEATURES[::-1], dynasd(11, 4, 1)), "entropy"),
    (changed(RANDOM_HEADS["specdec"], order=np.array([0, 1, 3])), "order"),
    (("tokens", ("entropy",), {**ht.token_tensors(), "strides": np.zeros((0, 2), dtype=np.int64)}), "before_token"),
    (changed(TOKEN_HEAD, strides=-np.array(ht.STRIDES)), "strides"),
    (changed(TOKEN_HEAD, edges=np.array([[0.5, 0.25]], dtype=np.float32)), "edges"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "noun"), WRONG)
def test_an_invalid_head_is_refused(head, noun):
    with pytest.raises(PolicyError, match=noun):
        build_head(*head)


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_states_that_are_missing_or_of_another_size_are_refused(name):
    names, head = random_head(name)
    x, hidden = scalars(names, 3), ht.hidden_states(name, 3)
    for depth in (0, 1):
        for state, size in head.sizes.items():
            with pytest.raises(PolicyError, match=state):
                head.scores(x, depth, {k: v for k, v in hidden.items() if k != state})
            with pytest.raises(PolicyError, match=f"{state} of size {size}.* {size + 1}"):
                head.scores(x, depth, {**hidden, state: draw(3, size + 1)})
