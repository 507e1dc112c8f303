"""Rules tuned on replays, for one text, for batches and for trees."""

from __future__ import annotations

import dataclasses
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH
from head_tensors import Certain, learned, with_head
from joint_policies import batch_policy, linear_head
from specstop.collect import Trace, collect
from specstop.decode import SamplingParams, decode, stream_key
from specstop.policies import Confidence, FixedLength, save_policy
from specstop.policies.batch_rules import BatchStop, for_batches
from specstop.policies.display import silent
from specstop.policies.features import TREE_FEATURES
from specstop.policies.learned import PathCalibrator, TreeGain
from specstop.policies.published.load import LoadLength
from specstop.policies.rules import Derived, Threshold
from specstop.policies.storage import load_policy_folder
from specstop.policies.tree_rules import TreeRule
from specstop.train import trace_arrays, train
from specstop.train.fit import rules as fit_rules
from specstop.train.fit.adapt import MIN_GAIN_IN_SAMPLE, adapt_to_profile, solve_rate
from specstop.train.fit.batch_rules import batch_rate, tune_batch_lengths, tune_batch_rule
from specstop.train.fit.rules import Part, best_of, derived_thresholds, fixed_grid, left_out_parts, replayed_rates
from specstop.train.fit.tree_rules import TreeRounds, fit_paths, path_chances, sibling_shares
from specstop.train.heads.crossfit import prompt_folds
from specstop.train.heads.rows import Visits
from specstop.train.replay.arrays import typical_context
from specstop.train.replay.batch import arrive_at_once, replay_batch, request_order
from specstop.train.replay.bounds import restrict_to_subtree, subtree
from specstop.train.replay.rounds import scale_costs
from specstop.train.replay.run import replay
from synthetic import with_batches

from specstop import DraftStep, Settings, SpecstopWarning, Speculator, bench, parse_tree

CLOSE = 0.005  # of a rate: what the start of the iteration may cost, as few tokens have a say


@pytest.fixture(scope="module")
def arrays(sides):
    return trace_arrays(sides[0])


@pytest.mark.parametrize("factor", [0.01, 0.2, 1.0, 3.0])
def test_the_best_length_and_threshold_are_the_fastest(arrays, profile, factor):
    costs = scale_costs(profile, draft=factor)
    rates = [replay(arrays, FixedLength(k), costs).rate for k in range(DEPTH + 1)]
    grid = fixed_grid(arrays, costs)
    assert [r.rate for r in grid] == rates and best_of(grid) is grid[rates.index(max(rates))]
    by_threshold = {t: replay(arrays, Confidence(t, DEPTH), costs).rate for t in fit_rules.THRESHOLDS}
    assert by_threshold[fit_rules.tune_confidence(arrays, costs).threshold] == max(by_threshold.values())


@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0])
def test_the_solved_rule_is_no_slower_than_any_rule_with_the_first_rho(arrays, learned, full_profile, factor):
    costs = scale_costs(full_profile, draft=factor)
    acceptance = learned.metadata.acceptance
    solved, rate = solve_rate(learned, arrays, costs, acceptance)
    assert rate == replay(arrays, solved, costs).rate
    rho = max(r.rate for r in fixed_grid(arrays, costs))
    context, decision_s = typical_context(arrays), costs.decision("logistic")
    for share in fit_rules.LOOK_AHEAD:
        for first in fit_rules.FIRST_DEPTHS:
            table = costs.chain_costs(context, decision_s, first, DEPTH)
            rule = Derived(derived_thresholds(rho, table, [share * a for a in acceptance]), first)
            other = replay(arrays, learned.with_rule(rule), costs).rate
            # The iteration begins at this rho for depth 1 only; another has to be clearly better than the best.
            assert (1 + fit_rules.MIN_GAIN) ** fit_rules.FIRST_DEPTHS.index(first) * rate >= other * (
                1 if first == 1 else 1 - CLOSE
            )
    assert (solved.head, solved.accept, solved.next) == (learned.head, learned.accept, learned.next)


def test_a_free_draft_is_followed_to_the_end_and_a_priceless_one_never_begun(arrays, learned, full_profile):
    """Where verification has one price and drafting none, stopping gains nothing; at the other end, drafting does not."""
    low = dataclasses.replace(full_profile.low, draft_s=(0.0, 0.0), draft_token_s=0.0, verify_s=(1.0,) * (DEPTH + 1))
    free = dataclasses.replace(full_profile, low=low, high=low, step_s=0.0, decision_s={})
    solved, rate = solve_rate(learned, arrays, free, learned.metadata.acceptance)
    assert rate == pytest.approx(replay(arrays, FixedLength(DEPTH), free).rate)
    costly = scale_costs(full_profile, draft=1000.0)
    solved, rate = solve_rate(learned, arrays, costly, learned.metadata.acceptance)
    assert solved.first == 0
    assert int(replay(arrays, solved, costly).drafted.sum()) == 0


