"""The learned tree policy: what it buys, in arrays and in plain numbers, and its folder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import specstop.policies.tree_gain as tree_gain
import torch
from specstop.policies.contract import DraftStep, DraftTree, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.folder import load_policy_folder, save_policy
from specstop.policies.onnx import build_onnx
from specstop.policies.testing import PolicyTests, TreePolicyTests, keys
from specstop.policies.tree_calibration import PathCalibrator
from specstop.policies.tree_gain import TreeGain
from specstop.policies.tree_rule import TreeRule, build_tree_rule
from trees import BELOW, FREE, make_tree_policy

PARENT = torch.tensor([-1, -1, -1, 0, 0, 1, 3, 3, 4, 6, 9])
DEEP = torch.tensor([1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 5])
LEVELS = [(d == DEEP).nonzero()[:, 0] for d in range(1, 6)]


def rule(rate: float = 100.0, verify_s: float = 1e-3, step_s: float = 1e-3, **more: object) -> TreeRule:
    entries = {
        "rate": rate,
        "opening_s": step_s,
        "draft_s": [step_s, 1.2 * step_s],
        "verify_s": [2e-3 + verify_s * n for n in range(12)],
        "acceptance": [0.7] * 5,
        "shares": [(-1.5, 0.1), (-2.5, 0.1)],
        "children": [list(level) for level in BELOW],
        **more,
    }
    return TreeRule(**entries)  # type: ignore[arg-type]


def make_steps(policy: StopPolicy, seed: int, streams: int = 1) -> list[DraftStep]:
    """Return questions about the tree of `BELOW` at depths 1 to 4, some branches not alive."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for depth, nodes in enumerate(LEVELS[:4], 1):
        above = PARENT[nodes] - (int(LEVELS[depth - 2][0]) if depth > 1 else -1)
        alive = torch.rand(streams, len(nodes), generator=generator) > 0.15
        features = torch.rand(streams, len(nodes), len(policy.features), generator=generator) * alive[..., None]
        steps.append(DraftStep(depth, alive, above.expand(streams, -1), features))
    return steps


def make_drawn(seed: int) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(1, len(PARENT), generator=generator) > 0.2
    for node, above in enumerate(PARENT.tolist()):
        if above >= 0:
            drawn[:, node] &= drawn[:, above]
    return DraftTree(DEEP[None], PARENT[None], DEEP[None], drawn)


@pytest.mark.parametrize("check", [name for name in dir(PolicyTests) if name.startswith("test_")])
@pytest.mark.parametrize("kind", [PolicyTests, TreePolicyTests])
@pytest.mark.parametrize(("first", "floor"), [(0, 0.0), (1, 0.0), (1, 0.1), (2, 0.0)])
def test_it_conforms(kind: type[PolicyTests], check: str, first: int, floor: float) -> None:
    class Case(kind):  # type: ignore[misc, valid-type]
        def make(self) -> StopPolicy:
            return make_tree_policy(first=first, floor=floor)

    getattr(Case(), check)()


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_plain_numbers_decide_as_arrays_do(monkeypatch: pytest.MonkeyPatch, first: int, floor: float) -> None:
    policy = make_tree_policy(first=first, floor=floor)
    kept = unread = 0
    for seed in range(40):
        plain: State = ()
        arrays: State = ()
        for step in make_steps(policy, seed)[first - 1 :]:
            one, plain = policy.keep(step, plain)
            with monkeypatch.context() as patch:
                patch.setattr(tree_gain, "FEW", 0)
                other, arrays = policy.keep(step, arrays)
            assert torch.equal(one, other)
            kept += int(one.sum())
            alive = step.alive[0].tolist()
            unread += sum(there and s < 0.0 for there, s in zip(alive, plain[-1][0], strict=True))
        assert np.allclose(plain[-1], arrays[-1], atol=1e-6)
        tree = make_drawn(seed)
        twice = DraftTree(*(values.expand(2, -1) for values in (tree.tokens, tree.parent, tree.depth, tree.drawn)))
        many = tuple(tuple(torch.tensor([values, values]) for values in level) for level in plain)
        assert torch.equal(policy.select(tree, plain), policy.select(twice, many)[:1])
    assert 50 < kept < 500
    assert (unread > 40) == (floor > 0.0)


