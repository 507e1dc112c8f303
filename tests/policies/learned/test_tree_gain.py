"""The learned tree policy: its decisions against the formulas in plain numpy and against all sets of nodes."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
import tree_reference as tr
from specstop.policies.contract import DraftTree
from specstop.policies.costs import extrapolate
from specstop.policies.errors import PolicyError
from specstop.policies.learned import PathCalibrator, build_rule
from tree_reference import make_drawn, make_steps, play_steps, rule
from trees import make_tree_policy


@pytest.mark.parametrize("seed", range(24))
def test_random_prices_trees_and_ties_decide_by_the_formulas(seed: int) -> None:
    parent, streams = (tr.PARENT, tr.OTHER)[seed // 2 % 2], 60
    policy = tr.random_policy(seed, parent)
    reference, levels = tr.Reference(policy), tr.Levels()
    state = policy.start(streams, np.arange(streams))
    for step in make_steps(policy, seed, streams, parent, digits=(0, 1, 9)[seed % 3]):
        mask, state = policy.keep(step, state)
        assert np.array_equal(mask, reference.keep(step, levels) & step.alive)
    assert state[0] == pytest.approx(np.concatenate([np.stack(level, 1) for level in levels], 2), abs=tr.NEAR)
    tree = make_drawn(seed, streams, parent)
    values = policy.node_survival(tree, state)
    assert values == pytest.approx(reference.values(tree, levels), abs=tr.NEAR)
    assert np.array_equal(policy.select(tree, state), reference.select(values))


def test_whole_numbers_equal_decimals() -> None:
    """JSON does not distinguish them."""
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
        kept, state = play_steps(policy, make_steps(policy, 5, 9))
        answers.append([*(mask.tolist() for mask in kept), policy.select(make_drawn(5, 9), state).tolist()])
    assert answers[0] == answers[1] and any(map(any, answers[0][0]))


def test_equal_values_are_selected_in_the_order_of_the_nodes() -> None:
    tied = rule(verify_s=1e-3, rate=150.0, width=2)
    values = np.array([[[0.6, 0.6, 0.6], [0.5, 0.5, 0.5]]])
    assert tied.extend(1, values, values).tolist() == [[True, True, False]]
    tight = dataclasses.replace(tied, verify_s=[2e-3] * 4 + [9e-3] * 8)
    assert tight.select(np.array([[0.4, 0.5, 0.4, 0.4, -1.0]])).tolist() == [[True, True, True, False, False]]


@pytest.mark.parametrize(("first", "floor", "ahead"), [(0, 0.0, 0.5), (1, 0.1, 1.0), (2, 0.05, 0.0)])
def test_a_stream_has_the_same_bits_in_any_batch(first: int, floor: float, ahead: float) -> None:
    policy = make_tree_policy(first=first, floor=floor)
    policy = policy.with_rule(dataclasses.replace(policy.rule, ahead=ahead))
    tree, steps = make_drawn(4, 300), make_steps(policy, 3, 300)
    together, state = play_steps(policy, steps)
    chosen = policy.select(tree, state)
    for at in (slice(0, 1), slice(77, 84), slice(299, 300)):
        alone, alone_state = play_steps(policy, [tr.rows_of(step, at) for step in steps])
        for one, many in zip((*alone, *alone_state), (*together, *state), strict=True):
            assert np.array_equal(one, many[at])
        part = DraftTree(*(values[at].copy() for values in (tree.tokens, tree.parent, tree.depth, tree.drawn)))
        assert np.array_equal(policy.node_survival(part, alone_state), policy.node_survival(tree, state)[at])
        assert np.array_equal(policy.select(part, alone_state), chosen[at])
    assert 0.05 < chosen.mean() < 0.95


def test_the_selected_nodes_are_the_best_of_all_closed_sets() -> None:
    policy, sizes = make_tree_policy(rate=220.0), set()
    seconds = extrapolate(policy.rule.verify_s, len(tr.PARENT) + 1) * policy.rule.rate
    for seed in range(8):
        _, state = play_steps(policy, make_steps(policy, seed))
        tree = make_drawn(seed)
        values = policy.node_survival(tree, state)[0]
        drawn = np.flatnonzero(tree.drawn[0]).tolist()
        closed = [
            nodes
            for size in range(len(drawn) + 1)
            for nodes in itertools.combinations(drawn, size)
            if all(tr.PARENT[node] < 0 or int(tr.PARENT[node]) in nodes for node in nodes)
        ]
        best = max(sum(values[list(nodes)]) - (seconds[len(nodes)] - seconds[0]) for nodes in closed)
        chosen = np.flatnonzero(policy.select(tree, state)[0]).tolist()
        assert tuple(chosen) in closed
        assert sum(values[chosen]) - (seconds[len(chosen)] - seconds[0]) == pytest.approx(best)
        sizes.add(len(chosen))
    assert len(sizes) > 2


def test_the_state_of_another_tree_is_not_used() -> None:
    policy, tree = make_tree_policy(), make_drawn(2)
    _, state = play_steps(policy, make_steps(policy, 1, parent=np.array([-1, -1, -1, -1, 0])))
    assert np.array_equal(policy.node_survival(tree, state), policy.node_survival(tree, None))


def test_doubt_widens_the_tree_and_prices_limit_it() -> None:
    survival = np.array([[0.9, 0.05, 0.02], [0.42, 0.38, 0.05], [0.06, 0.05, 0.03]])
    values = np.stack([survival, np.full((3, 3), 0.7)], 1)
    kept = rule(verify_s=1e-4, rate=80.0).extend(1, values, values)
    assert kept.tolist() == [[True, False, False], [True, True, False], [False, False, False]]
    # One step alone does not pay; several do.
    root, none = np.array([[[1.0], [0.5]]]), np.empty((1, 2, 0))
    for ahead in (0.0, 1.0):
        dear = rule(ahead=ahead, rate=100.0, step_s=1e-3, verify_s=1e-5, opening_s=9e-3, acceptance=[0.9] * 5)
        assert dear.extend(0, root, none).all() == bool(ahead)


def test_a_path_is_never_likelier_than_its_parent() -> None:
    calibrator = PathCalibrator(np.array([[1.0, 0.0, 2.0], [0.5, 0.3, 3.0]], dtype=np.float32))
    parent = np.linspace(0.0, 1.0, 7)
    chance = calibrator.of(parent, np.linspace(-3, 3, 7), 1, np.zeros(7, dtype=int))
    assert (chance <= parent).all() and chance[3] > 0.0
    bare = PathCalibrator(np.array([[1.0, 0.0, 0.0]], dtype=np.float32))
    assert bare.of(parent[1:], np.zeros(6), 4, np.zeros(6, dtype=int)) == pytest.approx(parent[1:] / 2, abs=1e-5)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("rate", 0.0), ("rate", float("nan")), ("draft_s", []), ("verify_s", [-1.0]), ("acceptance", ["x"]),
        ("shares", [(1.0,)]), ("shares", [(1.0, float("inf"))]), ("children", [[3], [1]]), ("children", [[2000]]),
        ("first", 9), ("first", True), ("width", 0), ("unknown", 1),
    ],
)  # fmt: skip
def test_an_invalid_rule_is_refused(entry: str, value: object) -> None:
    raw = json.loads(json.dumps(rule().to_dict()))
    build_rule(raw)
    with pytest.raises(PolicyError, match="gain"):
        build_rule({**raw, entry: value})
