"""Policies of batches: what they send, draft and learn, against brute force and closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from joint_policies import LINEAR, STEPPED, batch_policy, synthetic_profile
from specstop.policies.batch_rules import Batches, CostGrid, for_batches
from specstop.policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.kernels.trees import best_budgets, draft_on
from specstop.policies.published.adaptive_verification import AdaptiveVerification
from specstop.policies.published.load import LoadLength
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.published.tetris import Tetris
from specstop.policies.rules import BatchRule
from steps import draft_step, round_outcome


def step(depth: int, values: Sequence[float], batch: Sequence[int] | None = None) -> DraftStep:
    """Return the step of chains with one feature; by default all streams are in one batch."""
    return draft_step(depth, np.reshape(values, (-1, 1, 1)), batch=[0] * len(values) if batch is None else batch)


def chains(drawn: Sequence[int], depth: int, hidden: bool = False) -> DraftTree:
    """Return chains of a depth, given the number of drawn tokens of each."""
    at = np.tile(np.arange(1, depth + 1), (len(drawn), 1))
    marks = at <= np.array(drawn)[:, None]
    return DraftTree(np.where(marks & (not hidden), 7, -1), at - 2, at, marks)


def play(policy: StopPolicy, rows: Sequence[Sequence[float]], state: State = None) -> State:
    """Return the state after a round with these values by stream and depth."""
    state = policy.start(len(rows), np.arange(len(rows))) if state is None else state
    for depth, values in enumerate(zip(*[[0.0, *row] for row in rows], strict=True)):
        _, state = policy.keep(step(depth, values), state)
    return state


@pytest.mark.parametrize(
    ("policy", "drawn", "expected"),
    [
        (Tetris(1, 2), [3, 3, 3], [2, 0, 1]), (Tetris(2, 1), [3, 3, 3], [3, 2, 1]),
        (Tetris(1, 2, capacity=1), [3, 3, 3], [1, 0, 0]), (Tetris(1, 2), [1, 3, 3], [1, 1, 1]),
    ],
)  # fmt: skip
def test_tetris_sends_the_likeliest_paths_of_the_batch(policy, drawn, expected):
    state = play(policy, [[-0.1, -0.2, -0.9], [-1.0, -1.1, -1.2], [-0.3, -2.0, -2.1]])
    mask = policy.select(chains(drawn, 3), state)
    assert mask is not None and mask.sum(1).tolist() == expected


def test_a_length_by_batch_size():
    policy = LoadLength("1:5,2:3,4:0")
    kept = policy.keep(step(2, [1.0] * 8, [0, 1, 1, -1, 2, 2, 2, 2]), None)[0][:, 0]
    assert kept.tolist() == [True, True, True, True, False, False, False, False] and policy.max_depth == 5
    for table in ("2:1", "1:2,1:3", "1:-1", "1:2,x:3"):
        with pytest.raises(PolicyError, match="load: expected"):
            LoadLength(table)


def test_smartspec_takes_the_length_of_the_largest_goodput():
    policy = SmartSpec(0.8, 4.0, 0.5, draft=0.2, token=0.05, max_depth=6)
    keys = np.arange(3)
    state = policy.start(3, keys)
    state = policy.observe(round_outcome([1, 2, 0], [3, 2, 0]), state)
    _, state = policy.keep(step(0, [0.0] * 3), state)
    accepted, known = 2 * (0.5 * 3.2) + 3.2 + 3, 2 * (0.5 * 4.0) + 4.0 + 4
    rate = accepted / known
    goodput = [
        3 * sum(rate**i for i in range(k + 1)) / (k * 0.2 * (1 + 0.05 * 2) + 1 + 0.05 * (3 * (k + 1) - 1))
        for k in range(7)
    ]
    assert state[2].tolist() == [goodput.index(max(goodput))] * 3


def confidences(rows: Sequence[Sequence[float]]) -> Array:
    """Return vLLM's confidences before the first fit."""
    q = np.array(rows, dtype=np.float32).astype(np.float64)
    return 1 / (1 + np.exp(-(0.5 * np.log(q / (1 - q)) - 0.2)))


