"""Bounds of trees: the oracle, the best static tree, the ceiling of several candidates; single rounds."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.topology import Topology, parse_tree
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import InputError, TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.published.online import Online
from specstop.train.replay.bounds import oracle_seconds
from specstop.train.replay.static_trees import (
    StaticTree,
    best_static_tree,
    best_subtrees,
    drafted_alone,
    likeliest_nodes,
    node_acceptance,
)
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from specstop.train.replay.run import replay, replay_many
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.static_trees import on_subtree

TREE = "3,2,1,1,1"


@pytest.fixture(scope="module")
def arrays(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> TraceArrays:
    folder = tmp_path_factory.mktemp("tree")
    return trace_arrays(collect(pair, prompts, folder, tree=TREE, temperature=0.7, max_new_tokens=NEW))


def test_no_policy_is_faster_than_the_oracle(arrays: TraceArrays, profile: Profile) -> None:
    bound = oracle_seconds(arrays, profile)
    policies = [
        *TEST_POLICIES.values(),
        *(StaticTree(arrays.tree, nodes) for _, nodes in best_subtrees(arrays.tree, [0.5] * 24, 3)),
    ]
    rates = [replay(arrays, policy, profile) for policy in policies]
    assert all((played.seconds >= bound - 1e-9).all() for played in rates)
    assert float(bound.sum()) > 0.3 * min(float(played.seconds.sum()) for played in rates)


@pytest.mark.parametrize("seed", range(4))
def test_sub_trees_are_the_best_of_all(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(9)]
    tree = parse_tree("parents:" + ",".join(map(str, parents)))
    chance = torch.rand(9, generator=generator, dtype=torch.float64).tolist()
    for depth in range(1, tree.deepest + 1):
        every: dict[int, float] = {}
        for picked in itertools.product([False, True], repeat=9):
            closed = all(
                not take or (tree.depth[n + 1] <= depth and (tree.parent[n + 1] == 0 or picked[tree.parent[n + 1] - 1]))
                for n, take in enumerate(picked)
            )
            if closed:
                total = sum(c for c, take in zip(chance, picked, strict=True) if take)
                every[sum(picked)] = max(every.get(sum(picked), 0.0), total)
        found = best_subtrees(tree, chance, depth)
        assert [value for value, _ in found] == pytest.approx([every[n] for n in range(len(every))])
        for n, (value, nodes) in enumerate(found):
            assert len(nodes) == n
            assert sum(chance[node] for node in nodes) == pytest.approx(value)
            assert all(tree.parent[node + 1] == 0 or tree.parent[node + 1] - 1 in nodes for node in nodes)


def test_the_likeliest_nodes_are_a_tree_that_a_smaller_trace_can_have(arrays: TraceArrays) -> None:
    """First siblings first, whatever few texts say of them; where they say nothing too."""
    rows = torch.arange(len(arrays.accepted)) == 0
    last = arrays.tree.children[0][-1] - 1
    odd = [dataclasses.replace(arrays, path=arrays.path & False)]  # type: ignore[operator]
    odd.append(
        dataclasses.replace(arrays, path=odd[0].path | (rows[:, None] & (torch.arange(arrays.tree.nodes) == last)))
    )
    for some in (arrays, *odd):
        for count in range(arrays.tree.nodes + 1):
            nodes = likeliest_nodes(some, count, DEPTH)
            assert len(nodes) == on_subtree(some, nodes).tree.nodes == count
    assert likeliest_nodes(arrays, 1, DEPTH) == [0]
    with pytest.raises(InputError, match="nodes: expected at most"):
        likeliest_nodes(arrays, arrays.tree.nodes, 1)


def test_the_best_static_tree_is_drafted_alone(arrays: TraceArrays, profile: Profile) -> None:
    """It verifies what it would as part of the recorded tree, and pays for no candidate beside that."""
    costly = dataclasses.replace(profile, tree_outside_s=(1e-4, 1e-5, 5e-3), step_s=5e-3)
    for costs in (profile, costly):
        policy, played = best_static_tree(arrays, costs)
        inside = replay(arrays, policy, costs)
        assert played.tokens.equal(inside.tokens) and played.verified.equal(inside.verified)
        assert played.seconds.sum() <= inside.seconds.sum()
        assert (played.seconds >= oracle_seconds(arrays, costs) - 1e-9).all()
        assert played.seconds.equal(replay(*drafted_alone(arrays, policy.nodes), costs).seconds)
    assert policy.shape.is_chain  # a second candidate costs more than it brings
    never = dataclasses.replace(profile, step_s=1.0, tree_outside_s=(1e-4, 1e-5, 1.0))
    policy, played = best_static_tree(arrays, never)
    assert not policy.nodes
    assert played.rate == pytest.approx(replay(arrays, FixedLength(0), never).rate)


def test_the_best_static_tree_is_no_slower_than_any_whole_depth(arrays: TraceArrays, profile: Profile) -> None:
    policy, played = best_static_tree(arrays, profile)
    assert played.rate >= max(replay(arrays, FixedLength(k), profile).rate for k in range(DEPTH + 1))
    assert 0 < len(policy.nodes) < arrays.tree.nodes
    assert node_acceptance(arrays)[0] > node_acceptance(arrays)[2] > 0


def test_a_static_tree_runs_live_as_in_replay(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], arrays: TraceArrays, profile: Profile
) -> None:
    policy = StaticTree(arrays.tree, [0, 1, 3, 4, 9])
    assert policy.shape.parent == Topology([-1, 0, 0, 1, 1, 3]).parent
    below = arrays.tree.children
    assert policy.drawn.nodes == sum(len(below[row]) for row in (0, 1, 4)) and not policy.drawn.is_chain
    assert StaticTree(arrays.tree, []).drawn.nodes == len(below[0])
    log = replay(arrays, policy, profile).log
    speculator = Speculator(pair, policy, Settings(0.7, NEW, tree=TREE, verification="match"), profile)
    for s, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
        rounds = speculator.generate(ids, stream_key(0, prompt.id)).rounds
        assert log[log[:, 0] == s, 1:].tolist() == [[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds]
        assert all(r.verified <= 5 for r in rounds)


def test_thresholds_replayed_side_by_side_are_those_replayed_alone(arrays: TraceArrays, profile: Profile) -> None:
    online = [Online(t, prior, max_depth=DEPTH) for t, prior in ((0.1, 2.0), (0.3, 2.0), (0.02, 2.0), (0.3, 9.0))]
    rules = [*(Confidence(t, DEPTH) for t in (0.1, 0.4, 0.4, 0.8)), FixedLength(2), *online, Confidence(0.3, 2)]
    for policy, played in zip(rules, replay_many(arrays, rules, profile), strict=True):
        alone = replay(arrays, policy, profile)
        assert played.name == policy.name
        for name in ("tokens", "seconds", "rounds", "drafted", "verified", "accepted", "committed", "log", "history"):
            assert torch.equal(getattr(played, name), getattr(alone, name)), name


@pytest.fixture(scope="module")
def rejected(
    pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, TraceArrays]:
    options = {"temperature": 0.7, "max_new_tokens": NEW, "collector": "live", "verification": "rejection"}
    made: dict[str | None, TraceArrays] = {}
    for tree in (None, "2,2,1"):
        folder: Path = tmp_path_factory.mktemp("rejected")
        made[tree] = trace_arrays(collect(pair, prompts, folder, depth=4, tree=tree, **options), extra=ROUND_COLUMNS)
    return made


def test_single_rounds_are_expectations_over_the_stored_probabilities(
    rejected: dict[str | None, TraceArrays], profile: Profile
) -> None:
    arrays = rejected[None]
    rows = [i for i in range(len(arrays.cut)) if not arrays.cut[i]]
    for k in (0, 1, 3):
        found = evaluate_rounds(arrays, FixedLength(k), profile)
        expected = []
        for i in rows:
            p, q = arrays.extra["target_prob"][i], arrays.extra["draft_prob"][i]
            chances = (p / q).clamp(max=1.0).tolist()
            expected.append(
                1 + sum(float(torch.tensor(chances[:j], dtype=torch.float64).prod()) for j in range(1, k + 1))
            )
        assert sorted(found.committed.tolist()) == pytest.approx(sorted(expected), rel=1e-5)
        assert (found.taken.drafted == k).all()
        assert len(found.committed) == len(rows) > 30
    whole = evaluate_rounds(arrays, FixedLength(4), profile)
    drawn = (arrays.accepted[~arrays.cut].double() + 1).mean()
    assert float(whole.committed.mean()) == pytest.approx(float(drawn), rel=0.15)
    assert any("other anchors" in text for text in whole.caveats)
    assert any("expectation" in text for text in whole.caveats)


def test_single_rounds_of_trees_are_as_they_were_drawn(
    rejected: dict[str | None, TraceArrays], profile: Profile
) -> None:
    arrays = rejected["2,2,1"]
    found = evaluate_rounds(arrays, FixedLength(3), profile)
    assert float(found.committed.sum()) == float((arrays.accepted[~arrays.cut] + 1).sum())
    assert any("as it was drawn" in text for text in found.caveats)
    early = evaluate_rounds(arrays, Confidence(0.5, 3), profile)
    assert early.committed.sum() < found.committed.sum()
    assert early.seconds.sum() < found.seconds.sum()


def test_a_rejection_trace_is_not_replayed_and_a_dense_one_has_no_single_rounds(
    arrays: TraceArrays, rejected: dict[str | None, TraceArrays], profile: Profile
) -> None:
    with pytest.raises(TraceError, match="depends on the policy"):
        replay(rejected[None], FixedLength(2), profile)
    with pytest.raises(TraceError, match="live traces"):
        evaluate_rounds(arrays, FixedLength(2), profile)