def test_it_verifies_the_set_of_nodes_worth_most() -> None:
    """Against all sets that are closed under parents."""
    policy = make_tree_policy(rate=220.0)
    sizes = set()
    for seed in range(12):
        state: State = ()
        for step in make_steps(policy, seed):
            _, state = policy.keep(step, state)
        tree = make_drawn(seed)
        values = np.array(policy._one.survival(PARENT.tolist(), DEEP.tolist(), state, range(len(PARENT))))
        tokens = np.array(policy.rule.verify_all(len(PARENT)))
        there = tree.drawn[0].nonzero()[:, 0].tolist()
        closed = [
            nodes
            for size in range(len(there) + 1)
            for nodes in itertools.combinations(there, size)
            if all(PARENT[node] < 0 or int(PARENT[node]) in nodes for node in nodes)
        ]
        best = max(sum(values[list(nodes)]) - tokens[len(nodes)] for nodes in closed)
        chosen = policy.select(tree, state)[0].nonzero()[:, 0].tolist()
        assert all(PARENT[node] < 0 or int(PARENT[node]) in chosen for node in chosen)
        assert sum(values[chosen]) - tokens[len(chosen)] == pytest.approx(best)
        sizes.add(len(chosen))
    assert len(sizes) > 2


def test_doubt_between_candidates_widens_the_tree_and_doubt_about_all_ends_it() -> None:
    rows = rule(verify_s=1e-4, rate=80.0)
    following = np.full((3, 3), 0.7)
    survival = np.array([[0.9, 0.05, 0.02], [0.42, 0.38, 0.05], [0.06, 0.05, 0.03]])
    kept = rows.extend(1, survival, following, [survival])
    assert kept.tolist() == [[True, False, False], [True, True, False], [False, False, False]]


def test_looking_ahead_drafts_where_one_step_alone_does_not_pay() -> None:
    short, long = (
        rule(ahead=share, rate=100.0, step_s=1e-3, verify_s=1e-5, opening_s=9e-3, acceptance=[0.9] * 5)
        for share in (0.0, 1.0)
    )
    one, following = np.ones((1, 1)), np.array([[0.5]])
    assert not short.extend(0, one, following, []).any()
    assert long.extend(0, one, following, []).all()


def test_a_node_costs_what_verifying_one_more_does_or_what_it_displaces() -> None:
    table = [2e-3] * 4 + [9e-3 + 7e-3 * n for n in range(8)]
    tight = rule().changed(verify_s=table)  # three nodes are free, others dear
    values = np.array([[0.9, 0.5, 0.2, 0.1], [0.9, 0.5, 0.0, 0.0]])
    assert tight.node_price(values).tolist() == pytest.approx([0.2, 0.0])
    assert rule(verify_s=2e-3).node_price(values).tolist() == pytest.approx([0.2, 0.2])
    assert tight.choose(values).tolist() == [[True, True, True, False], [True, True, False, False]]


def test_paths_are_never_likelier_than_what_comes_before() -> None:
    table = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.3, 3.0]])
    calibrator = PathCalibrator(table)
    above = np.linspace(0.0, 1.0, 7)
    chance = calibrator.of(above, np.linspace(-3, 3, 7), 1, np.zeros(7, dtype=int))
    assert (chance <= above).all() and chance[3] > 0.0
    bare = PathCalibrator(torch.tensor([[1.0, 0.0, 0.0]])).of(above[1:], np.zeros(6), 4, np.zeros(6, dtype=int))
    assert bare == pytest.approx(above[1:] / 2, abs=1e-5)


def test_its_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    policy = make_tree_policy()
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy_folder(tmp_path / "policy")
    assert isinstance(loaded, TreeGain) and loaded.rule.to_dict() == policy.rule.to_dict()
    states: list[State] = [(), ()]
    for step in make_steps(policy, 3, streams=4):
        for at, one in enumerate((policy, loaded)):
            answer, states[at] = one.keep(step, states[at])
            torch.testing.assert_close(answer, policy.keep(step, states[0][:-1])[0])
    assert all(torch.equal(a, b) for one, two in zip(*states, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("rate", 0.0),
        ("rate", float("nan")),
        ("draft_s", []),
        ("verify_s", [-1.0]),
        ("acceptance", ["x"]),
        ("shares", [(1.0,)]),
        ("shares", [(1.0, float("inf"))]),
        ("children", [[3], [1]]),
        ("children", [[2000]]),
        ("first", 9),
        ("first", True),
        ("width", 0),
        ("unknown", 1),
    ],
)
def test_a_mangled_rule_is_refused(entry: str, value: object) -> None:
    raw = json.loads(json.dumps(rule().to_dict()))
    build_tree_rule(raw)
    with pytest.raises(PolicyError, match="rule gain"):
        build_tree_rule({**raw, entry: value})


def test_one_row_of_it_is_no_onnx_model() -> None:
    pytest.importorskip("onnx")
    with pytest.raises(PolicyError, match="tree policy"):
        build_onnx(make_tree_policy())


def test_without_features_of_the_token_it_reads_none() -> None:
    policy = make_tree_policy(FREE)
    assert policy.features == FREE
    assert policy.start(3, keys(range(3))) == ()
