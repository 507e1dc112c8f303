"""The learned tree policy: what it buys, against the formulas written out in numpy, for few and many streams; its folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from specstop.policies.contract import DraftTree, StopPolicy
from specstop.policies.costs import extend
from specstop.policies.errors import PolicyError
from specstop.policies.learned import PathCalibrator, TreeGain, build_rule
from specstop.policies.storage import load_policy_folder, save_policy
from specstop.policies.testing import PolicyTests, TreePolicyTests
from tree_reference import (
    NEAR,
    OTHER,
    PARENT,
    Levels,
    Reference,
    asked,
    make_drawn,
    make_steps,
    random_policy,
    rows_of,
    rule,
)
from trees import FREE, make_tree_policy


@pytest.mark.parametrize("check", [name for name in dir(PolicyTests) if name.startswith("test_")])
@pytest.mark.parametrize("kind", [PolicyTests, TreePolicyTests])
@pytest.mark.parametrize(("first", "floor"), [(0, 0.0), (1, 0.0), (1, 0.1), (2, 0.0)])
def test_it_conforms(kind: type[PolicyTests], check: str, first: int, floor: float) -> None:
    class Case(kind):  # type: ignore[misc, valid-type]
        def make(self) -> StopPolicy:
            return make_tree_policy(first=first, floor=floor)

    getattr(Case(), check)()


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_it_decides_by_the_formulas(first: int, floor: float) -> None:
    policy = make_tree_policy(first=first, floor=floor)
    kept = unread = 0
    for seed in range(40):
        state, levels, reference = policy.start(1, np.zeros(1)), Levels(), Reference(policy)
        for step in make_steps(policy, seed):
            mask, state = policy.keep(step, state)
            assert mask.tolist() == reference.keep(step, levels).tolist()
            kept += int(mask.sum())
            unread += int((step.alive & (levels[-1][0] < 0.0)).sum()) if levels else 0
        assert state[0] == pytest.approx(np.concatenate([np.stack(level, 1) for level in levels], 2), abs=NEAR)
        tree = make_drawn(seed)
        values = reference.values(tree, levels)
        assert policy.node_survival(tree, state) == pytest.approx(values, abs=NEAR)
        assert policy.select(tree, state).tolist() == reference.select(values).tolist()
    assert 50 < kept < 500
    assert (unread > 40) == (floor > 0.0)


@pytest.mark.parametrize("seed", range(30))
def test_random_prices_trees_and_ties_decide_by_the_formulas(seed: int) -> None:
    parent = (PARENT, OTHER)[seed // 2 % 2]
    policy, streams = random_policy(seed, parent), 60
    reference, levels = Reference(policy), Levels()
    steps = make_steps(policy, seed, streams, parent, digits=(0, 1, 9)[seed % 3])
    state = policy.start(streams, np.arange(streams))
    for step in steps:
        mask, state = policy.keep(step, state)
        assert np.array_equal(mask, reference.keep(step, levels) & step.alive)
    tree = make_drawn(seed, streams, parent)
    values = policy.node_survival(tree, state)
    assert values == pytest.approx(reference.values(tree, levels), abs=NEAR)
    assert np.array_equal(policy.select(tree, state), reference.select(values))


def test_random_prices_are_of_all_sorts() -> None:
    """Of the cases above some extend and verify nearly all, some nearly nothing."""
    shares = []
    for seed in range(30):
        parent = (PARENT, OTHER)[seed // 2 % 2]
        policy = random_policy(seed, parent)
        kept, state = asked(policy, make_steps(policy, seed, 60, parent))
        chosen = policy.select(make_drawn(seed, 60, parent), state)
        shares.append((np.mean([mask.mean() for mask in kept]), chosen.mean()))
    for each in zip(*shares, strict=True):
        assert min(each) < 0.1 and max(each) > 0.5 and sum(0.1 < share < 0.5 for share in each) > 8


def test_whole_numbers_are_as_good_as_others() -> None:
    """JSON does not tell them apart."""
    whole = {
        "rate": 1,
        "opening_s": 0,
        "draft_s": [0, 1],
        "verify_s": [1, 1],
        "acceptance": [1, 0, 1, 1, 1],
        "floor": 0,
    }
    decimal = {name: [float(x) for x in v] if isinstance(v, list) else float(v) for name, v in whole.items()}
    answers = []
    for entries in (whole, decimal):
        policy = make_tree_policy()
        policy = policy.with_rule(dataclasses.replace(policy.rule, **entries, ahead=1))
        kept, state = asked(policy, make_steps(policy, 5, 9))
        answers.append([*(mask.tolist() for mask in kept), policy.select(make_drawn(5, 9), state).tolist()])
    assert answers[0] == answers[1] and any(map(any, answers[0][0]))


def test_equal_values_are_taken_in_the_order_of_the_nodes() -> None:
    made = rule(verify_s=1e-3, rate=150.0, width=2)
    values = np.array([[[0.6, 0.6, 0.6], [0.5, 0.5, 0.5]]])
    assert made.extend(1, values, values).tolist() == [[True, True, False]]
    tight = dataclasses.replace(made, verify_s=[2e-3] * 4 + [9e-3] * 8)
    assert tight.select(np.array([[0.4, 0.5, 0.4, 0.4, -1.0]])).tolist() == [[True, True, True, False, False]]


@pytest.mark.parametrize(("first", "floor", "ahead"), [(0, 0.0, 0.5), (1, 0.1, 1.0), (2, 0.05, 0.0)])
def test_a_stream_decides_alike_to_the_bit_in_any_company(first: int, floor: float, ahead: float) -> None:
    policy = make_tree_policy(first=first, floor=floor)
    policy = policy.with_rule(dataclasses.replace(policy.rule, ahead=ahead))
    streams, tree = 2048, make_drawn(4, 2048)
    steps = make_steps(policy, 3, streams)
    together, state = asked(policy, steps)
    chosen = policy.select(tree, state)
    for at in (slice(0, 1), slice(77, 84), slice(2047, 2048)):
        alone, mine = asked(policy, [rows_of(step, at) for step in steps])
        assert all(np.array_equal(one, many[at]) for one, many in zip(alone, together, strict=True))
        assert all(np.array_equal(one, many[at]) for one, many in zip(mine, state, strict=True))
        part = DraftTree(*(values[at].copy() for values in (tree.tokens, tree.parent, tree.depth, tree.drawn)))
        assert np.array_equal(policy.node_survival(part, mine), policy.node_survival(tree, state)[at])
        assert np.array_equal(policy.select(part, mine), chosen[at])
    assert 0.05 < chosen.mean() < 0.95


def test_it_verifies_the_set_of_nodes_worth_most() -> None:
    """Against all sets that are closed under parents."""
    policy = make_tree_policy(rate=220.0)
    sizes = set()
    for seed in range(12):
        _, state = asked(policy, make_steps(policy, seed))
        tree = make_drawn(seed)
        values = policy.node_survival(tree, state)[0]
        tokens = (seconds := extend(policy.rule.verify_s, len(PARENT) + 1)) * policy.rule.rate - seconds[
            0
        ] * policy.rule.rate
        there = np.flatnonzero(tree.drawn[0]).tolist()
        closed = [
            nodes
            for size in range(len(there) + 1)
            for nodes in itertools.combinations(there, size)
            if all(PARENT[node] < 0 or int(PARENT[node]) in nodes for node in nodes)
        ]
        best = max(sum(values[list(nodes)]) - tokens[len(nodes)] for nodes in closed)
        chosen = np.flatnonzero(policy.select(tree, state)[0]).tolist()
        assert all(PARENT[node] < 0 or int(PARENT[node]) in chosen for node in chosen)
        assert sum(values[chosen]) - tokens[len(chosen)] == pytest.approx(best)
        sizes.add(len(chosen))
    assert len(sizes) > 2


def test_a_state_of_another_tree_tells_nothing() -> None:
    """Of nodes that do not fill whole levels of this one."""
    policy = make_tree_policy()
    _, state = asked(policy, make_steps(policy, 1, parent=np.array([-1, -1, -1, -1, 0])))
    tree = make_drawn(2)
    assert np.array_equal(policy.node_survival(tree, state), policy.node_survival(tree, None))


def test_doubt_between_candidates_widens_the_tree_and_doubt_about_all_ends_it() -> None:
    rows = rule(verify_s=1e-4, rate=80.0)
    survival = np.array([[0.9, 0.05, 0.02], [0.42, 0.38, 0.05], [0.06, 0.05, 0.03]])
    values = np.stack([survival, np.full((3, 3), 0.7)], 1)
    kept = rows.extend(1, values, values)
    assert kept.tolist() == [[True, False, False], [True, True, False], [False, False, False]]


def test_looking_ahead_drafts_where_one_step_alone_does_not_pay() -> None:
    short, long = (
        rule(ahead=share, rate=100.0, step_s=1e-3, verify_s=1e-5, opening_s=9e-3, acceptance=[0.9] * 5)
        for share in (0.0, 1.0)
    )
    root, none = np.array([[[1.0], [0.5]]]), np.empty((1, 2, 0))
    assert not short.extend(0, root, none).any()
    assert long.extend(0, root, none).all()


def test_the_number_of_verified_nodes_follows_their_price() -> None:
    table = [2e-3] * 4 + [9e-3 + 7e-3 * n for n in range(8)]
    tight = dataclasses.replace(rule(), verify_s=table)  # three nodes are free, others expensive
    values = np.array([[0.9, 0.5, 0.2, 0.1], [0.9, 0.5, 0.0, 0.0]])
    assert tight.select(values).tolist() == [[True, True, True, False], [True, True, False, False]]


def test_paths_are_never_likelier_than_what_comes_before() -> None:
    table = np.array([[1.0, 0.0, 2.0], [0.5, 0.3, 3.0]], dtype=np.float32)
    calibrator = PathCalibrator(table)
    parent = np.linspace(0.0, 1.0, 7)
    chance = calibrator.of(parent, np.linspace(-3, 3, 7), 1, np.zeros(7, dtype=int))
    assert (chance <= parent).all() and chance[3] > 0.0
    bare = PathCalibrator(np.array([[1.0, 0.0, 0.0]], dtype=np.float32))
    assert bare.of(parent[1:], np.zeros(6), 4, np.zeros(6, dtype=int)) == pytest.approx(parent[1:] / 2, abs=1e-5)


def test_its_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    policy = make_tree_policy()
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy_folder(tmp_path / "policy")
    assert isinstance(loaded, TreeGain) and loaded.rule.to_dict() == policy.rule.to_dict()
    steps = make_steps(policy, 3, streams=4)
    (kept, state), (same, other) = asked(policy, steps), asked(loaded, steps)
    assert all(np.array_equal(one, two) for one, two in zip(kept, same, strict=True))
    assert all(np.array_equal(one, two) for one, two in zip(state, other, strict=True))


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
    build_rule(raw)
    with pytest.raises(PolicyError, match="gain"):
        build_rule({**raw, entry: value})


def test_without_features_of_the_token_it_reads_none() -> None:
    policy = make_tree_policy(FREE)
    assert policy.features == FREE
    assert policy.start(3, np.arange(3)) is None
