"""Training of tree policies: rows, calibration along paths, prices, smaller trees, and what comes out in the live loop."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from specstop.collect import collect
from specstop.decode import Pair, SamplingParams, decode, parse_tree, stream_key
from specstop.policies import Array, FixedLength
from specstop.policies.display import silent
from specstop.policies.features import TREE_FEATURES
from specstop.policies.heads.layers import LinearHead
from specstop.policies.learned import PathCalibrator, TreeGain
from specstop.policies.tree_rules import TreeRule
from specstop.train import Trained, trace_arrays, train
from specstop.train.fit.settle import settle_for
from specstop.train.fit.tree_rules import TreeRounds, fit_paths, path_chances, sibling_shares, tree_seconds
from specstop.train.heads.rows import Visits
from specstop.train.replay.bounds import on_subtree, subtree
from specstop.train.replay.checks import check_fit

from specstop import DraftStep, Profile, Prompt, Settings, SpecstopWarning, Speculator, Trace, bench, evaluate, replay

TREE = "3,2,1,1,1"
SMALL = [0, 1, 3, 4, 5, 9, 10, 11, 15]
"""Of TREE: two roots, below the first both children, below the second one."""


@pytest.fixture(scope="module")
def forest(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[float, Trace]:
    folder = tmp_path_factory.mktemp("trees")
    return {
        t: collect(pair, prompts, folder / str(t), tree=TREE, temperature=t, max_new_tokens=NEW) for t in (0.0, 0.7)
    }


@pytest.fixture(scope="module")
def trained(
    forest: dict[float, Trace], profile: Profile, tmp_path_factory: pytest.TempPathFactory
) -> dict[float, Trained]:
    folder = tmp_path_factory.mktemp("trained")
    costs = profile.with_decisions({"tree": 1e-5})
    return {t: train(trace, costs, rule="gain", out=folder / str(t), passes=2) for t, trace in forest.items()}


def linear_head(names: tuple[str, ...], weight: Array) -> LinearHead:
    count = weight.shape[1]
    tensors = {"mean": np.zeros(count), "scale": np.ones(count), "weight": weight, "bias": np.zeros(3)}
    return LinearHead(names, {name: values.astype(np.float32) for name, values in tensors.items()})


def all_visits(trace: Trace) -> Visits:
    arrays = trace_arrays(trace)
    row = (~arrays.cut).nonzero()[:, 0]
    return Visits(row, torch.zeros(len(row), 4))


@pytest.mark.parametrize(("temperature", "head"), [(0.0, "logistic"), (0.7, "logistic"), (0.7, "tokens")])
def test_the_live_loop_plays_what_replay_says(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], forest: dict[float, Trace],
    trained: dict[float, Trained], profile: Profile, temperature: float, head: str,
) -> None:  # fmt: skip
    policy = trained[temperature].policy
    if head == "tokens":
        costs = profile.with_decisions({"tree": 1e-5})
        policy = train(forest[temperature], costs, head=head, rule="gain", passes=1).policy
    assert isinstance(policy, TreeGain)
    policy = policy.with_rule(replace(policy.rule, rate=0.6 * policy.rule.rate))  # so that it drafts deeper, too
    played = replay(trace_arrays(forest[temperature]), policy, profile)
    speculator = Speculator(pair, policy, Settings(temperature, NEW, tree=TREE, verification="match"), profile)
    sizes = set()
    for s, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
        rounds = speculator.generate(ids, stream_key(0, prompt.id)).rounds
        live = [[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds]
        assert played.log[played.log[:, 0] == s, 1:].tolist() == live
        sizes |= {(r.drafted, r.verified) for r in rounds}
    assert len({drafted for drafted, _ in sizes}) > 2 and any(drafted > verified > 0 for drafted, verified in sizes)


def test_a_tree_policy_drafts_its_own_tree_unless_another_is_named(
    trained: dict[float, Trained], pair: Pair, prompt_ids: list[list[int]]
) -> None:
    policy, prompts = trained[0.7].policy, [prompt_ids[0]]
    length, chained = Settings(0.7, NEW, verification="match"), Settings(0.7, NEW, tree="chain:3", verification="match")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = decode(pair, [prompt_ids[0]], policy, settings=length)[0]
        lines = bench(pair, prompts, [policy, FixedLength(3)], settings=length, progress=silent)
    named = decode(pair, [prompt_ids[0]], policy, settings=replace(length, tree=TREE))[0]
    shapes = [[(r.drafted, r.verified, r.accepted, r.deepest) for r in one.rounds] for one in (output, named)]
    assert shapes[0] == shapes[1] and any(drafted > deepest > 0 for drafted, _, _, deepest in shapes[0])
    assert [line.same_text for line in lines] == [1, 1, 1]
    with pytest.warns(SpecstopWarning, match=f"trained for another tree .{re.escape(TREE)}. than this run .1,1,1."):
        decode(pair, [prompt_ids[0]], policy, settings=chained)


def test_a_tree_policy_is_evaluated_and_settled_for_other_costs(
    forest: dict[float, Trace], trained: dict[float, Trained], full_profile: Profile
) -> None:
    policy, verify_s = trained[0.7].policy, tuple(30 * s for s in full_profile.low.verify_s)
    costly = replace(full_profile, low=replace(full_profile.low, verify_s=verify_s))
    report = evaluate(forest[0.7], costly, [policy], allow_overlap=True)
    assert "rho as saved" in report["tree"].note
    settled, note = settle_for(policy, trace_arrays(forest[0.7]), costly)
    assert isinstance(settled, TreeGain) and settled.metadata.rho != policy.metadata.rho
    assert "not fitted on" in note and costly.same_costs(settled.metadata.profile)
    smaller = train(forest[0.7], costly.with_decisions({"tree": 1e-5}), head="logistic", rule="gain", nodes=[1]).policy
    with pytest.warns(SpecstopWarning, match="trained for another tree"):
        check_fit(smaller, forest[0.7])


def test_rows_are_the_children_of_accepted_nodes(forest: dict[float, Trace]) -> None:
    """Counted out one by one."""
    arrays, visited = trace_arrays(forest[0.7]), all_visits(forest[0.7])
    rounds = TreeRounds.of(arrays, ("top1", "branch_rank", "depth"), visited)
    rows, tree, at, children = rounds.fit_rows(), arrays.tree, 0, rounds.accepted_children
    assert rounds.width.tolist() == [len(below) for below in tree.children]
    for number, row in enumerate(visited.row.tolist()):
        accepted = [True, *arrays.path[row].tolist()]  # type: ignore[index]
        ended = [False, *arrays.ends[row].tolist()]
        for node in range(len(tree)):
            parent = tree.parent[node]
            if node and (not accepted[parent] or ended[node] or ended[parent]):
                continue
            below = tree.children[node]
            assert rows.depth[at] == tree.depth[node]
            assert bool(rows.labels[at, 0]) == accepted[node]
            assert bool(rows.known[at, 1]) == (accepted[node] and bool(below))
            if below:
                assert children[number, node].tolist()[: len(below)] == [accepted[child] for child in below]
                assert bool(rows.labels[at, 1]) == accepted[below[0]]
            if node:
                assert rows.features[at, 1:].tolist() == [tree.children[parent].index(node), tree.depth[node]]
            at += 1
    assert at == len(rows)


def test_calibration_along_paths_says_how_often_nodes_are_accepted(forest: dict[float, Trace]) -> None:
    """A head that knows nothing: the shifts by depth and rank are the log-odds of the mean."""
    arrays, visited = trace_arrays(forest[0.7]), all_visits(forest[0.7])
    head = linear_head(("depth",), np.zeros((3, 1)))
    accept, next_ = fit_paths([(head, TreeRounds.of(arrays, ("depth",), visited))])
    accepted = arrays.accepted_nodes(visited.row)
    there = ~arrays.ends[visited.row]
    ranks = np.array([0, 1, 2])
    chance = accept.of(np.ones(3), np.zeros(3), 1, ranks)
    for rank in range(3):
        assert chance[rank] == pytest.approx(float(accepted[:, rank][there[:, rank]].double().mean()), abs=0.05)
    first = next_.of(np.ones(1), np.zeros(1), 0, np.zeros(1, dtype=int))[0]
    assert first == pytest.approx(float(accepted[:, 0].double().mean()), abs=0.02)


def test_chances_on_a_trace_are_those_that_the_policy_works_out(forest: dict[float, Trace]) -> None:
    """What siblings' shares are fitted on is what the rule reads when it applies them."""
    arrays, visited = trace_arrays(forest[0.7]), all_visits(forest[0.7])
    names, tree = ("top1", "depth"), arrays.tree
    head = linear_head(names, np.random.default_rng(0).normal(size=(3, 3)))
    rounds = TreeRounds.of(arrays, names, visited)
    accept, next_ = fit_paths([(head, rounds)])
    seen, (survival, next_chance) = rounds.seen, path_chances(head, accept, next_, rounds)
    below = [[len(tree.children[row]) for row in level] for level in tree.levels]
    rule = TreeRule(1.0, 1.0, [1.0], [1.0], [0.5] * arrays.depth, [(-2.0, 0.5)] * 2, below, first=0)
    policy, state, streams = TreeGain("tree", names, head, accept, next_, rule, arrays.depth), None, len(seen)
    for depth, level in enumerate(tree.levels):
        first = tree.levels[depth - 1][0] if depth else 0
        parent = np.array([max(tree.parent[row] - first, 0) for row in level])[None].repeat(streams, 0)
        features = np.ascontiguousarray(seen[:, level])
        step = DraftStep(depth, np.ones(parent.shape, dtype=bool), parent, features, {}, np.arange(streams))
        _, state = policy.keep(step, state)
        if depth:
            np.testing.assert_allclose(state[1], np.stack([survival[:, level], next_chance[:, level]], 1), rtol=1e-12)