def test_adaptive_verification_sends_the_best_within_the_budget_of_the_previous_round():
    before, now = [[0.9, 0.8], [0.4, 0.3]], [[0.2, 0.5], [0.95, 0.9]]
    policy = AdaptiveVerification(2, profile=synthetic_profile(STEPPED))
    state = policy.observe(round_outcome([1, 0], [2, 2]), play(policy, before))
    assert np.allclose(state.previous, confidences(before))
    ranked = sorted(np.cumprod(confidences(before), 1).flatten(), reverse=True)
    rates = [(2 + sum(ranked[:m])) / (0.05 * 2 + STEPPED[1 + m]) for m in range(5)]
    budget = rates.index(max(rates))
    assert 0 < budget < 4
    state = play(policy, now, state)
    values = np.cumprod(confidences(now), 1)
    best = {(s, d) for _, s, d in sorted((-values[s, d], s, d) for s in range(2) for d in range(2))[:budget]}
    mask = policy.select(chains([2, 2], 2), state)
    assert set(zip(*(at.tolist() for at in mask.nonzero()), strict=True)) == best
    # By level: the first depth takes its share before the second is known.
    first = policy.select(chains([1, 1], 2, hidden=True), state)
    assert first.sum() == min(budget, 2) and not first[:, 1].any()


def test_adaptive_verification_takes_newton_steps():
    rng, policy = np.random.default_rng(3), AdaptiveVerification(3)
    policy.interval = 4
    state = policy.start(2, np.arange(2))
    rows, labels = [], []
    for _ in range(4):
        q = rng.uniform(0.1, 0.9, (2, 3)).astype(np.float32)
        state = play(policy, q.tolist(), state)
        accepted = rng.integers(0, 4, 2)
        state = policy.observe(round_outcome(accepted.tolist(), [3, 3]), state)
        for s, d in itertools.product(range(2), range(3)):
            if d <= accepted[s]:
                z = float(q[s, d])
                rows.append([np.log(z / (1 - z)), *np.eye(3)[d]])
                labels.append(float(d < accepted[s]))
    x, y, theta = np.array(rows), np.array(labels), np.array([0.5, -0.2, -0.2, -0.2])
    p = 1 / (1 + np.exp(-x @ theta))
    moved = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + 1e-3 * np.eye(4), x.T @ (y - p))
    slope = moved[0] * len(y) / (len(y) + 50)
    counts = x[:, 1:].sum(0)
    weight, rest = p * (1 - p), y - p
    for d in range(3):
        on = x[:, 1 + d] > 0
        change = (rest[on].sum() - (weight * x[:, 0])[on].sum() * slope) / (weight[on].sum() + 1e-3)
        theta[1 + d] += change * counts[d] / (counts[d] + 50)
    theta[0] += slope
    assert np.allclose(state.weights, theta, rtol=1e-6)
    assert state.updates.tolist() == [1, 1] and state.rounds.tolist() == [0, 0] and not state.sums.any()
    behind = type(state)(**{**{f: getattr(state, f) for f in state.__slots__}, "updates": np.array([0, 1])})
    behind.weights[0] = 9.0
    _, shared = policy.keep(step(0, [0.0, 0.0]), behind)
    assert np.allclose(shared.weights, theta, rtol=1e-6), "a stream that was idle has the weights of the batch"


def exhaustive(verify: Array, streams: int, values: Sequence[float], rate: float) -> float:
    """Return the best gain of sending a subset of the values."""
    return max(
        sum(subset) - rate * verify[streams, streams + m]
        for m in range(len(values) + 1)
        for subset in itertools.combinations(values, m)
    )