def test_rules_are_tuned_on_other_prompts(arrays, learned, full_profile):
    folds, heads = prompt_folds(arrays, 3, 0), [Certain(0.0), Certain(30.0), Certain(-30.0)]
    rules = [learned.with_rule(Threshold("step", threshold)) for threshold in (0.3, 0.6)]
    result = replayed_rates(left_out_parts(arrays, folds, heads), full_profile)(rules)
    for policy, rate in zip(rules, result, strict=True):
        played = [
            replay(arrays.subset(folds.sequences(fold)), with_head(policy, head), full_profile)
            for fold, head in enumerate(heads)
        ]
        assert played[2].drafted.double().mean() <= 1.0 < played[1].drafted.double().mean()
        tokens, seconds = (sum(float(getattr(one, of).sum()) for one in played) for of in ("tokens", "seconds"))
        assert rate == pytest.approx(tokens / seconds, rel=1e-6)  # sums of float32


EXACT = 1e-9


@pytest.fixture(scope="module")
def held(traces):
    return trace_arrays(traces[0.7])


@pytest.fixture(scope="module")
def timed(profile):
    return with_batches(profile)


def test_decisions_that_cost_more_than_they_gain_are_left_out(held, timed):
    free = batch_policy(names=("top1", "mean_accepted", "noisy_margin"), depth=DEPTH)
    name = for_batches(free, profile=timed).cost_name
    settled = tune_batch_rule(free, [Part(held)], timed.with_decisions({name: 3.0}))
    assert [size for size, _ in settled.rule.lengths] == [2, 4] and sorted(settled.unasked) == [1, 2, 3, 4]
    scheduled = LoadLength(",".join(f"{size}:{length}" for size, length in sorted(settled.unasked.items())))
    for size, _ in settled.rule.lengths:
        played, fixed = (
            replay_batch(held, policy, settled.profile, size, arrive_at_once(held.sequences))
            for policy in (settled, scheduled)
        )
        assert float(played.seconds.sum()) == pytest.approx(float(fixed.seconds.sum()), rel=EXACT)
        assert not played.decisions.any()
    # Where only decisions have another price, what was settled stays, unless there are traces to settle it again.
    cheap, settled.drafter = timed.with_decisions({name: 1e-9}), "suffix"
    kept, note = adapt_to_profile(settled, None, cheap)
    assert isinstance(kept, BatchStop) and (kept.unasked, note) == (settled.unasked, "")
    assert kept.profile.decision(name) == cheap.decision(name)
    again, note = adapt_to_profile(settled, held, cheap)
    assert "on the training traces" in note and kept.drafter == again.drafter == "suffix"
    assert again.rule.to_dict() == tune_batch_rule(settled, [Part(held)], cheap, MIN_GAIN_IN_SAMPLE).rule.to_dict()  # type: ignore[attr-defined]
    everything = for_batches(settled, "all")
    assert for_batches(everything, profile=cheap).rule.send == "all" != for_batches(settled, profile=cheap).rule.send


def test_a_rule_decides_nothing_in_batches_where_that_loses(held, timed, tmp_path):
    policy = learned(rule=Derived([0.1, 0.2, 0.3, 0.2], 1))
    paid = timed.with_decisions({policy.cost_name: 3.0})
    settled = tune_batch_lengths(policy, [Part(held)], paid)
    (alone, none), *lengths = settled.rule.lengths
    assert (alone, none) == (1, None) and [size for size, _ in lengths] == [2, 4]
    assert isinstance(settled.rule, Derived) and settled.rule.thresholds == policy.rule.thresholds
    assert sorted(settled.unasked) == [2, 3, 4], "it was solved for one text"
    for size, length in lengths:
        played = replay_batch(held, settled, paid, size, arrive_at_once(held.sequences))
        fixed = replay_batch(held, FixedLength(length), paid, size, arrive_at_once(held.sequences))
        is_shared = played.call.bincount()[played.call] > 1
        assert not played.decisions[is_shared].any()
        assert torch.equal(played.log[is_shared], fixed.log[: int(is_shared.sum())])
    assert load_policy_folder(save_policy(settled, tmp_path / "p")).unasked == settled.unasked
    assert tune_batch_lengths(policy, [Part(held)], dataclasses.replace(timed, batch=None)) is policy


