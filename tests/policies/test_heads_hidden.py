"""Heads on hidden states, and the published ones, against plain torch modules; their folder, their rules, their lag."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from made_heads import DRAFT, MADE, TARGET, layers, made_head, resnet, specdec
from specstop.policies.calibration import Calibrator
from specstop.policies.contract import DraftStep
from specstop.policies.errors import PolicyError
from specstop.policies.folder import load_policy_folder, save_policy
from specstop.policies.heads import build_head
from specstop.policies.heads_base import OnDevice
from specstop.policies.heads_dynasd import HARD_FEATURES
from specstop.policies.heads_specdec import biased, unbiased
from specstop.policies.learned import LearnedPolicy
from specstop.policies.rules import AnyFork, Derived, Rule, Threshold, build_rule
from specstop.policies.vectors import check_sizes
from test_heads import NAMES, draw, features, slow_basis
from torch import Tensor, nn

NEAR = 1e-4  # float32 sums in another order
HIDDEN = [name for name in MADE if made_head(name)[1].sizes]


def states(name: str, *shape: int, seed: int = 3) -> dict[str, Tensor]:
    return {vector: draw(*shape, size, seed=seed + size) for vector, size in made_head(name)[1].sizes.items()}


def scalars(names: tuple[str, ...], *shape: int, seed: int = 5) -> Tensor:
    return features(*shape, seed=seed) if names == NAMES else draw(*shape, len(names), seed=seed).abs()


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


def reference(name: str, x: Tensor, vectors: dict[str, Tensor], depth: int) -> Tensor:
    """Return [R, 2] of rows [R, F] as plain modules say."""
    kind, names, t = MADE[name]
    if kind.startswith("dynasd"):
        score = perceptron(t)(x if names else vectors["draft_hidden"])
        return score.expand(-1, 2) if depth else t["first"].expand(len(x), 2)
    if kind == "specdec":
        blocks = [Block(w, b) for w, b in zip(t["block.weight"], t["block.bias"], strict=True)]
        network = nn.Sequential(*(blocks[at] for at in t["order"].tolist()), linear(t["leave.weight"], t["leave.bias"]))
        logits = network(vectors["draft_hidden"])
        return (logits[:, 1] - logits[:, 0])[:, None].expand(-1, 2) if depth else t["first"].expand(len(x), 2)
    columns = [torch.from_numpy(slow_basis(row.numpy(), depth, t)).float() for row in x] if names else None
    flag = torch.full((len(x), 1), float(depth == 0))
    inside = torch.cat([torch.stack(columns), flag], 1) if columns else flag
    hidden = inside @ t["enter.weight"].T + t["enter.bias"]
    for vector, state in vectors.items():
        part = ((state - t[f"mean.{vector}"]) / t[f"scale.{vector}"]) @ t[f"enter.{vector}"].T
        hidden = hidden + (part if depth or vector == "target_hidden" else 0.0)
    blocks = [Block(w, b) for w, b in zip(t["block.weight"], t["block.bias"], strict=True)]
    return nn.Sequential(*blocks, linear(t["leave.weight"], t["leave.bias"]))(hidden)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("name", [*HIDDEN, "dynasd-hard"])
def test_a_head_scores_as_plain_modules_do(name: str, depth: int) -> None:
    names, head = made_head(name)
    x, vectors = scalars(names, 8), states(name, 8)
    with torch.no_grad():
        expected = reference(name, x, vectors, depth)
    torch.testing.assert_close(head.logits(x, depth, vectors), expected, rtol=NEAR, atol=NEAR)
    many = head.logits(x.view(2, 4, -1), depth, {k: v.view(2, 4, -1) for k, v in vectors.items()})
    torch.testing.assert_close(many, expected.view(2, 4, 2), rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", list(MADE))
def test_a_head_scores_one_row_as_many(name: str, depth: int) -> None:
    names, head = made_head(name)
    x, vectors = scalars(names, 20), states(name, 20)
    for row, values in enumerate(head.logits(x, depth, vectors)):
        arrays = {k: v[row].numpy() for k, v in vectors.items()}
        assert head.logits_one(x[row].tolist(), depth, arrays) == pytest.approx(values.tolist(), abs=NEAR)


@pytest.mark.parametrize("name", HIDDEN)
def test_float16_states_are_read_as_numbers(name: str) -> None:
    """A trace keeps float16; a policy sees the same numbers as float32."""
    names, head = made_head(name)
    halves = {k: v.half() for k, v in states(name, 5).items()}
    x = scalars(names, 5)
    exact = head.logits(x, 1, {k: v.float() for k, v in halves.items()})
    assert torch.equal(head.logits(x, 1, halves), exact)


def test_before_drafting_only_the_targets_state_counts() -> None:
    names, head = made_head("resnet of both")
    x, one, other = scalars(names, 6), states("resnet of both", 6), states("resnet of both", 6, seed=77)
    mixed = {"draft_hidden": other["draft_hidden"], "target_hidden": one["target_hidden"]}
    assert torch.equal(head.logits(x, 0, one), head.logits(x, 0, mixed))
    assert not torch.allclose(head.logits(x, 1, one), head.logits(x, 1, mixed))
    assert not torch.allclose(head.logits(x, 0, one), head.logits(x, 0, other))


def test_blocks_are_independent_and_the_published_ones_are_one() -> None:
    """`[block] * 3` has a third of the weights that were meant: 3 blocks of 5 x 5 + 5 against one."""
    ours, theirs = (build_head(*specdec(order)) for order in ((0, 1, 2), (0, 0, 0)))
    counts = [sum(t.numel() for n, t in h.tensors().items() if n.startswith("block")) for h in (ours, theirs)]
    assert counts == [3 * 30, 30]
    assert (ours.shares, theirs.shares) == (False, True)  # type: ignore[attr-defined]
    kind, names, tensors = specdec((0, 0, 0))
    same = {
        **tensors,
        "block.weight": tensors["block.weight"].expand(3, -1, -1).contiguous(),
        "block.bias": tensors["block.bias"].expand(3, -1).contiguous(),
        "order": torch.arange(3),
    }
    vectors = {"draft_hidden": draw(4, DRAFT)}
    torch.testing.assert_close(
        build_head(kind, names, same).logits(torch.zeros(4, 0), 1, vectors),
        theirs.logits(torch.zeros(4, 0), 1, vectors),
    )


def test_the_rejection_weight_is_taken_out_exactly() -> None:
    """p' = a / (a + w (1 - a)); METHODS' example: a = 0.9, w = 6 gives 0.6."""
    assert float(biased(torch.tensor(0.9), 6.0)) == pytest.approx(0.6)
    chance = torch.linspace(0.01, 0.99, 50)
    logit = torch.logit(biased(chance, 6.0))
    bias = unbiased(torch.tensor([0.3, 0.3]), 6.0)
    torch.testing.assert_close(torch.sigmoid(logit + bias[1] - bias[0]), chance)
    kind, names, tensors = specdec()
    right = build_head(kind, names, {**tensors, "leave.bias": unbiased(tensors["leave.bias"], 6.0)})
    vectors, x = {"draft_hidden": draw(9, DRAFT)}, torch.zeros(9, 0)
    found = right.logits(x, 1, vectors) - build_head(kind, names, tensors).logits(x, 1, vectors)
    torch.testing.assert_close(found, torch.full((9, 2), math.log(6.0)))


# What is refused


def without(made: Any, *names: str) -> Any:
    return made[0], made[1], {k: v for k, v in made[2].items() if k not in names}


def replaced(made: Any, **values: Tensor) -> Any:
    return made[0], made[1], {**made[2], **{k.replace("__", "."): v for k, v in values.items()}}


BOTH = resnet(NAMES, {"draft_hidden": DRAFT, "target_hidden": TARGET})
SOFT = ("dynasd-soft", (), layers((DRAFT, 4, 1)))
HARD = ("dynasd-hard", HARD_FEATURES, layers((11, 4, 1)))
WRONG: dict[str, tuple[Any, str]] = {
    "a state's mean missing": (without(BOTH, "mean.draft_hidden"), "missing or unknown: mean.draft_hidden"),
    "an unknown state": (replaced(BOTH, enter__other_hidden=draw(6, 5)), "missing or unknown: enter.other_hidden"),
    "a state's scale of 0": (
        replaced(BOTH, scale__draft_hidden=torch.zeros(DRAFT)),
        "scale.draft_hidden must be above 0",
    ),
    "another width": (replaced(BOTH, enter__draft_hidden=draw(4, DRAFT)), r"enter.draft_hidden of shape \[6, 5\]"),
    "a block that is not square": (replaced(BOTH, block__weight=draw(2, 6, 5)), r"block.weight of shape \[2, 6, 6\]"),
    "blocks as one number": (replaced(BOTH, block__weight=torch.tensor(1.0)), "block.weight of shape"),
    "more biases than blocks": (replaced(BOTH, block__bias=draw(3, 6)), r"block.bias of shape \[2, 6\]"),
    "one output": (replaced(BOTH, leave__weight=draw(1, 6)), r"leave.weight of shape \[2, 6\]"),
    "nothing to read": (resnet((), {}), "expected scalar features, hidden states, or both"),
    "a state not finite": (replaced(BOTH, mean__draft_hidden=torch.full((DRAFT,), math.inf)), "not finite"),
    "two outputs": (("dynasd-soft", (), layers((DRAFT, 4, 2))), "dynasd-soft head: expected 1 output, got 2"),
    "no layer": (("dynasd-soft", (), layers((DRAFT,))), "expected 1 output, got no layer"),
    "layers that do not fit": (replaced(SOFT, weight__1=draw(1, 3)), r"weight.1 of shape \[1, 4\]"),
    "a bias as one number": (replaced(SOFT, bias__0=torch.tensor(1.0)), r"bias.0 of shape \[0\]"),
    "scalars for the soft model": (("dynasd-soft", ("top1",), SOFT[2]), "expected no scalar feature"),
    "the hard model's features in another order": (("dynasd-hard", HARD_FEATURES[::-1], HARD[2]), "in this order"),
    "10 inputs": (("dynasd-hard", HARD_FEATURES, layers((10, 4, 1))), "for 11 inputs, got 10"),
    "scalars for specdec": (("specdec", ("top1",), specdec()[2]), "expected no scalar feature, got top1"),
    "an order beyond the blocks": (replaced(specdec(), order=torch.tensor([0, 1, 3])), "each of 3 blocks"),
    "an order that leaves one out": (replaced(specdec(), order=torch.tensor([0, 1, 1])), "each of 3 blocks"),
    "a negative order": (replaced(specdec(), order=torch.tensor([-1, 0, 1, 2])), "each of 3 blocks"),
    "an order of numbers": (replaced(specdec(), order=torch.tensor([0.0, 1.0, 2.0])), "order as torch.int64"),
    "an endless order": (replaced(specdec(), order=torch.zeros(65, dtype=torch.int64)), "at most 64 blocks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_such_a_head_is_refused(case: str) -> None:
    (kind, names, tensors), message = WRONG[case]
    with pytest.raises(PolicyError, match=message):
        build_head(kind, names, tensors)


@pytest.mark.parametrize("name", HIDDEN)
def test_states_that_are_missing_or_of_another_size_are_refused(name: str) -> None:
    names, head = made_head(name)
    x, vectors = scalars(names, 3), states(name, 3)
    for vector, size in head.sizes.items():
        with pytest.raises(PolicyError, match=f"reads {vector}, which it was not given"):
            head.logits(x, 1, {k: v for k, v in vectors.items() if k != vector})
        with pytest.raises(PolicyError, match=f"reads {vector} of size {size}, but this model's is {size + 1}"):
            head.logits(x, 1, {**vectors, vector: draw(3, size + 1)})
        arrays = {k: v[0].numpy() for k, v in vectors.items()}
        row = x[0].tolist()
        with pytest.raises(PolicyError, match=f"reads {vector}, which it was not given"):
            head.logits_one(row, 1, {k: v for k, v in arrays.items() if k != vector})
        with pytest.raises(PolicyError, match=f"reads {vector} of size {size}, but this model's is {size + 1}"):
            head.logits_one(row, 1, {**arrays, vector: draw(size + 1).numpy()})


# Policies of them


def policy_of(name: str, rule: Rule, maps: tuple[Calibrator, Calibrator] | None = None) -> LearnedPolicy:
    names, head = made_head(name)
    return LearnedPolicy("mine", names, head, *(maps or (Calibrator(), Calibrator())), rule, 5)


def step(policy: LearnedPolicy, name: str, depth: int, streams: int, branches: int = 1, seed: int = 0) -> DraftStep:
    alive = torch.ones(streams, branches, dtype=torch.bool)
    x = scalars(policy.features, streams, branches, seed=depth + seed)
    vectors = states(name, streams, branches, seed=depth + seed)
    return DraftStep(depth, alive, torch.zeros(streams, branches, dtype=torch.int64), x, vectors)


RULES = [Derived([0.1, 0.2, 0.15]), Threshold("survival", 0.2), Threshold("step", 0.4), AnyFork(0.4)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("name", list(MADE))
def test_any_head_goes_with_any_rule_and_comes_back_from_its_folder(tmp_path: Path, name: str, rule: Rule) -> None:
    maps = Calibrator("temperature", 1.3), Calibrator("temperature", 0.8)
    policy = policy_of(name, rule, maps)
    again = load_policy_folder(save_policy(policy, tmp_path / "p"))
    assert (again.vectors, again.sizes, again.features) == (policy.vectors, policy.sizes, policy.features)
    assert again.rule.to_dict() == rule.to_dict()
    kept: list[Any] = [None, None]
    for depth in range(policy.first, 5):
        asked = step(policy, name, depth, 20)
        answers = [p.keep(asked, state) for p, state in zip((policy, again), kept, strict=True)]
        assert torch.equal(answers[0][0], answers[1][0]) and torch.equal(answers[0][1], answers[1][1])
        assert answers[0][0].shape == (20, 1) and bool(answers[0][1].isfinite().all())
        kept = [answer[1] for answer in answers]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("name", list(MADE))
def test_a_policy_decides_alone_as_among_many(name: str, rule: Rule) -> None:
    policy = policy_of(name, rule)
    assert bool(policy.vectors) == (name in HIDDEN)
    many, alone = None, [None] * 20
    for depth in range(policy.first, 5):
        asked = step(policy, name, depth, 20)
        keep, many = policy.keep(asked, many)
        for row in range(20):
            arrays = {k: v[row, 0].numpy() for k, v in asked.vectors.items()}
            one, alone[row] = policy.keep_one(depth, asked.features[row, 0].tolist(), alone[row], arrays)
            assert one == bool(keep[row, 0]) and alone[row] == pytest.approx(float(many[row, 0]), abs=NEAR)


def test_the_lagging_head_scores_the_token_before() -> None:
    """S at depth j is the product over x_1 .. x_{j-1}: SpecDec++'s sum starts at the second step."""
    policy = policy_of("specdec", Threshold("survival", 0.0))
    state, product = None, torch.ones(7, 1)
    for depth in range(1, 5):
        asked = step(policy, "specdec", depth, 7)
        if depth > 1:
            product = product * torch.sigmoid(policy.head.logits(asked.features, depth, asked.vectors)[..., 0])
        _, state = policy.keep(asked, state)
        torch.testing.assert_close(state, product)
    sure = policy_of("specdec", Threshold("survival", 0.9999))
    assert bool(sure.keep(step(sure, "specdec", 1, 7), None)[0].all()), "two tokens at least"
    plain = policy_of("dynasd-soft", Threshold("survival", 0.0))
    asked = step(plain, "dynasd-soft", 1, 7)
    torch.testing.assert_close(
        plain.keep(asked, None)[1], torch.sigmoid(plain.head.logits(asked.features, 1, asked.vectors)[..., 0])
    )


