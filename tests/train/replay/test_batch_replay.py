"""Replay of a batch, bounds that no policy exceeds, and the best static tree."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES
from head_tensors import learned
from joint_policies import batch_policy
from specstop.decode import stream_key
from specstop.decode.loop import Request
from specstop.policies import Confidence, FixedLength, InputError, PolicyError, TraceError
from specstop.policies.batch_rules import for_batches
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.published.adaptive_verification import AdaptiveVerification
from specstop.policies.published.load import LoadLength
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.published.tetris import Tetris
from specstop.policies.registry import load_policy
from specstop.policies.rules import BatchRule, Derived
from specstop.train import TraceArrays, oracle_seconds, trace_arrays
from specstop.train.replay import bounds
from specstop.train.replay.batch import BatchRounds, arrive_at_once, poisson_arrivals, recorded_arrivals, replay_batch
from specstop.train.replay.bounds import StaticTree, oracle_plan, round_regret
from synthetic import synthetic_trace, with_batches

from specstop import Profile, Settings, Speculator, StopPolicy, parse_tree, replay

EXACT = SUMS = 1e-9
COLUMNS = ("anchor", "drafted", "verified", "accepted", "committed", "backlog", "decisions")


@pytest.fixture(scope="module")
def arrays(traces):
    return {t: trace_arrays(trace) for t, trace in traces.items()}


@pytest.fixture(scope="module")
def timed(profile):
    return with_batches(profile)


BY_SIZE = learned(rule=Derived([0.1, 0.2, 0.3, 0.2], 1, scales=[(1, 1.0), (2, 1.8), (4, 2.5)]))
NAMES = ("trimming", "reads-history", "selecting", "adaptive")
SINGLE = [BY_SIZE, *(TEST_POLICIES[name] for name in NAMES)]


def joint(timed: Profile) -> list[StopPolicy]:
    """Return joint policies of each kind that decide by the costs of this profile."""
    by_batch = [
        for_batches(batch_policy(names=("top1", "mean_accepted", feature), depth=DEPTH), send, timed)
        for send, feature in (("best", "noisy_margin"), ("all", "drawn_prob"))
    ]
    rules = (
        BatchRule("best", [(1, 1.1), (4, 0.9)], first=2),
        BatchRule("best", [(1, 1.0), (2, 1.0), (4, 0.9)], 1, [(2, 2), (4, 3)]),  # decides for one stream only
    )
    by_batch += [for_batches(by_batch[0], rule=rule, profile=timed) for rule in rules]
    fitted = AdaptiveVerification(DEPTH, profile=timed)
    fitted.EVERY = 3  # type: ignore[misc]
    published = [LoadLength("1:5,2:3,3:2,4:1"), SmartSpec(profile=timed, max_depth=DEPTH), Tetris(2, 2), fitted]
    return [*published, *by_batch]


def served(arrays: TraceArrays, policy: StopPolicy, profile: Profile, batch: int) -> BatchRounds:
    return replay_batch(arrays, policy, profile, batch, arrive_at_once(arrays.sequences))


@pytest.mark.parametrize(("batch", "temperature", "joins"), [(3, 0.7, False), (4, 0.0, False), (4, 0.7, True)])
def test_rounds_are_those_of_the_live_batch(pair, prompts, prompt_ids, arrays, timed, batch, temperature, joins):
    """With eight texts, streams are refilled while others are in the middle of a text."""
    trace, compared = arrays[temperature], 0
    ids = {prompt.id: tokens for prompt, tokens in zip(prompts, prompt_ids, strict=True)}
    requests = [Request(ids[name], stream_key(0, name)) for name in trace.prompt_ids]
    for policy in joint(timed) if joins else SINGLE:
        streams: dict[int, int] = {}
        settings = Settings(temperature, NEW, verification="match")
        speculator = Speculator(pair, policy, settings, timed, batch=batch)
        live = speculator.run(requests, on_end=lambda number, text, stream, into=streams: into.update({number: stream}))
        played = served(trace, policy, timed, batch)
        for number, text in enumerate(live):
            rows = played.sequence == number
            columns = torch.stack([getattr(played, name)[rows] for name in COLUMNS], 1).tolist()
            assert columns == [[getattr(r, name) for name in COLUMNS] for r in text.rounds], f"{policy.name}, {number}"
            assert played.tokens[number] == len(text.tokens)
            assert set(played.stream[rows].tolist()) <= {streams[number]}
            compared += len(columns)
        assert len(played.call.unique()) < len(played), "verified together"
    assert compared > 200


def test_streams_share_a_clock_and_the_cost_of_each_round(arrays, timed):
    """A decision about all streams of the batch is priced once."""
    trace, price = arrays[0.7], 2e-3
    profile = timed.with_decisions({"confidence": price})
    played = served(trace, Confidence(0.4, 3), profile, 4)
    prompts = profile.prefill_seconds(trace.prompt_tokens.numpy())
    clock, shares = 0.0, prompts.copy()
    for call in played.call.unique():
        context, drafted, verified, request, decisions = (
            getattr(played, name)[played.call == call].numpy()
            for name in ("context", "drafted", "verified", "sequence", "decisions")
        )
        fed = [(drafted > depth).sum() for depth in range(3)]
        verify_s = profile.verify_s(len(request), len(request) + verified.sum(), context.mean())
        seconds = float(verify_s + profile.draft_s(fed, context.mean()).sum() + price * decisions.max())
        shares[request] += seconds / len(request)
        clock += seconds
    assert played.seconds.tolist() == pytest.approx(shares.tolist(), rel=EXACT)
    assert float(played.ended.max()) == pytest.approx(clock + prompts.sum(), rel=EXACT)
    assert played.rate == pytest.approx(int(played.tokens.sum()) / float(played.ended.max()), rel=EXACT), "never idle"


def test_requests_wait_for_their_arrival_and_for_a_stream(arrays, timed):
    trace, policy = arrays[0.0], TEST_POLICIES["trimming"]
    count, now = trace.sequences, served(trace, policy, timed, 2)
    late = replay_batch(trace, policy, timed, 2, np.full(count, 100.0))
    assert torch.equal(late.log, now.log) and late.latency.tolist() == pytest.approx(now.latency.tolist())
    assert late.ended.tolist() == pytest.approx((now.ended + 100.0).tolist())
    apart, alone = replay_batch(trace, policy, timed, 2, 1e3 * np.arange(count)), replay(trace, policy, timed)
    assert torch.equal(apart.log, alone.log), "each request is alone in the batch"
    assert served(trace, policy, timed, 1).seconds.tolist() == pytest.approx(alone.seconds.tolist(), rel=EXACT)
    assert apart.latency.tolist() == pytest.approx(apart.seconds.tolist()), "no request waits"
    order = np.array([3, 1, 1])
    repeated = replay_batch(trace, policy, timed, 2, recorded_arrivals([7.0, 7.0, 8.0], 3), order)
    assert repeated.tokens.tolist() == trace.text_tokens[order].tolist() and repeated.text.tolist() == [3, 1, 1]
    assert recorded_arrivals([5.0, 5.0, 6.5, 9.0], 3).tolist() == [0.0, 0.0, 1.5], "the first request arrives at 0"
    times = poisson_arrivals(4000, 5.0, seed=1)
    assert (np.diff(times) > 0).all() and times[-1] / 4000 == pytest.approx(0.2, rel=0.1)  # six standard errors
    assert (
        np.array_equal(times, poisson_arrivals(4000, 5.0, seed=1))
        and times[0] != poisson_arrivals(4000, 5.0, seed=2)[0]
    )


def test_unsuitable_replays_are_refused(arrays, trees, timed, profile):
    trace, policy = arrays[0.0], FixedLength(2)
    drawn = dataclasses.replace(trees, header=dataclasses.replace(trees.header, verification="rejection"))
    for run, error, noun in (
        (lambda: replay(drawn, load_policy("c2t:3?max_depth=2"), profile), PolicyError, "c2t.*rejection"),
        (lambda: served(trace, policy, profile, 2), InputError, "no batches"),
        (lambda: replay_batch(trace, policy, timed, 2, arrive_at_once(3)), InputError, "expected 8 times"),
        (lambda: served(trace, FixedLength(DEPTH + 1), timed, 2), TraceError, "drafts up to"),
        (lambda: recorded_arrivals([2.0, 1.0], 1), InputError, "times"),
        (lambda: poisson_arrivals(3, 0.0), InputError, "rate above 0"),
    ):
        with pytest.raises(error, match=noun):
            run()


@pytest.mark.parametrize("batch", [1, 4])
def test_no_batch_is_faster_than_the_bound(arrays, timed, batch):
    trace, free = arrays[0.7], dataclasses.replace(timed, decision_s={})
    policies = [*SINGLE, *joint(timed)[:4], *(FixedLength(k) for k in range(DEPTH + 1))]
    fastest = min(float(served(trace, policy, free, batch).seconds.sum()) for policy in policies)
    assert 0.3 * fastest < float(bounds.batch_bound(trace, free, batch).sum()) <= fastest * (1 + EXACT)


def test_the_bound_of_streams_that_share_nothing_is_that_of_each_alone(arrays, profile):
    """A draft step takes 1 ms per stream, a verification 3 ms per stream and 1 ms per token."""
    trace = arrays[0.7]
    verify = {n: ((n, 4e-3 * n), (n * (DEPTH + 1), 3e-3 * n + 1e-3 * n * (DEPTH + 1))) for n in (1, 2, 4)}
    one = BatchTable(8.0, ((1, 1e-3), (4, 4e-3)), verify)
    batch = BatchCosts(one, dataclasses.replace(one, context=40.0))
    alone = CostTable(8.0, (1e-3, 1e-3), 0.0, tuple(4e-3 + 1e-3 * n for n in range(DEPTH + 1)))
    linear = Profile(alone, dataclasses.replace(alone, context=40.0), 0.0, 0.0, (1e-3, 1e-4), batch=batch)
    assert bounds.batch_bound(trace, linear, 4).tolist() == pytest.approx(
        bounds.batch_bound(trace, linear, 1).tolist(), rel=EXACT
    )


@pytest.fixture(scope="module")
def trees(forest):
    return trace_arrays(forest[0.7])


@pytest.mark.parametrize("is_chain", [True, False])
def test_no_policy_is_faster_than_the_oracle_and_losses_add_up(arrays, trees, profile, is_chain):
    trace = arrays[0.7] if is_chain else trees
    plan = oracle_plan(trace, profile)
    policies = [*TEST_POLICIES.values(), FixedLength(2), FixedLength(3)]
    if not is_chain:
        policies += [StaticTree(trace.tree, nodes) for _, nodes in bounds.best_subtrees(trace.tree, [0.5] * 24, 3)]
    for policy in policies:
        rounds = replay(trace, policy, profile)
        assert (rounds.seconds >= plan.seconds - SUMS).all(), policy.name
        regret = round_regret(trace, rounds, plan, profile)
        lost = rounds.by_sequence(regret.choice_s + regret.decision_s + regret.backlog_s)
        assert lost.tolist() == pytest.approx((rounds.seconds - plan.seconds).tolist(), abs=SUMS)
        assert (regret.choice_s >= -SUMS).all() and not (regret.early & regret.late).any()
    planned = bounds.planned_rounds(trace, plan)
    assert planned.tokens.tolist() == trace.text_tokens.tolist()
    if is_chain:  # in a tree, a path may be priced as a chain
        larger_is_cheaper = planned.by_sequence(round_regret(trace, planned, plan, profile).choice_s)
        assert planned.text_seconds(plan.profile).tolist() == pytest.approx((plan.seconds + larger_is_cheaper).tolist())


@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_is_the_best_of_all_choices_of_lengths(seed):
    """Compare with exhaustive search: at each anchor any k, at the price of k or of any deeper round.

    In one case the profile ends before the trace, and in one a noisy profile makes the first draft step with a backlog of
    two cheaper.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = 3
    costs = torch.rand(2, depth + 1, generator=generator, dtype=torch.float64) + 0.5
    drafts, longest = (((0.0, 0.0), 2), ((0.1, 0.2), depth), ((0.2, 0.1), depth))[seed]

    def priced(draft_s: tuple[float, float]) -> Profile:
        verify = [tuple(v[: longest + 1].tolist()) for v in costs]
        low, high = (CostTable(c, draft_s, 0.0, v, 0.1) for c, v in zip((8.0, 20.0), verify, strict=True))
        return Profile(low, high, 0.01, 0.05, (0.5, 0.01))

    cheapest = priced((min(drafts), min(drafts)))
    accepted = [
        [min(int(torch.randint(0, depth + 1, (), generator=generator)), n - t) for t in range(n)] for n in (1, 4, 6)
    ]

    @functools.cache
    def cost(context: int, k: int) -> float:
        one = np.ones(1, dtype=np.int64)
        rounds = [(one * context, one * paid, one * paid, one, one * 0) for paid in range(k, longest + 1)]
        return min(cheapest.round_seconds(*r, 0.0).item() for r in rounds)

    def best(lengths: list[int], t: int) -> float:
        if t >= len(lengths):
            return 0.0
        return min(cost(8 + t, k) + best(lengths, t + min(lengths[t], k) + 1) for k in range(longest + 1))

    expected = [best(lengths, 0) + 0.5 + 7 * 0.01 for lengths in accepted]
    bound = oracle_seconds(synthetic_trace(accepted, depth), priced(drafts))
    assert bound.tolist() == pytest.approx(expected, abs=SUMS)


