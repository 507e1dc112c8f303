"""Heads on hidden states, and the published ones, against plain torch modules; their folder, their rules, their lag."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feature_head import biased, kept_by, with_ranges
from head_tensors import NAMES, Array, draw, features, slow_basis, zeros
from random_heads import DRAFT, RANDOM_HEADS, TARGET, layers, random_head, resnet, specdec
from specstop.policies.contract import DraftStep
from specstop.policies.errors import PolicyError
from specstop.policies.features import check_sizes
from specstop.policies.heads import build_head
from specstop.policies.heads.layers import HARD_FEATURES
from specstop.policies.learned import Calibrator, LearnedPolicy, build_rule
from specstop.policies.rules import Derived, Rule, Threshold
from specstop.policies.storage import load_policy_folder, save_policy
from specstop.train.released import unbiased
from token_tensors import NAMES as TOKEN_NAMES, rows as token_rows
from torch import Tensor, nn

NEAR = 1e-4  # float32 sums in another order
HIDDEN = [name for name in RANDOM_HEADS if random_head(name)[1].sizes]


def states(name: str, *shape: int, seed: int = 3) -> dict[str, Array]:
    return {state: draw(*shape, size, seed=seed + size) for state, size in random_head(name)[1].sizes.items()}


def scalars(names: tuple[str, ...], count: int, seed: int = 5) -> Array:
    if names == TOKEN_NAMES:
        return token_rows(count)
    return features(count, seed=seed) if names == NAMES else np.abs(draw(count, len(names), seed=seed))


class Block(nn.Module):
    """SpecDec++'s block, written as the paper has it."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.linear = linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def perceptron(tensors: dict[str, Tensor]) -> nn.Sequential:
    """The published class: linear layers at even places, ReLU between, without the last sigmoid."""
    count = sum(name.startswith("weight.") for name in tensors)
    parts: list[nn.Module] = []
    for i in range(count):
        parts += [linear(tensors[f"weight.{i}"], tensors[f"bias.{i}"]), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def reference(name: str, x: Array, hidden: dict[str, Array], depth: int) -> Array:
    """Return [R, 2] of rows [R, F] as plain modules say."""
    kind, names, arrays = RANDOM_HEADS[name]
    t = {key: torch.from_numpy(value) for key, value in arrays.items()}
    given = {key: torch.from_numpy(value) for key, value in hidden.items()}
    if kind in ("dynasd-soft", "dynasd-hard", "specdec") and depth == 0:
        return t["first"].expand(len(x), 2).numpy()
    with torch.no_grad():
        if kind.startswith("dynasd"):
            score = perceptron(t)(torch.from_numpy(x) if names else given["draft_hidden"])
            return score.expand(-1, 2).numpy()
        blocks = [Block(w, b) for w, b in zip(t["block.weight"], t["block.bias"], strict=True)]
        leave = linear(t["leave.weight"], t["leave.bias"])
        if kind == "specdec":
            logits = nn.Sequential(*(blocks[at] for at in t["order"].tolist()), leave)(given["draft_hidden"])
            return (logits[:, 1] - logits[:, 0])[:, None].expand(-1, 2).numpy()
        columns = [torch.from_numpy(slow_basis(row, depth, arrays)).float() for row in x] if names else None
        flag = torch.full((len(x), 1), float(depth == 0))
        inside = torch.cat([torch.stack(columns), flag], 1) if columns else flag
        entered = inside @ t["enter.weight"].T + t["enter.bias"]
        for state, values in given.items():
            part = ((values - t[f"mean.{state}"]) / t[f"scale.{state}"]) @ t[f"enter.{state}"].T
            entered = entered + (part if depth or state == "target_hidden" else 0.0)
        return nn.Sequential(*blocks, leave)(entered).numpy()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("name", [*HIDDEN, "dynasd-hard"])
def test_a_head_scores_as_plain_modules_do(name: str, depth: int) -> None:
    names, head = random_head(name)
    x, hidden = scalars(names, 8), states(name, 8)
    found = head.scores(x, depth, hidden)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, reference(name, x, hidden, depth), rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", list(RANDOM_HEADS))
def test_a_row_scores_the_same_among_however_many(name: str, depth: int) -> None:
    """Bit for bit where the arithmetic is our own; a matrix product of a library adds in another order."""
    names, head = random_head(name)
    x, hidden = scalars(names, 2048), states(name, 2048)
    ours = RANDOM_HEADS[name][0] not in ("resnet", "dynasd-soft", "specdec")
    if ours and names != TOKEN_NAMES:  # unknown and extreme numbers too
        x[::5, 1], x[1::5, 1], x[2::5, 2] = np.nan, 1.0, 0.0
        x[3::5, 0] = 1e30
    many = head.scores(x, depth, hidden)
    for size, count in ((7, 2048), (1, 300)):
        parts = [slice(start, start + size) for start in range(0, count, size)]
        found = np.concatenate([head.scores(x[at], depth, {k: v[at] for k, v in hidden.items()}) for at in parts])
        if ours:
            assert np.array_equal(found.view(np.int64), many[: len(found)].view(np.int64))
        else:
            np.testing.assert_allclose(found, many[: len(found)], rtol=NEAR, atol=NEAR)
    nothing = {k: v[:0] for k, v in hidden.items()}
    assert head.scores(x[:0], depth, nothing).shape == (0, 2)


@pytest.mark.parametrize("name", ["dynasd-hard", "resnet of both"])
def test_scalars_beside_hidden_states_and_published_ones_have_ranges(name: str) -> None:
    kind, names, tensors = RANDOM_HEADS[name]
    low, high = np.full(len(names), 0.2, dtype=np.float32), np.full(len(names), 0.6, dtype=np.float32)
    x, hidden = scalars(names, 40), states(name, 40)
    found = build_head(kind, names, with_ranges(tensors, low, high)).scores(x, 1, hidden)
    plain = build_head(kind, names, tensors)
    assert np.array_equal(found, plain.scores(x.clip(low, high), 1, hidden))
    assert not np.array_equal(found, plain.scores(x, 1, hidden))


@pytest.mark.parametrize("name", HIDDEN)
def test_float16_states_are_read_as_numbers(name: str) -> None:
    """A trace keeps float16; a policy sees the same numbers as float32."""
    names, head = random_head(name)
    halves = {k: v.astype(np.float16) for k, v in states(name, 5).items()}
    x = scalars(names, 5)
    exact = head.scores(x, 1, {k: v.astype(np.float32) for k, v in halves.items()})
    assert np.array_equal(head.scores(x, 1, halves), exact)


@pytest.mark.parametrize("name", HIDDEN)
def test_the_states_that_a_head_is_shown_are_left_as_they_are(name: str) -> None:
    names, head = random_head(name)
    x, hidden = scalars(names, 5), states(name, 5)
    before = {k: v.copy() for k, v in hidden.items()}
    head.scores(x, 1, hidden)
    assert all(np.array_equal(hidden[k], v) for k, v in before.items())


def test_before_drafting_only_the_targets_state_counts() -> None:
    names, head = random_head("resnet of both")
    x, one, other = scalars(names, 6), states("resnet of both", 6), states("resnet of both", 6, seed=77)
    mixed = {"draft_hidden": other["draft_hidden"], "target_hidden": one["target_hidden"]}
    assert np.array_equal(head.scores(x, 0, one), head.scores(x, 0, mixed))
    assert not np.allclose(head.scores(x, 1, one), head.scores(x, 1, mixed))
    assert not np.allclose(head.scores(x, 0, one), head.scores(x, 0, other))


def test_blocks_are_independent_and_the_published_ones_are_one() -> None:
    """`[block] * 3` has a third of the weights that were meant: 3 blocks of 5 x 5 + 5 against one."""
    ours, theirs = (build_head(*specdec(order)) for order in ((0, 1, 2), (0, 0, 0)))
    counts = [sum(t.size for n, t in h.tensors().items() if n.startswith("block")) for h in (ours, theirs)]
    assert counts == [3 * 30, 30]
    kind, names, tensors = specdec((0, 0, 0))
    same = {
        **tensors,
        "block.weight": tensors["block.weight"].repeat(3, 0),
        "block.bias": tensors["block.bias"].repeat(3, 0),
        "order": np.arange(3),
    }
    hidden = {"draft_hidden": draw(4, DRAFT)}
    found = build_head(kind, names, same).scores(zeros(4, 0), 1, hidden)
    assert np.array_equal(found, theirs.scores(zeros(4, 0), 1, hidden))


def test_the_rejection_weight_is_taken_out_exactly() -> None:
    """p' = a / (a + w (1 - a)): a = 0.9, w = 6 gives 0.6."""
    assert biased(np.array(0.9), 6.0) == pytest.approx(0.6)
    chance = np.linspace(0.01, 0.99, 50)
    trained = biased(chance, 6.0)
    odds = np.log(trained / (1 - trained))
    bias = unbiased(np.array([0.3, 0.3], dtype=np.float32), 6.0)
    assert bias.dtype == np.float32
    np.testing.assert_allclose(1 / (1 + np.exp(-(odds + bias[1] - bias[0]))), chance, rtol=1e-5)
    kind, names, tensors = specdec()
    right = build_head(kind, names, {**tensors, "leave.bias": unbiased(tensors["leave.bias"], 6.0)})
    hidden, x = {"draft_hidden": draw(9, DRAFT)}, zeros(9, 0)
    found = right.scores(x, 1, hidden) - build_head(kind, names, tensors).scores(x, 1, hidden)
    np.testing.assert_allclose(found, np.full((9, 2), math.log(6.0)), rtol=1e-5)


# What is refused


def without(made: Any, *names: str) -> Any:
    return made[0], made[1], {k: v for k, v in made[2].items() if k not in names}


def replaced(made: Any, **values: Array) -> Any:
    return made[0], made[1], {**made[2], **{k.replace("__", "."): v for k, v in values.items()}}


BOTH = resnet(NAMES, {"draft_hidden": DRAFT, "target_hidden": TARGET})
SOFT = ("dynasd-soft", (), layers((DRAFT, 4, 1)))
HARD = ("dynasd-hard", HARD_FEATURES, layers((11, 4, 1)))
WRONG: dict[str, Any] = {
    "mean.draft_hidden": without(BOTH, "mean.draft_hidden"),
    "enter.other_hidden": replaced(BOTH, enter__other_hidden=draw(6, 5)),
    "scale.draft_hidden": replaced(BOTH, scale__draft_hidden=zeros(DRAFT)),
    "enter.draft_hidden": replaced(BOTH, enter__draft_hidden=draw(4, DRAFT)),
    "block.weight": replaced(BOTH, block__weight=draw(2, 6, 5)),
    "block.weight as": replaced(BOTH, block__weight=np.array(1.0, dtype=np.float32)),
    "block.bias": replaced(BOTH, block__bias=draw(3, 6)),
    "leave.weight": replaced(BOTH, leave__weight=draw(1, 6)),
    "scalar features": resnet((), {}),
    "finite": replaced(BOTH, mean__draft_hidden=zeros(DRAFT) + np.inf),
    "weight.1 ": ("dynasd-soft", (), layers((DRAFT, 4, 2))),
    "layer": ("dynasd-soft", (), layers((DRAFT,))),
    "weight.1": replaced(SOFT, weight__1=draw(1, 3)),
    "shape": replaced(SOFT, bias__0=np.array(1.0, dtype=np.float32)),
    "features": ("dynasd-soft", ("top1",), SOFT[2]),
    "entropy": ("dynasd-hard", HARD_FEATURES[::-1], HARD[2]),
    "weight.0": ("dynasd-hard", HARD_FEATURES, layers((10, 4, 1))),
    "no scalar features": ("specdec", ("top1",), specdec()[2]),
    "order to name": replaced(specdec(), order=np.array([0, 1, 3])),
    "each of 3": replaced(specdec(), order=np.array([0, 1, 1])),
    "order": replaced(specdec(), order=np.array([-1, 0, 1, 2])),
    "order as int64": replaced(specdec(), order=np.array([0.0, 1.0, 2.0])),
    "at most 64": replaced(specdec(), order=np.zeros(65, dtype=np.int64)),
}


@pytest.mark.parametrize("key_noun", WRONG)
def test_an_invalid_head_is_refused(key_noun: str) -> None:
    with pytest.raises(PolicyError, match=key_noun):
        build_head(*WRONG[key_noun])


@pytest.mark.parametrize("name", HIDDEN)
def test_states_that_are_missing_or_of_another_size_are_refused(name: str) -> None:
    names, head = random_head(name)
    x, hidden = scalars(names, 3), states(name, 3)
    for depth in (0, 1):
        for state, size in head.sizes.items():
            with pytest.raises(PolicyError, match=state):
                head.scores(x, depth, {k: v for k, v in hidden.items() if k != state})
            with pytest.raises(PolicyError, match=f"reads {state} of size {size}, but this model's is {size + 1}"):
                head.scores(x, depth, {**hidden, state: draw(3, size + 1)})


# Policies of them


def policy_of(name: str, rule: Rule, maps: tuple[Calibrator, Calibrator] | None = None) -> LearnedPolicy:
    names, head = random_head(name)
    return LearnedPolicy("mine", names, head, *(maps or (Calibrator(), Calibrator())), rule, 5)


def step(policy: LearnedPolicy, name: str, depth: int, streams: int) -> DraftStep:
    x = scalars(policy.features, streams, seed=depth)[:, None]
    hidden = {k: v[:, None] for k, v in states(name, streams, seed=depth).items()}
    alive, parent = np.ones((streams, 1), dtype=bool), np.zeros((streams, 1), dtype=np.int64)
    return DraftStep(depth, alive, parent, x, hidden, np.arange(streams))


RULES = [Derived([0.1, 0.2, 0.15]), Threshold("survival", 0.2), Threshold("step", 0.4), Threshold("any", 0.4)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("name", list(RANDOM_HEADS))
def test_any_head_goes_with_any_rule_and_comes_back_from_its_folder(tmp_path: Path, name: str, rule: Rule) -> None:
    maps = Calibrator("temperature", 1.3), Calibrator("temperature", 0.8)
    policy = policy_of(name, rule, maps)
    again = load_policy_folder(save_policy(policy, tmp_path / "p"))
    assert (again.hidden, again.sizes, again.features) == (policy.hidden, policy.sizes, policy.features)
    assert bool(policy.hidden) == (name in HIDDEN)
    assert again.rule.to_dict() == rule.to_dict()
    kept: list[Any] = [None, None]
    for depth in range(policy.first, 5):
        asked = step(policy, name, depth, 20)
        answers = [p.keep(asked, state) for p, state in zip((policy, again), kept, strict=True)]
        assert np.array_equal(answers[0][0], answers[1][0]) and np.array_equal(answers[0][1], answers[1][1])
        assert answers[0][0].shape == (20, 1) and np.isfinite(answers[0][1]).all()
        kept = [answer[1] for answer in answers]


def test_the_lagging_head_scores_the_token_before() -> None:
    """S at depth j is the product over x_1 .. x_{j-1}: SpecDec++'s sum starts at the second step."""

    def chance(policy: LearnedPolicy, asked: DraftStep) -> Array:
        hidden = {k: v[:, 0] for k, v in asked.hidden.items()}
        return 1 / (1 + np.exp(-policy.head.scores(asked.features[:, 0], asked.depth, hidden)[:, :1]))

    policy = policy_of("specdec", Threshold("survival", 0.0))
    state, product = None, np.ones((7, 1))
    for depth in range(1, 5):
        asked = step(policy, "specdec", depth, 7)
        if depth > 1:
            product = product * chance(policy, asked)
        _, state = policy.keep(asked, state)
        np.testing.assert_allclose(state, product, rtol=1e-6)
    sure = policy_of("specdec", Threshold("survival", 0.9999))
    assert sure.keep(step(sure, "specdec", 1, 7), None)[0].all(), "two tokens at least"
    plain = policy_of("dynasd-soft", Threshold("survival", 0.0))
    asked = step(plain, "dynasd-soft", 1, 7)
    np.testing.assert_allclose(plain.keep(asked, None)[1], chance(plain, asked), rtol=1e-6)


# The any-fork rule


def test_a_fork_that_passes_draws_the_others_along() -> None:
    rule = Threshold("any", 0.375)
    accept = np.array([[0.1, 0.38, 0.0], [0.375, 0.375, 0.375], [0.9, 0.9, 0.9]])
    kept = kept_by(rule, 2, np.ones((3, 3)), accept, accept)
    assert kept.tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert build_rule(rule.to_dict()).to_dict() == {"kind": "any", "threshold": 0.375}
    with pytest.raises(PolicyError, match="between 0 and 1"):
        Threshold("any", 1.5)


def test_a_fork_that_is_not_alive_has_no_vote() -> None:
    """An ended branch holds zeros, whose score may be anything."""
    tensors = {"weight.0": zeros(1, DRAFT), "bias.0": zeros(1) + 1, "first": zeros(1)}
    tensors["weight.0"][0, 0] = -1.0
    head = build_head("dynasd-soft", (), tensors)
    policy = LearnedPolicy("d", (), head, Calibrator(), Calibrator(), Threshold("any", 0.4), 4)
    hidden = zeros(2, 3, DRAFT)
    hidden[:, 1:, 0] = 9.0  # a score of sigmoid(-8); zeros score sigmoid(1)
    alive = np.array([[False, True, True], [True, True, True]])
    parent = np.zeros((2, 3), dtype=np.int64)
    asked = DraftStep(2, alive, parent, zeros(2, 3, 0), {"draft_hidden": hidden}, np.arange(2))
    kept, _ = policy.keep(asked, np.ones((2, 3)))
    assert kept.tolist() == [[False] * 3, [True] * 3]


def test_a_policy_of_another_models_size_is_refused() -> None:
    policy = policy_of("resnet of both", Threshold("step", 0.4))
    check_sizes(policy, {"draft_hidden": DRAFT, "target_hidden": TARGET})
    check_sizes(policy, {})
    with pytest.raises(PolicyError, match="target_hidden of 7 numbers"):
        check_sizes(policy, {"draft_hidden": DRAFT, "target_hidden": 8})
