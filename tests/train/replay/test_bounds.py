"""Bounds: no policy is faster, exhaustive search is not either, and losses against them add up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES
from drawn_law import drawn_traces, profile as drawn_profile
from random_stops import ByTokens
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.decode.topology import parse_tree
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.costs import CostTable
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.policies.tree_rules import Gain
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.bounds import (
    StaticTree,
    best_static_tree,
    best_subtrees,
    drafted_alone,
    judge,
    likeliest_nodes,
    on_subtree,
    oracle_plan,
    oracle_seconds,
    planned_rounds,
)
from specstop.train.replay.run import replay
from synthetic import synthetic_trace
from text_law import Case

SUMS = 1e-9


@pytest.fixture(scope="module")
def trees(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> TraceArrays:
    folder = tmp_path_factory.mktemp("tree")
    return trace_arrays(collect(pair, prompts, folder, tree="3,2,1,1,1", temperature=0.7, max_new_tokens=NEW))


@pytest.fixture(scope="module")
def chains(traces: dict[float, Trace]) -> TraceArrays:
    return trace_arrays(traces[0.7])


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_no_policy_is_faster_than_the_oracle_and_losses_add_up(
    request: pytest.FixtureRequest, profile: Profile, kind: str
) -> None:
    arrays = request.getfixturevalue(kind)
    plan = oracle_plan(arrays, profile)
    policies = [*TEST_POLICIES.values(), FixedLength(2), FixedLength(3)]
    if kind == "trees":
        policies += [StaticTree(arrays.tree, nodes) for _, nodes in best_subtrees(arrays.tree, [0.5] * 24, 3)]
    slowest_share = 1.0
    for policy in policies:
        rounds = replay(arrays, policy, profile)
        assert (rounds.seconds >= plan.seconds - SUMS).all(), policy.name
        slowest_share = min(slowest_share, float(plan.seconds.sum() / rounds.seconds.sum()))
        regret = judge(arrays, rounds, plan, profile)
        lost = rounds.by_sequence(regret.choice_s + regret.decision_s + regret.backlog_s)
        assert lost.tolist() == pytest.approx((rounds.seconds - plan.seconds).tolist(), abs=SUMS)
        assert (regret.choice_s >= -SUMS).all() and not (regret.early & regret.late).any()
        if kind == "chains":
            same = (rounds.steps == regret.ideal) & (rounds.verified == rounds.steps)
            assert not (regret.early | regret.late)[same].any()
    assert slowest_share > 0.2
    planned = planned_rounds(arrays, plan)
    assert planned.tokens.tolist() == arrays.text_tokens.tolist()
    if kind == "chains":  # in a tree, a path may be priced as a chain
        choice = judge(arrays, planned, plan, profile).choice_s
        larger_is_cheaper = planned.by_sequence(choice)
        assert planned.text_seconds(plan.profile).tolist() == pytest.approx((plan.seconds + larger_is_cheaper).tolist())
    part = oracle_seconds(arrays.subset([4, 1]), profile)
    torch.testing.assert_close(part, plan.seconds[[4, 1]], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_oracle_is_the_best_of_all_choices_of_lengths(seed: int) -> None:
    """Exhaustive search: at each anchor any k, at the price of k or of any deeper round."""
    generator = torch.Generator().manual_seed(seed)
    depth = 3
    costs = torch.rand(2, depth + 1, generator=generator, dtype=torch.float64) + 0.5
    low, high = (CostTable(c, (0.1, 0.2), 0.0, tuple(v.tolist())) for c, v in zip((8.0, 20.0), costs, strict=True))
    profile = Profile(low, high, 0.01, 0.05, (0.5, 0.01))
    accepted = [
        [min(int(torch.randint(0, depth + 1, (), generator=generator)), n - t) for t in range(n)] for n in (1, 4, 6)
    ]

    @functools.cache
    def cost(context: int, k: int) -> float:
        one = np.ones(1, dtype=np.int64)
        rounds = [(one * context, one * paid, one * paid, one, one * 0) for paid in range(k, depth + 1)]
        return min(profile.round_seconds(*r, 0.0).item() for r in rounds)

    def best(lengths: list[int], t: int) -> float:
        if t >= len(lengths):
            return 0.0
        return min(cost(8 + t, k) + best(lengths, t + min(lengths[t], k) + 1) for k in range(depth + 1))

    expected = [best(lengths, 0) + 0.5 + 7 * 0.01 for lengths in accepted]
    assert oracle_seconds(synthetic_trace(accepted, depth), profile).tolist() == pytest.approx(expected, abs=SUMS)


@pytest.mark.parametrize(
    ("draft_s", "verify_s", "anchors", "seconds"),
    [
        ((0.0, 0.0), (1.0, 1.0, 1.0, 1.0), 8, 2.0),  # a round of 3 + 1 tokens for 1 s
        ((0.1, 0.1), (1.0, 1.0), 8, 4.4),  # the profile ends at depth 1: two tokens in 1.1 s
        # A noisy profile, in which reading two tokens is cheaper: full acceptance leaves a backlog of two each round.
        ((0.11, 0.10), (1.0, 1.0, 1.0, 1.0), 12, 3 * 1.3),
    ],
)
def test_a_perfect_draft_reaches_its_closed_form(
    draft_s: tuple[float, float], verify_s: tuple[float, ...], anchors: int, seconds: float
) -> None:
    table = CostTable(8.0, draft_s, 0.0, verify_s, 0.1 if draft_s[0] else None)
    profile = Profile(table, table, 0.0, 0.0, (0.0, 0.0))
    arrays = synthetic_trace([[3] * anchors], 3)
    bound = oracle_seconds(arrays, profile)
    assert bound.tolist() == pytest.approx([seconds])
    for k in range(len(verify_s)):
        assert replay(arrays, FixedLength(k), profile).seconds >= bound - SUMS


class ByRound(StopPolicy):
    """Drafts a given length in each round of a text."""

    name, first = "by-round", 0

    def __init__(self, lengths: tuple[int, ...], depth: int) -> None:
        self.lengths, self.max_depth = np.array(lengths), depth

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        at = np.minimum(np.asarray(state), len(self.lengths) - 1)
        return step.alive & (step.depth < self.lengths[at])[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return np.asarray(state) + outcome.active


@pytest.mark.parametrize(
    ("mode", "tree"),
    [("rejection", "chain:3"), ("block", "chain:3"), ("rejection", "2,1"), ("rejection_replace", "1,2")],
)
def test_the_oracle_is_the_best_of_all_lengths_on_every_draw_of_a_given_text(mode: str, tree: str) -> None:
    """With a vocabulary of three tokens all draws are enumerated."""
    case = Case(mode, tree, partial(ByTokens, 3, stops=0.5), "mixed", 1, True, new=4)
    draws = 0
    for text in [text for text in case.texts() if len(text) > 2][:3]:
        arrays, weights = drawn_traces(case, text)
        costs, depth = drawn_profile(arrays.tree), arrays.depth
        verify_s = (1.0e-3, 1.3e-3, 1.5e-3, 2.1e-3)[: depth + 1]
        sides = {n: dataclasses.replace(getattr(costs, n), verify_s=verify_s) for n in ("low", "high")}
        costs = dataclasses.replace(costs, **sides)
        bound = oracle_seconds(arrays, costs)
        every = itertools.product(range(depth + 1), repeat=len(text) - 1)
        least = torch.stack([replay(arrays, ByRound(lengths, depth), costs).seconds for lengths in every]).amin(0)
        if arrays.tree.is_chain:
            torch.testing.assert_close(least, bound, rtol=1e-12, atol=0.0)
        else:  # the price of one path, which no round of whole depths has
            assert bool((least >= bound - 1e-12).all())
        assert abs(float(weights.sum()) - 1.0) < 1e-9
        draws += arrays.sequences
    assert draws > 10


def test_a_tree_policy_that_leaves_out_drawn_tokens_is_refused_under_rejection() -> None:
    case = Case("rejection", "2,1", partial(ByTokens, 3), "mixed", 1, True, new=4)
    arrays, _ = drawn_traces(case, next(text for text in case.texts() if len(text) > 2))
    with pytest.raises(PolicyError, match=r"gain.*rejection"):
        replay(arrays, Gain(max_depth=2), drawn_profile(arrays.tree))


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
        subtrees = best_subtrees(tree, chance, depth)
        assert [value for value, _ in subtrees] == pytest.approx([every[n] for n in range(len(every))])
        for n, (value, nodes) in enumerate(subtrees):
            assert len(nodes) == n and sum(chance[node] for node in nodes) == pytest.approx(value)
            assert all(tree.parent[node + 1] == 0 or tree.parent[node + 1] - 1 in nodes for node in nodes)


def test_the_likeliest_nodes_are_a_tree_that_a_smaller_trace_can_have(trees: TraceArrays) -> None:
    """First siblings first, even if a few texts say otherwise or nothing."""
    assert trees.path is not None
    nodes = torch.arange(trees.tree.nodes)
    nothing = dataclasses.replace(trees, path=trees.path & False)
    first_row, last = torch.arange(len(trees.accepted)) == 0, trees.tree.children[0][-1] - 1
    only_last = dataclasses.replace(trees, path=first_row[:, None] & (nodes == last))
    for arrays in (trees, nothing, only_last):
        for count in range(trees.tree.nodes + 1):
            picked = likeliest_nodes(arrays, count, DEPTH)
            assert len(picked) == on_subtree(arrays, picked).tree.nodes == count
    assert likeliest_nodes(trees, 1, DEPTH) == [0]
    with pytest.raises(InputError, match="nodes"):
        likeliest_nodes(trees, trees.tree.nodes, 1)


def test_the_best_static_tree_is_drafted_alone(trees: TraceArrays, profile: Profile) -> None:
    """It verifies what it would as part of the recorded tree, and pays for no other candidates."""
    costly = dataclasses.replace(profile, tree_outside_s=(1e-4, 1e-5, 5e-3), step_s=5e-3)
    for costs in (profile, costly):
        policy, rounds = best_static_tree(trees, costs)
        inside = replay(trees, policy, costs)
        assert torch.equal(rounds.tokens, inside.tokens) and torch.equal(rounds.verified, inside.verified)
        assert rounds.seconds.sum() <= inside.seconds.sum()
        assert (rounds.seconds >= oracle_seconds(trees, costs) - SUMS).all()
        assert torch.equal(rounds.seconds, replay(*drafted_alone(trees, policy.nodes), costs).seconds)
        assert rounds.rate >= max(replay(trees, FixedLength(k), costs).rate for k in range(DEPTH + 1))
        assert len(policy.nodes) < trees.tree.nodes and (policy.nodes or costs is costly)
    assert policy.shape.is_chain, "a second candidate costs more than it gains"
    never = dataclasses.replace(profile, step_s=1.0, tree_outside_s=(1e-4, 1e-5, 1.0))
    policy, rounds = best_static_tree(trees, never)
    assert not policy.nodes and rounds.rate == pytest.approx(replay(trees, FixedLength(0), never).rate)