# The any-fork rule


def test_a_fork_that_passes_draws_the_others_along() -> None:
    rule = AnyFork(0.4)
    accept = torch.tensor([[0.1, 0.41, 0.0], [0.4, 0.4, 0.4], [0.9, 0.9, 0.9]])
    kept = rule.keep(2, accept, accept, accept)
    assert kept.tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert (rule.keep(2, 0.41, 0.0, 0.0), rule.keep(2, 0.4, 0.0, 0.0)) == (True, False)
    assert build_rule(rule.to_dict()).to_dict() == {"kind": "any", "threshold": 0.4}
    with pytest.raises(PolicyError, match="between 0 and 1"):
        AnyFork(1.5)


def test_a_fork_that_is_not_alive_has_no_vote() -> None:
    """An ended branch holds zeros, whose score may be anything."""
    tensors = {
        "weight.0": torch.tensor([[-1.0] + [0.0] * (DRAFT - 1)]),
        "bias.0": torch.ones(1),
        "first": torch.zeros(1),
    }
    head = build_head("dynasd-soft", (), tensors)
    policy = LearnedPolicy("d", (), head, Calibrator(), Calibrator(), AnyFork(0.4), 4)
    vectors = torch.zeros(2, 3, DRAFT)
    vectors[:, 1:, 0] = 9.0  # a score of sigmoid(-8); zeros score sigmoid(1)
    alive = torch.tensor([[False, True, True], [True, True, True]])
    asked = DraftStep(2, alive, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 0), {"draft_hidden": vectors})
    kept, _ = policy.keep(asked, torch.ones(2, 3))
    assert kept.tolist() == [[False] * 3, [True] * 3]


def test_a_policy_of_another_models_size_is_refused() -> None:
    policy = policy_of("resnet of both", Threshold("step", 0.4))
    check_sizes(policy, {"draft_hidden": DRAFT, "target_hidden": TARGET})
    check_sizes(policy, {})
    with pytest.raises(PolicyError, match="reads target_hidden of 7 numbers, but here it has 8"):
        check_sizes(policy, {"draft_hidden": DRAFT, "target_hidden": 8})


def test_tensors_are_copied_once_to_a_device() -> None:
    here = torch.ones(3)
    placed = OnDevice(here)
    assert placed(torch.device("cpu"))[0] is here
    elsewhere = placed(torch.device("meta"))
    assert elsewhere[0].device.type == "meta" and placed(torch.device("meta")) is elsewhere