@pytest.mark.parametrize("verify_s", [LINEAR, STEPPED], ids=["linear", "stepped"])
def test_the_sent_tokens_are_the_best_of_all_sets(verify_s):
    rate = 4.0 if verify_s is LINEAR else 1.0
    grid, rng = CostGrid(synthetic_profile(verify_s)).extend_to(3, 2), np.random.default_rng(1)
    rates, batches = np.full(len(grid.verify), rate), Batches.of(np.zeros(3, dtype=np.int64), np.arange(3))
    sizes = set()
    for _ in range(40):
        values = np.ascontiguousarray(np.cumprod(rng.uniform(0.2, 1.0, (3, 2)), 1))
        budget = np.zeros(1, dtype=np.int64)
        offered = np.ones((3, 2), dtype=bool)
        best_budgets(values, offered, batches.members, batches.starts, np.zeros(1), grid.verify, rates, budget)
        m = int(budget[0])
        gain = sum(sorted(values.flatten(), reverse=True)[:m]) - rate * grid.verify[3, 3 + m]
        assert gain == pytest.approx(exhaustive(grid.verify, 3, values.flatten().tolist(), rate), abs=1e-12)
        sizes.add(m)
    assert len(sizes) > 1


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("verify_s", [LINEAR, STEPPED], ids=["linear", "stepped"])
def test_the_drafted_tokens_are_the_best_of_all_plans(verify_s, trims):
    """A plan is a set of streams and a number of steps."""
    grid, rng = CostGrid(synthetic_profile(verify_s, 0.3)).extend_to(3, 3), np.random.default_rng(2)
    rates, batches = np.full(len(grid.verify), 1.0), Batches.of(np.zeros(3, dtype=np.int64), np.arange(3))
    ahead, numbers, drafts = np.array([1.0, 0.7]), set(), grid.drafts * [[1.5], [1.0]]
    for turn in range(30):
        depth = turn % 3
        survival = np.where(rng.random((3, 1)) < 0.2, -1.0, rng.uniform(0.1, 1.0, (3, 1)))
        gains = np.where(survival < 0, 0.0, survival) * rng.uniform(0.3, 1.0, (3, 1))
        alive, kept = survival >= 0.0, np.zeros((3, 1), dtype=bool)
        draft_on(batches.members, batches.starts, alive, survival, gains, trims, depth, drafts, grid.verify, rates,
                 ahead, kept)  # fmt: skip

        def worth(
            subset: Sequence[int], steps: int, survival: Array = survival, gains: Array = gains, depth: int = depth
        ) -> float:
            values = [v for v in survival[:, 0].tolist() if v >= 0]
            values += [float(gains[s, 0]) * ahead[t] for s in subset for t in range(steps)]
            spent = sum(drafts[min(depth + step, 1), len(subset)] for step in range(steps))
            if not trims:
                return sum(values) - grid.verify[3, 3 + len(values)] - spent
            return exhaustive(grid.verify, 3, values, 1.0) - spent

        rows = np.flatnonzero(alive[:, 0]).tolist()
        sets = [subset for n in range(1, len(rows) + 1) for subset in itertools.combinations(rows, n)]
        plans = {(subset, steps): worth(subset, steps) for subset in sets for steps in (1, 2)}
        best, stop = max(plans.values(), default=-np.inf), worth((), 0)
        chosen = tuple(np.flatnonzero(kept[:, 0]).tolist())
        if best <= stop + 1e-12:
            assert not chosen
        else:
            assert max(plans.get((chosen, t), -np.inf) for t in (1, 2)) == pytest.approx(best, abs=1e-12)
        numbers.add(len(chosen))
    assert len(numbers) > 2


@pytest.mark.parametrize(
    ("token_s", "decision_s", "drafts"),
    [(0.0, 0.0, 4), (1.0, 0.0, 0), (0.0, 0.05, 4), (0.0, 3.0, 0)],  # 1.0: a token costs as much as a stream
)
def test_drafting_begins_only_where_it_pays_for_verification_and_decisions(token_s, decision_s, drafts):
    policy, verify_s = batch_policy(), [1.0 + token_s * n for n in range(40)]
    assert policy.cost_name == "mine?rule=batch"
    profile = synthetic_profile(verify_s).with_decisions({policy.cost_name: decision_s, "mine": 9.0})
    root, priced = draft_step(0, np.zeros((4, 1, 2)), batch=[0] * 4), for_batches(policy, profile=profile)
    assert priced.keep(root, priced.start(4, np.arange(4)))[0].sum() == drafts


@pytest.mark.parametrize("first", [1, 2])
def test_tokens_before_the_first_decision_survive_with_the_mean_acceptance(first):
    policy = for_batches(batch_policy(), rule=BatchRule("best", first=first))
    root = draft_step(first, np.full((3, 1, 2), 0.5), [[True], [True], [False]], batch=[0] * 3)
    _, state = policy.keep(root, policy.start(3, np.arange(3)))
    accept = policy.survive(root, None)[0][0][0, 0]
    mean = [0.6**n for n in range(1, first + 1)]
    assert state.survivals[0].tolist() == pytest.approx([*mean[:-1], (mean[-2] if first > 1 else 1.0) * accept])
    assert state.survivals[2].tolist() == pytest.approx(mean), "drafted, but its text has ended: not read"
    assert policy.select(chains([first] * 3, first), policy.start(3, np.arange(3))) is None, "no decision: all is sent"