def test_rules_for_batches_are_settled_on_prompts_left_out(held, timed):
    policy = learned(rule=Derived([0.3] * DEPTH, 1))
    policy.metadata = dataclasses.replace(policy.metadata, acceptance=(0.8,) * DEPTH)
    free = timed.with_decisions({policy.cost_name: 0.0, for_batches(policy, profile=timed).cost_name: 0.0})
    halves, heads = [held.subset([*range(at, held.sequences, 2)]) for at in (0, 1)], [Certain(-30.0), Certain(30.0)]
    apart = [Part(half, head) for half, head in zip(halves, heads, strict=True)]
    tokens = seconds = 0.0
    for half, head in zip(halves, heads, strict=True):
        order = request_order(half.sequences, 4, 0)[:24]
        played = replay_batch(half, with_head(policy, head), free, 4, arrive_at_once(len(order)), order)
        tokens += float(played.committed.sum())
        seconds += float(played.seconds.sum()) - free.prefill_seconds(half.prompt_tokens.numpy()[order]).sum()
    assert batch_rate(policy, apart, free, 4) == pytest.approx(float(tokens / seconds), rel=EXACT)
    # On prompts that were left out the heads know nothing, whatever the policy's own head may know of its own prompts.
    unaware = [Part(held, Certain(30.0)), Part(held, Certain(30.0))]
    costly = free.with_decisions({name: 2e-4 for name in free.decision_s})
    for settled in (tune_batch_lengths(policy, unaware, costly), tune_batch_rule(policy, unaware, costly)):
        assert settled.head is policy.head
        assert {2, 4} <= {size for size, length in settled.rule.lengths if length is not None}  # type: ignore[attr-defined]


TREE = "3,2,1,1,1"
SMALL = [0, 1, 3, 4, 5, 9, 10, 11, 15]
"""Of TREE: two roots, below the first both children, below the second one."""


@pytest.fixture(scope="module")
def trained(forest, profile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    costs = profile.with_decisions({"tree": 1e-5})
    return {t: train(trace, costs, rule="gain", out=folder / str(t), passes=2) for t, trace in forest.items()}


def all_visits(trace: Trace) -> Visits:
    arrays = trace_arrays(trace)
    row = (~arrays.cut).nonzero()[:, 0]
    return Visits(row, torch.zeros(len(row), 4))


@pytest.mark.parametrize(("temperature", "head"), [(0.0, "logistic"), (0.7, "logistic"), (0.7, "tokens")])
def test_the_live_loop_plays_what_replay_says(pair, prompts, prompt_ids, forest, trained, profile, temperature, head):
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


def test_a_tree_policy_drafts_its_own_tree_unless_another_is_named(trained, pair, prompt_ids):
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


def test_rows_are_the_children_of_accepted_nodes(forest):
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
            assert bool(rows.has_label[at, 1]) == (accepted[node] and bool(below))
            if below:
                assert children[number, node].tolist()[: len(below)] == [accepted[child] for child in below]
                assert bool(rows.labels[at, 1]) == accepted[below[0]]
            if node:
                assert rows.features[at, 1:].tolist() == [tree.children[parent].index(node), tree.depth[node]]
            at += 1
    assert at == len(rows)


def test_chances_on_a_trace_are_those_that_the_policy_works_out(forest):
    """What siblings' shares are fitted on is what the rule reads when it applies them."""
    arrays, visited = trace_arrays(forest[0.7]), all_visits(forest[0.7])
    names, tree = ("top1", "depth"), arrays.tree
    head = linear_head(names, np.random.default_rng(0).normal(size=(3, 3)))
    rounds = TreeRounds.of(arrays, names, visited)
    accept, next_ = fit_paths([(head, rounds)])
    seen, (survival, next_chance) = rounds.features, path_chances(head, accept, next_, rounds)
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


def test_shares_follow_the_chance_of_the_best_child():
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


def test_a_smaller_tree_is_what_collecting_it_would_have_recorded(pair, prompts, forest, tmp_path):
    filtered = SamplingParams(top_k=2)  # for which a third sibling is never there
    options: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": NEW, "progress": silent}
    large = collect(pair, prompts, tmp_path / "large", tree=TREE, sampling=filtered, **options)
    for trace, sampling in ((forest[0.7], SamplingParams()), (large, filtered)):
        small = restrict_to_subtree(trace_arrays(trace), SMALL)
        name, folder = subtree(trace.header.tree, SMALL).name, tmp_path / f"small {sampling.options}"
        whole = trace_arrays(collect(pair, prompts, folder, tree=name, sampling=sampling, **options))
        assert small.tree.parent == whole.tree.parent and small.path is not None and whole.path is not None
        same = ~whole.cut & ~small.cut  # how near the end a round is cut depends on the depth
        assert torch.equal(small.path[same], whole.path[same])
        assert torch.equal(small.accepted[same], whole.accepted[same])
        for feature in TREE_FEATURES:
            torch.testing.assert_close(small.column(feature), whole.column(feature), atol=1e-5, rtol=1e-5, msg=feature)