def test_shares_follow_the_chance_of_the_best_child() -> None:
    """Of three children of the anchor the second is accepted with a known law of `next`, and the third never."""
    generator = np.random.default_rng(2)
    logit_next = generator.uniform(-3.0, 3.0, 4000)
    chance = 1 / (1 + np.exp(-np.column_stack([logit_next, -1.0 - 0.8 * logit_next])))
    accepted = np.ones((4000, 4), dtype=bool)
    accepted[:, 1:3], accepted[:, 3] = generator.random(chance.shape) < chance, False
    seen = np.zeros((4000, 4, 1), dtype=np.float32)
    seen[:, 0, 0] = logit_next
    head = linear_head(("anchor_entropy",), np.array([[0.0], [1.0], [1.0]]))  # `next` is the feature
    rounds = TreeRounds(parse_tree("3"), seen, accepted, np.ones_like(accepted))
    same = PathCalibrator(np.array([[1.0, 0.0, 0.0, 0.0, 0.0]] * 2, dtype=np.float32))
    (u, v), (rare, _) = sibling_shares([(head, rounds)], same, same)
    assert u == pytest.approx(-1.0, abs=0.15) and v == pytest.approx(-0.8, abs=0.15)
    assert rare < -2.0


def test_prices_are_those_of_the_profile(forest: dict[float, Trace], profile: Profile) -> None:
    arrays = trace_arrays(forest[0.0])
    seconds = tree_seconds(arrays, profile, 5e-5)
    context = float((arrays.prompt_tokens + arrays.text_tokens / 2).double().median())
    one = np.ones(1, dtype=np.int64)

    def round_s(fed: list[int], drafted: int, verified: int) -> float:
        rows = np.array([fed])
        (result,) = profile.round_seconds(one * context, one * drafted, one * verified, one, one * 0, 0.0, rows)
        return float(result)

    assert seconds["verify_s"][6] - seconds["verify_s"][2] == pytest.approx(round_s([1], 3, 6) - round_s([1], 3, 2))
    later = round_s([1, 2, 0], 9, 4) - round_s([1, 0, 0], 3, 4)
    assert seconds["draft_s"][1] == pytest.approx(later + 5e-5, rel=0.05)  # children a branch are a mean


def test_a_smaller_tree_is_what_collecting_it_would_have_recorded(
    pair: Pair, prompts: list[Prompt], forest: dict[float, Trace], tmp_path: Path
) -> None:
    filtered = SamplingParams(top_k=2)  # for which a third sibling is never there
    options: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": NEW, "progress": silent}
    large = collect(pair, prompts, tmp_path / "large", tree=TREE, sampling=filtered, **options)
    for trace, sampling in ((forest[0.7], SamplingParams()), (large, filtered)):
        small = on_subtree(trace_arrays(trace), SMALL)
        name, folder = subtree(trace.header.tree, SMALL).name, tmp_path / f"small {sampling.options}"
        whole = trace_arrays(collect(pair, prompts, folder, tree=name, sampling=sampling, **options))
        assert small.tree.parent == whole.tree.parent and small.path is not None and whole.path is not None
        same = ~whole.cut & ~small.cut  # how near the end a round is cut depends on the depth
        assert torch.equal(small.path[same], whole.path[same])
        assert torch.equal(small.accepted[same], whole.accepted[same])
        for feature in TREE_FEATURES:
            torch.testing.assert_close(small.column(feature), whole.column(feature), atol=1e-5, rtol=1e-5, msg=feature)