@pytest.mark.parametrize("seed", range(3))
def test_sub_trees_are_the_best_of_all(seed):
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(9)]
    tree = parse_tree("parents:" + ",".join(map(str, parents)))
    chance = torch.rand(9, generator=generator, dtype=torch.float64).tolist()
    for node in range(9):
        chance[node] *= chance[tree.parent[node + 1] - 1] if tree.parent[node + 1] else 1.0
    for depth in range(1, tree.deepest + 1):
        every: dict[int, float] = {}
        for picked in itertools.product([False, True], repeat=9):
            nodes = [n for n, take in enumerate(picked) if take]
            if all(tree.depth[n + 1] <= depth and (True, *picked)[tree.parent[n + 1]] for n in nodes):
                every[len(nodes)] = max(every.get(len(nodes), 0.0), sum(chance[n] for n in nodes))
        subtrees = bounds.best_subtrees(tree, chance, depth)
        assert [value for value, _ in subtrees] == pytest.approx([every[n] for n in range(len(every))])
        for n, (value, nodes) in enumerate(subtrees):
            assert len(nodes) == n and sum(chance[node] for node in nodes) == pytest.approx(value)
            assert all(tree.parent[node + 1] == 0 or tree.parent[node + 1] - 1 in nodes for node in nodes)


def test_the_best_static_tree_is_drafted_alone(trees, profile):
    """It verifies the same tokens as inside the recorded tree, and pays for no other candidates."""
    costly = dataclasses.replace(profile, tree_outside_s=(1e-4, 1e-5, 5e-3), step_s=5e-3)
    for costs in (profile, costly):
        policy, rounds = bounds.best_static_tree(trees, costs)
        inside = replay(trees, policy, costs)
        assert torch.equal(rounds.tokens, inside.tokens) and torch.equal(rounds.verified, inside.verified)
        assert (inside.seconds >= rounds.seconds - SUMS).all()
        assert (rounds.seconds >= oracle_seconds(trees, costs) - SUMS).all()
        assert torch.equal(rounds.seconds, replay(*bounds.isolate_subtree(trees, policy.nodes), costs).seconds)
        assert rounds.rate >= max(replay(trees, FixedLength(k), costs).rate for k in range(DEPTH + 1))
        assert len(policy.nodes) < trees.tree.nodes and (policy.nodes or costs is costly)
    assert policy.shape.is_chain, "a second candidate costs more than it gains"
