"""Training of tree policies: rows, calibration along paths, prices, smaller trees, and what comes out in the live loop."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.benchmark import bench
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.run import decode
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import DraftStep, StopPolicy
from specstop.policies.display import silent
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.features import TREE_FEATURES
from specstop.policies.fixed import FixedLength
from specstop.policies.heads.layers import LinearHead
from specstop.policies.learned import TreeGain
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.policies.tree_rules import TreeRule
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.plan import REPORT_SHARE, split_report
from specstop.train.fit.run import Trained, train
from specstop.train.fit.settle import settle
from specstop.train.fit.tree_calibration import (
    accepted_children,
    accepted_nodes,
    fit_paths,
    fit_shares,
    path_chances,
    tree_rows,
)
from specstop.train.fit.tree_rules import solve_tree, tree_seconds
from specstop.train.heads.rows import Visits
from specstop.train.replay.bounds.static_tree import StaticTree, best_static_tree, likeliest_nodes
from specstop.train.replay.run import Replayed, replay, replay_many
from specstop.train.replay.traces.arrays import TraceArrays, seen_features, trace_arrays, typical_context
from specstop.train.replay.traces.subtrees import on_subtree, subtree

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


def all_visits(trace: Trace) -> Visits:
    arrays = trace_arrays(trace)
    row = (~arrays.cut).nonzero()[:, 0]
    return Visits(row, torch.zeros(len(row), 4))


@pytest.mark.parametrize(("temperature", "head"), [(0.0, "logistic"), (0.7, "logistic"), (0.7, "tokens")])
def test_the_live_loop_plays_what_replay_says(
    pair: Pair,
    prompts: list[Prompt],
    prompt_ids: list[list[int]],
    forest: dict[float, Trace],
    trained: dict[float, Trained],
    profile: Profile,
    temperature: float,
    head: str,
) -> None:
    policy = trained[temperature].policy
    if head == "tokens":
        costs = profile.with_decisions({"tree": 1e-5})
        policy = train(forest[temperature], costs, head=head, rule="gain", passes=1).policy
        assert {"drawn_token", "above_token", "noisy_lead"} <= set(policy.features)
    assert isinstance(policy, TreeGain)
    policy = policy.with_rule(
        dataclasses.replace(policy.rule, rate=0.6 * policy.rule.rate)
    )  # so that it drafts deeper, too
    played = replay(trace_arrays(forest[temperature]), policy, profile)
    speculator = Speculator(pair, policy, Settings(temperature, NEW, tree=TREE, verification="match"), profile)
    sizes = set()
    for s, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
        rounds = speculator.generate(ids, stream_key(0, prompt.id)).rounds
        live = [[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds]
        assert played.log[played.log[:, 0] == s, 1:].tolist() == live
        sizes |= {(r.drafted, r.verified) for r in rounds}
    assert len({drafted for drafted, _ in sizes}) > 2 and any(drafted > verified > 0 for drafted, verified in sizes)


def test_training_leaves_a_folder_that_plays_the_same(
    forest: dict[float, Trace], trained: dict[float, Trained], profile: Profile
) -> None:
    made = trained[0.7]
    assert made.path is not None
    loaded = load_policy_folder(made.path)
    arrays = trace_arrays(forest[0.7])
    assert torch.equal(replay(arrays, loaded, profile).log, replay(arrays, made.policy, profile).log)
    assert loaded.metadata.provenance["tree"] == TREE and loaded.metadata.rho > 0.0
    assert {row["depth"] for row in made.metrics["reliability"]} >= {2, 3}


def test_a_tree_policy_drafts_its_own_tree_unless_another_is_named(
    trained: dict[float, Trained], pair: Pair, prompt_ids: list[list[int]]
) -> None:
    policy, prompts = trained[0.7].policy, [prompt_ids[0]]
    own, chained = Settings(0.7, NEW, verification="match"), Settings(0.7, NEW, tree="chain:3", verification="match")
    assert own.for_policy(policy).tree == TREE and own.for_policy(FixedLength(3)) == own
    assert chained.for_policy(policy) == chained
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = decode(pair, [prompt_ids[0]], policy, settings=own)[0]
        lines = bench(pair, prompts, [policy, FixedLength(3)], settings=own, progress=silent)
    named = decode(pair, [prompt_ids[0]], policy, settings=replace(own, tree=TREE))[0]
    shapes = [[(r.drafted, r.verified, r.accepted, r.deepest) for r in one.rounds] for one in (made, named)]
    assert shapes[0] == shapes[1] and any(drafted > deepest > 0 for drafted, _, _, deepest in shapes[0])
    assert [line.same_text for line in lines] == [1, 1, 1]
    with pytest.warns(SpecstopWarning, match=f"trained for another tree .{re.escape(TREE)}. than this run .1,1,1."):
        decode(pair, [prompt_ids[0]], policy, settings=chained)


def test_a_tree_policy_is_evaluated_and_settled_for_other_costs(
    forest: dict[float, Trace], trained: dict[float, Trained], full_profile: Profile, tmp_path: Path
) -> None:
    made = trained[0.7]
    costly = replace(
        full_profile, low=replace(full_profile.low, verify_s=tuple(30 * s for s in full_profile.low.verify_s))
    )
    report = evaluate(forest[0.7], costly, [made.policy], allow_overlap=True)
    assert "rho as saved" in report["tree"].note
    assert made.path is not None
    rho = load_policy_folder(made.path).metadata.rho
    settled = settle(made.path, forest[0.7], costly)
    assert isinstance(settled, TreeGain) and settled.metadata.rho != rho
    assert load_policy_folder(made.path).metadata.rho == settled.metadata.rho


def test_rows_are_the_children_of_accepted_nodes(forest: dict[float, Trace]) -> None:
    """Counted out one by one."""
    arrays, visited = trace_arrays(forest[0.7]), all_visits(forest[0.7])
    rows = tree_rows(arrays, ("top1", "branch_rank", "depth"), visited)
    tree, at = arrays.tree, 0
    children, width = accepted_children(tree, accepted_nodes(arrays, visited.row))
    assert width.tolist() == [len(below) for below in tree.children]
    for number, row in enumerate(visited.row.tolist()):
        accepted = [True, *arrays.path[row].tolist()]  # type: ignore[index]
        ended = [False, *arrays.ends[row].tolist()]
        for node in range(len(tree)):
            parent = tree.parent[node]
            if node and (not accepted[parent] or ended[node] or ended[parent]):
                continue
            below = tree.children[node]
            assert rows.depth[at] == tree.depth[node]
            assert bool(rows.accepted[at]) == accepted[node]
            assert bool(rows.followed_known[at]) == (accepted[node] and bool(below))
            if below:
                assert children[number, node].tolist()[: len(below)] == [accepted[child] for child in below]
                assert bool(rows.followed[at]) == accepted[below[0]]
            if node:
                assert rows.features[at, 1:].tolist() == [tree.children[parent].index(node), tree.depth[node]]
            at += 1
    assert at == len(rows)


def test_calibration_along_paths_says_how_often_nodes_are_accepted(forest: dict[float, Trace]) -> None:
    """A head that knows nothing: the shifts by depth and rank are the log-odds of the mean."""
    arrays, visited = trace_arrays(forest[0.7]), all_visits(forest[0.7])
    blank = {"mean": np.zeros(1), "scale": np.ones(1), "weight": np.zeros((3, 1)), "bias": np.zeros(3)}
    head = LinearHead(("depth",), {name: values.astype(np.float32) for name, values in blank.items()})
    accept, next_ = fit_paths([(head, visited)], arrays, ("depth",))
    accepted = accepted_nodes(arrays, visited.row)[:, 1:]
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
    weight = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    blank = {"mean": np.zeros(3), "scale": np.ones(3), "bias": np.zeros(3)}
    head = LinearHead(names, {"weight": weight, **{name: v.astype(np.float32) for name, v in blank.items()}})
    accept, next_ = fit_paths([(head, visited)], arrays, names)
    seen = seen_features(arrays, names, visited.row, visited.history).numpy()
    survival, next_chance = path_chances(head, accept, next_, tree, seen)
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
    generator = torch.Generator().manual_seed(2)
    chance = torch.rand(4000, generator=generator).clamp(0.05, 0.95)
    second = torch.sigmoid(-1.0 - 0.8 * torch.logit(chance))
    children = torch.stack([chance > 0.5, torch.rand(4000, generator=generator) < second, torch.zeros(4000) > 0], 1)
    (u, v), (rare, _) = fit_shares(chance, children, torch.full((4000,), 3))
    assert u == pytest.approx(-1.0, abs=0.15) and v == pytest.approx(-0.8, abs=0.15)
    assert rare < -2.0


def test_prices_are_those_of_the_profile(forest: dict[float, Trace], profile: Profile) -> None:
    arrays = trace_arrays(forest[0.0])
    seconds = tree_seconds(arrays, profile, 5e-5)
    context = float((arrays.prompt_tokens + arrays.text_tokens / 2).double().median())
    one = np.ones(1, dtype=np.int64)

    def round_s(fed: list[int], drafted: int, verified: int) -> float:
        rows = np.array([fed])
        (found,) = profile.round_seconds(one * context, one * drafted, one * verified, one, one * 0, 0.0, rows)
        return float(found)

    assert seconds["verify_s"][6] - seconds["verify_s"][2] == pytest.approx(round_s([1], 3, 6) - round_s([1], 3, 2))
    later = round_s([1, 2, 0], 9, 4) - round_s([1, 0, 0], 3, 4)
    assert seconds["draft_s"][1] == pytest.approx(later + 5e-5, rel=0.05)  # children a branch are a mean


def test_prices_of_a_chain_are_those_of_chains(forest: dict[float, Trace], profile: Profile) -> None:
    arrays = on_subtree(trace_arrays(forest[0.0]), [0, 3, 9])
    assert arrays.tree.is_chain
    seconds = tree_seconds(arrays, profile, 0.0)
    costs = np.diff(profile.chain_costs(typical_context(arrays), 0.0, depth=3)).tolist()
    for length in (2, 3):  # padded to the cheaper size
        more = seconds["verify_s"][length] - seconds["verify_s"][length - 1]
        assert costs[length - 1] == pytest.approx(seconds["draft_s"][0] + more)


def test_a_smaller_tree_is_what_collecting_it_would_have_recorded(
    pair: Pair, prompts: list[Prompt], forest: dict[float, Trace], tmp_path: Path
) -> None:
    two = SamplingParams(top_k=2)  # for which a third sibling is never there
    options: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": NEW, "sampling": two}
    filtered = collect(pair, prompts, tmp_path / "filtered", tree=TREE, **options)
    for temperature, trace, sampling in (
        *((t, trace, SamplingParams()) for t, trace in forest.items()),
        (0.7, filtered, two),
    ):
        small = on_subtree(trace_arrays(trace), SMALL)
        name = subtree(trace.header.tree, SMALL).name
        folder = tmp_path / f"{temperature} {sampling.options}"
        options = {"temperature": temperature, "max_new_tokens": NEW, "sampling": sampling}
        whole = trace_arrays(collect(pair, prompts, folder, tree=name, **options))
        assert small.tree.parent == whole.tree.parent
        assert small.path is not None and whole.path is not None
        same = ~whole.cut & ~small.cut  # how near the end a round is cut depends on the depth
        assert torch.equal(small.path[same], whole.path[same]) and torch.equal(
            small.accepted[same], whole.accepted[same]
        )
        for feature in TREE_FEATURES:
            torch.testing.assert_close(small.column(feature), whole.column(feature), atol=1e-5, rtol=1e-5, msg=feature)


@pytest.mark.parametrize("nodes", [[1], [0, 2], [0, 9]])
def test_what_is_no_smaller_tree_is_refused(forest: dict[float, Trace], nodes: list[int]) -> None:
    with pytest.raises(TraceError, match="a smaller tree"):
        on_subtree(trace_arrays(forest[0.0]), nodes)


def test_of_smaller_trees_the_fastest_is_kept(
    forest: dict[float, Trace], profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def priced(costs: Profile, policies: Sequence[StopPolicy], vocabulary: int, **_: object) -> Profile:
        return costs.with_decisions({policy.cost_name: 1e-5 for policy in policies})

    # Timed anew for each, the fastest would be a matter of luck.
    monkeypatch.setattr("specstop.train.fit.tree_rules.add_decisions", priced)
    options: dict[str, Any] = {"rule": "gain", "passes": 1, "progress": silent}
    made = train(forest[0.7], profile, nodes=[1, 4], out=tmp_path / "policy", **options)
    arrays = trace_arrays(forest[0.7])
    arrays, _ = split_report(arrays, REPORT_SHARE, 0)
    best, _ = best_static_tree(arrays, profile)
    static = len(best.nodes)
    alone = [train(forest[0.7], profile, nodes=[size], **options) for size in (1, 4)]
    as_large = subtree(arrays.tree, likeliest_nodes(arrays, static, best.max_depth)).name
    assert made.metrics["tree"] in {as_large, *(one.metrics["tree"] for one in alone)}
    assert made.policy.metadata.rho >= max(one.policy.metadata.rho for one in alone)
    rule = made.policy.rule
    assert isinstance(rule, TreeRule)
    assert sum(map(len, rule.children)) <= 1 + max(4, static)  # the root and as many as were allowed
    assert made.metrics["trees tried"] == len({1, 4, static})
    assert load_policy_folder(tmp_path / "policy").metadata.provenance["tree"] == made.metrics["tree"]
    for rule_name, nodes in (("derived", [4]), ("gain", [0])):
        with pytest.raises(InputError, match="nodes"):
            train(forest[0.7], profile, rule=rule_name, nodes=nodes, progress=silent)


def test_it_is_no_slower_than_the_best_static_tree_where_it_was_trained(
    forest: dict[float, Trace], trained: dict[float, Trained], profile: Profile
) -> None:
    arrays = trace_arrays(forest[0.7])
    static, played = best_static_tree(arrays, profile)
    assert isinstance(static, StaticTree)
    costs = profile.with_decisions({"tree": 1e-5})
    assert replay(arrays, trained[0.7].policy, costs).rate > 0.97 * played.rate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "nothing"}, "unknown head"),
        ({"head": "dynasd-soft"}, "hidden states"),
        ({"passes": 0}, "passes"),
        ({"threshold": 0.5}, "no threshold"),
        ({"features": ["top0"]}, "unknown feature"),
    ],
)
def test_what_it_cannot_be_asked_for(
    forest: dict[float, Trace], profile: Profile, options: dict[str, object], message: str
) -> None:
    with pytest.raises((InputError, ValueError), match=message):
        train(forest[0.0], profile, rule="gain", **options)  # type: ignore[arg-type]


def test_no_decision_begins_after_the_deepest_depth_that_was_reached(
    forest: dict[float, Trace], trained: dict[float, Trained], profile: Profile
) -> None:
    policy = trained[0.7].policy
    assert isinstance(policy, TreeGain) and len(policy.rule.acceptance) > 2
    short = policy.with_rule(dataclasses.replace(policy.rule, acceptance=policy.rule.acceptance[:2], first=1))
    solved, rate = solve_tree(short, trace_arrays(forest[0.7]), profile)
    assert rate > 0.0 and solved.rule.first <= 2


def test_its_rule_is_settled_on_prompts_that_the_head_did_not_see(
    forest: dict[float, Trace], profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: dict[int, set[str]] = {}

    def watched(arrays: TraceArrays, policies: Sequence[StopPolicy], costs: Profile) -> list[Replayed]:
        for policy in policies:
            assert isinstance(policy, TreeGain)
            played.setdefault(id(policy.head), set()).update(arrays.clusters)
        return replay_many(arrays, policies, costs)

    monkeypatch.setattr("specstop.train.fit.rules.replay_many", watched)
    made = train(forest[0.0], profile.with_decisions({"tree": 1e-5}), rule="gain", passes=1, folds=3).policy
    # Each head plays the prompts that it was not fitted on, the saved one those of selection.
    assert isinstance(made, TreeGain) and len(played) == 3
    assert played[id(made.head)] == set(made.metadata.prompts["select"])
    one, two, three = played.values()
    assert not (one & two or one & three or two & three)


def test_traces_that_cannot_be_replayed_are_refused(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path
) -> None:
    from specstop.policies.fixed import FixedLength

    live = collect(pair, prompts, tmp_path, tree=TREE, max_new_tokens=NEW, collector="live", policy=FixedLength(2))
    with pytest.raises(TraceError, match="rule gain"):
        train(live, profile, rule="gain")
