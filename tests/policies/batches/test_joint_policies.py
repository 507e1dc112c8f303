"""Policies of batches, number by number: what is sent, what is drafted, what is learned, against slow references."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from joint_policies import LINEAR, STEPPED, batch_policy, synthetic_profile
from specstop.policies.batch_rules import Batches, BatchPolicy, BatchStop, CostGrid, for_batches, linear_costs
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.kernels.trees import best_budgets, draft_on
from specstop.policies.learned import build_rule
from specstop.policies.published.adaptive_verification import AdaptiveVerification
from specstop.policies.published.load import LoadLength
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.published.tetris import Tetris
from specstop.policies.registry import load_policy
from specstop.policies.rules import BatchRule
from specstop.policies.storage import save_policy
from specstop.policies.testing import TreePolicyTests


class TestBest(TreePolicyTests):
    def make(self) -> StopPolicy:
        return batch_policy("stepped", depth=5)


class TestAll(TreePolicyTests):
    def make(self) -> StopPolicy:
        return batch_policy("linear", "all", depth=5)


class TestLearnsSoon(TreePolicyTests):
    """Fits within the rounds of the tests."""

    def make(self) -> StopPolicy:
        policy = AdaptiveVerification(5)
        policy.interval = 2
        return policy


def step(depth: int, values: Sequence[float], batch: Sequence[int] | None = None) -> DraftStep:
    """Return the step of chains with one feature; a value below 0 = not alive."""
    x = np.array(values, dtype=np.float32)[:, None, None]
    alive = x[..., 0] >= 0 if depth else np.ones((len(x), 1), dtype=bool)
    of = np.zeros(len(x), dtype=np.int64) if batch is None else np.array(batch)
    return DraftStep(depth, alive, np.zeros(alive.shape, dtype=np.int64), x * alive[..., None], {}, of)


def chains(drawn: Sequence[int], depth: int, hidden: bool = False) -> DraftTree:
    """Return chains of which so many tokens were drawn."""
    at = np.tile(np.arange(1, depth + 1), (len(drawn), 1))
    marks = at <= np.array(drawn)[:, None]
    return DraftTree(np.where(marks & (not hidden), 7, -1), at - 2, at, marks)


def asked(policy: StopPolicy, rows: Sequence[Sequence[float]], batch: Sequence[int] | None = None) -> State:
    """Return the state after the values by stream and depth were shown."""
    keys = np.arange(len(rows), dtype=np.int64)
    state = policy.start(len(rows), keys)
    _, state = policy.keep(step(0, [0.0] * len(rows), batch), state)
    for depth, values in enumerate(zip(*rows, strict=True), 1):
        _, state = policy.keep(step(depth, values, batch), state)
    return state


def sent(policy: StopPolicy, tree: DraftTree, state: State) -> list[int]:
    mask = policy.select(tree, state)
    assert mask is not None
    return mask.sum(1).tolist()


def outcome(verified: Sequence[int], accepted: Sequence[int], cut: bool = False) -> RoundOutcome:
    k, a = np.array(verified), np.array(accepted)
    return RoundOutcome(np.ones(len(k), dtype=bool), k, k, a, np.full(len(k), cut), np.zeros(len(k)))


def test_tetris_sends_the_likeliest_paths_of_the_batch() -> None:
    logs = [[-0.1, -0.2, -0.9], [-1.0, -1.1, -1.2], [-0.3, -2.0, -2.1]]
    policy = Tetris(1, 2)
    state = asked(policy, [[0.0] * 3] * 3)  # any: levels are put there by hand
    state = (*state[:2], tuple(np.array(logs, dtype=np.float32).T[:, :, None]))
    assert sent(policy, chains([3, 3, 3], 3), state) == [2, 0, 1]
    assert sent(Tetris(2, 1), chains([3, 3, 3], 3), state) == [3, 2, 1]
    assert sent(Tetris(1, 2, capacity=1), chains([3, 3, 3], 3), state) == [1, 0, 0]
    assert sent(policy, chains([1, 3, 3], 3), state) == [1, 1, 1]


def test_a_length_by_batch_size() -> None:
    policy = LoadLength("1:5,2:3,4:0")
    kept = policy.keep(step(2, [1.0] * 8, [0, 1, 1, -1, 2, 2, 2, 2]), None)[0][:, 0]
    assert kept.tolist() == [True, True, True, True, False, False, False, False]
    assert policy.max_depth == 5
    for table in ("2:1", "1:2,1:3", "4", "1:-1", "", "1:2,x:3"):
        with pytest.raises(PolicyError, match="load: expected"):
            LoadLength(table)


def test_smartspec_takes_the_length_of_the_largest_goodput() -> None:
    policy = SmartSpec(0.8, 4.0, 0.5, draft=0.2, token=0.05, max_depth=6)
    keys = np.arange(3)
    state = policy.start(3, keys)
    state = policy.observe(outcome([3, 2, 0], [1, 2, 0]), state)
    _, state = policy.keep(step(0, [0.0] * 3), state)
    accepted, known = 2 * (0.5 * 3.2) + 3.2 + 3, 2 * (0.5 * 4.0) + 4.0 + 4
    rate = accepted / known
    goodput = [
        3 * sum(rate**i for i in range(k + 1)) / (k * 0.2 * (1 + 0.05 * 2) + 1 + 0.05 * (3 * (k + 1) - 1))
        for k in range(7)
    ]
    assert state[2].tolist() == [goodput.index(max(goodput))] * 3


def test_smartspec_drafts_nothing_where_nothing_is_accepted() -> None:
    policy = SmartSpec(0.8, draft=0.3)
    state = policy.start(2, np.arange(2))
    for _ in range(200):
        state = policy.observe(outcome([2, 2], [0, 0]), state)
    kept, _ = policy.keep(step(0, [0.0, 0.0]), state)
    assert not kept.any()


@pytest.mark.parametrize("kind", [SmartSpec, AdaptiveVerification])
def test_costs_are_taken_where_none_were_given(kind: type[SmartSpec | AdaptiveVerification]) -> None:
    profile, other = synthetic_profile(STEPPED), synthetic_profile(LINEAR)
    bare = kind()
    told = bare.with_costs(profile)
    assert told._grid.costs == kind(profile=profile)._grid.costs  # type: ignore[attr-defined]
    assert bare._grid.costs == linear_costs(), "another policy is made"
    for own in (kind(draft=0.2), kind(profile=other), told, Tetris()):
        assert own.with_costs(profile) is own


def confidences(rows: Sequence[Sequence[float]]) -> Array:
    """vLLM's confidences before anything was learned, written out again."""
    q = np.array(rows, dtype=np.float32).astype(np.float64)
    return 1 / (1 + np.exp(-(0.5 * np.log(q / (1 - q)) - 0.2)))


def test_adaptive_verification_spends_the_budget_of_the_round_before_on_the_best() -> None:
    before, now = [[0.9, 0.8], [0.4, 0.3]], [[0.2, 0.5], [0.95, 0.9]]
    policy = AdaptiveVerification(2, profile=synthetic_profile(STEPPED))
    state = policy.observe(outcome([2, 2], [1, 0]), asked(policy, before))
    # The last depth, too, was shown here; the loop asks no policy there.
    old = np.cumprod(confidences(before), 1)
    assert np.allclose(state.previous, confidences(before))
    ranked = sorted(old.flatten(), reverse=True)
    rates = [(2 + sum(ranked[:m])) / (0.05 * 2 + STEPPED[1 + m]) for m in range(5)]
    budget = rates.index(max(rates))
    assert 0 < budget < 4
    _, state = policy.keep(step(0, [0.0, 0.0]), state)
    for depth, values in enumerate(zip(*now, strict=True), 1):
        _, state = policy.keep(step(depth, values), state)
    new = np.cumprod(confidences(now), 1)
    best = {(s, d) for _, s, d in sorted((-new[s, d], s, d) for s in range(2) for d in range(2))[:budget]}
    mask = policy.select(chains([2, 2], 2), state)
    assert set(zip(*(at.tolist() for at in mask.nonzero()), strict=True)) == best
    # Level by level: the first depth takes its share before the second is known.
    first = policy.select(chains([1, 1], 2, hidden=True), state)
    assert first.sum() == min(budget, 2) and not first[:, 1].any()


def test_adaptive_verification_learns_as_newton_does() -> None:
    rng, policy = np.random.default_rng(3), AdaptiveVerification(3)
    policy.interval = 4
    state = policy.start(2, np.arange(2))
    rows, labels = [], []
    for _ in range(4):
        _, state = policy.keep(step(0, [0.0, 0.0]), state)
        q = rng.uniform(0.1, 0.9, (2, 3)).astype(np.float32)
        for depth in range(3):
            _, state = policy.keep(step(depth + 1, q[:, depth].tolist()), state)
        accepted = rng.integers(0, 4, 2)
        state = policy.observe(outcome([3, 3], accepted.tolist()), state)
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
        own = (rest[on].sum() - (weight * x[:, 0])[on].sum() * slope) / (weight[on].sum() + 1e-3)
        theta[1 + d] += own * counts[d] / (counts[d] + 50)
    theta[0] += slope
    assert np.allclose(state.weights, theta, rtol=1e-6)
    assert state.updates.tolist() == [1, 1] and state.rounds.tolist() == [0, 0] and not state.sums.any()
    behind = type(state)(**{**{f: getattr(state, f) for f in state.__slots__}, "updates": np.array([0, 1])})
    behind.weights[0] = 9.0
    _, shared = policy.keep(step(0, [0.0, 0.0]), behind)
    assert np.allclose(shared.weights, theta, rtol=1e-6)  # one that had paused takes over what the others have learned


def exhaustive(verify: Array, streams: int, values: Sequence[float], rate: float) -> float:
    """Return the best of sending some of the values, by trying every set of them."""
    return max(
        sum(some) - rate * verify[streams, streams + m]
        for m in range(len(values) + 1)
        for some in itertools.combinations(values, m)
    )


@pytest.mark.parametrize("verify_s", [LINEAR, STEPPED], ids=["linear", "stepped"])
def test_what_is_sent_is_the_best_of_all_sets(verify_s: tuple[float, ...]) -> None:
    rate = 4.0 if verify_s is LINEAR else 1.0
    grid, rng = CostGrid(synthetic_profile(verify_s)).fit(3, 2), np.random.default_rng(1)
    rates, batches = np.full(len(grid.verify), rate), Batches.of(np.zeros(3, dtype=np.int64), np.arange(3))
    taken = set()
    for _ in range(40):
        values = np.ascontiguousarray(np.cumprod(rng.uniform(0.2, 1.0, (3, 2)), 1))
        budget = np.zeros(1, dtype=np.int64)
        offered = np.ones((3, 2), dtype=bool)
        best_budgets(values, offered, batches.members, batches.starts, np.zeros(1), grid.verify, rates, budget)
        m = int(budget[0])
        got = sum(sorted(values.flatten(), reverse=True)[:m]) - rate * grid.verify[3, 3 + m]
        assert got == pytest.approx(exhaustive(grid.verify, 3, values.flatten().tolist(), rate), abs=1e-12)
        taken.add(m)
    assert len(taken) > 1


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("verify_s", [LINEAR, STEPPED], ids=["linear", "stepped"])
def test_what_is_drafted_on_is_the_best_of_all_plans(verify_s: tuple[float, ...], trims: bool) -> None:
    """Every set of streams and number of steps is tried; sets beyond the streams of the largest gains are no better."""
    grid, rng = CostGrid(synthetic_profile(verify_s, 0.3)).fit(3, 3), np.random.default_rng(2)
    rates, batches = np.full(len(grid.verify), 1.0), Batches.of(np.zeros(3, dtype=np.int64), np.arange(3))
    ahead, numbers, drafts = np.array([1.0, 0.7]), set(), grid.drafts * [[1.5], [1.0]]
    for turn in range(30):
        depth = turn % 3
        known = np.where(rng.random((3, 1)) < 0.2, -1.0, rng.uniform(0.1, 1.0, (3, 1)))
        gains = np.where(known < 0, 0.0, known) * rng.uniform(0.3, 1.0, (3, 1))
        alive, kept = known >= 0.0, np.zeros((3, 1), dtype=bool)
        draft_on(batches.members, batches.starts, alive, known, gains, trims, depth, drafts, grid.verify, rates,
                 ahead, kept)  # fmt: skip

        def worth(
            some: Sequence[int], steps: int, known: Array = known, gains: Array = gains, depth: int = depth
        ) -> float:
            values = [v for v in known[:, 0].tolist() if v >= 0]
            values += [float(gains[s, 0]) * ahead[t] for s in some for t in range(steps)]
            spent = sum(drafts[min(depth + step, 1), len(some)] for step in range(steps))
            if not trims:
                return sum(values) - grid.verify[3, 3 + len(values)] - spent
            return exhaustive(grid.verify, 3, values, 1.0) - spent

        rows = np.flatnonzero(alive[:, 0]).tolist()
        sets = [some for n in range(1, len(rows) + 1) for some in itertools.combinations(rows, n)]
        plans = {(some, steps): worth(some, steps) for some in sets for steps in (1, 2)}
        best, stop = max(plans.values(), default=-np.inf), worth((), 0)
        mine = tuple(np.flatnonzero(kept[:, 0]).tolist())
        if best <= stop + 1e-12:
            assert not mine
        else:
            assert max(plans.get((mine, t), -np.inf) for t in (1, 2)) == pytest.approx(best, abs=1e-12)
        numbers.add(len(mine))
    assert len(numbers) > 2


def test_plain_decoding_is_left_only_for_what_is_expected_to_beat_it() -> None:
    free = tuple(1.0 for _ in range(40))
    even = tuple(1.0 + n for n in range(40))  # a token costs as much as a stream: nothing is gained by sending more
    for verify_s, drafts in ((free, True), (even, False)):
        policy = batch_policy()
        policy = for_batches(policy, profile=synthetic_profile(verify_s, 0.02))
        kept, _ = policy.keep(
            DraftStep(0, np.ones((4, 1), dtype=bool), np.zeros((4, 1), dtype=np.int64),
                      np.zeros((4, 1, 2), dtype=np.float32), {}, np.zeros(4, dtype=np.int64)),
            policy.start(4, np.arange(4)),
        )  # fmt: skip
        assert kept.all() == drafts and kept.any() == drafts


def begun(policy: BatchStop, streams: int = 4) -> int:
    """Return how many of so many streams draft a first token, all of them as likely."""
    step = DraftStep(0, np.ones((streams, 1), dtype=bool), np.zeros((streams, 1), dtype=np.int64),
                     np.zeros((streams, 1, 2), dtype=np.float32), {}, np.zeros(streams, dtype=np.int64))  # fmt: skip
    return int(policy.keep(step, policy.start(streams, np.arange(streams)))[0].sum())


def test_a_decision_of_its_own_price_is_paid_with_every_draft_step() -> None:
    policy = batch_policy()
    assert policy.cost_name == "mine?rule=batch"
    for price, drafts in ((0.0, 4), (0.05, 4), (3.0, 0)):
        priced = synthetic_profile(tuple(1.0 for _ in range(40))).with_decisions({policy.cost_name: price, "mine": 9.0})
        made = for_batches(policy, profile=priced)
        assert begun(made) == drafts
        assert made._grid.fit(2, 3).drafts[1, :3].tolist() == pytest.approx([0.0, 0.02 + price, 0.02 + price])


def test_a_second_is_worth_the_rate_that_the_rule_says() -> None:
    policy, rates = batch_policy(), [(2, 1.5), (4, 2.0)]
    made = for_batches(policy, rule=BatchRule("best", rates))
    streams = np.arange(5)
    assert (made._rates(5) / policy._rates(5))[1:] == pytest.approx([1.5, 1.5, 1.75, 2.0])
    assert policy.fixed_rate(streams)[0] == 0.0
    assert for_batches(made).rule.to_dict() == {"kind": "batch", "send": "best", "rates": [[2, 1.5], [4, 2.0]]}
    assert build_rule(made.rule.to_dict()).to_dict() == made.rule.to_dict()
    short = BatchRule("best", rates, 1, [(2, 0), (8, 3)])
    assert build_rule(short.to_dict()).to_dict() == short.to_dict()
    settled = for_batches(policy, rule=short)
    unasked = settled.unasked
    assert for_batches(settled).unasked == unasked and not for_batches(settled, profile=settled.profile).unasked
    # Sizes that were settled are 2, 4 and 8: one stream counts as two, three as four, which decide.
    assert unasked == {1: 0, 2: 0, 5: 3, 6: 3, 7: 3, 8: 3}
    far = BatchRule("best", [], 1, [(1, 2), (9, 0)])  # a batch of four is no small one of nine: it decides
    assert for_batches(policy, rule=far).unasked == {1: 2, **dict.fromkeys(range(5, 10), 0)}
    for mangled in ([(8, 1), (2, 1)], [(0, 1)], [(10**9, 1)], [(2, -1)], [3], "none"):
        with pytest.raises(PolicyError, match="rule"):
            build_rule({"kind": "batch", "send": "best", "lengths": mangled})
        with pytest.raises(PolicyError, match="rule"):
            build_rule({"kind": "derived", "thresholds": [0.1], "first": 0, "lengths": mangled})
    for wrong in ([(4, 1.0), (2, 1.0)], [(0, 1.0)], [(1, 0.0)], [(1, float("nan"))], [3], "none"):
        with pytest.raises(PolicyError, match="rule"):
            build_rule({"kind": "batch", "send": "best", "rates": wrong})


@pytest.mark.parametrize("first", [1, 2])
def test_tokens_before_the_first_decision_survive_with_the_mean_acceptance(first: int) -> None:
    policy = for_batches(batch_policy(), rule=BatchRule("best", first=first))
    assert policy.first == first and policy.rule.to_dict() == {"kind": "batch", "send": "best", "first": first}
    streams, keys = 3, np.arange(3)
    features = np.full((streams, 1, 2), 0.5, dtype=np.float32)
    alive = np.array([[True], [True], [False]])
    step = DraftStep(
        first, alive, np.zeros((streams, 1), dtype=np.int64), features, {}, np.zeros(streams, dtype=np.int64)
    )
    _, state = policy.keep(step, policy.start(streams, keys))
    accept = policy.survive(step, None)[0][0][0, 0]
    mean = [0.6**n for n in range(1, first + 1)]
    assert state.known[0].tolist() == pytest.approx([*mean[:-1], (mean[-2] if first > 1 else 1.0) * accept])
    assert state.known[2].tolist() == pytest.approx(mean), "its text has ended: drafted, and not read"
    fresh = policy.start(streams, keys)
    drawn = np.ones((streams, first), dtype=bool)
    depth, parent = np.arange(1, first + 1), np.arange(first) - 1
    tree = DraftTree(np.ones((streams, first), dtype=np.int64), np.tile(parent, (3, 1)), np.tile(depth, (3, 1)), drawn)
    assert policy.select(tree, fresh) is None, "nobody was asked: all is sent"


def test_batch_and_single_streams_cost_what_the_profile_says() -> None:
    costs = synthetic_profile(STEPPED, 0.25)
    assert costs.verify_s(4, [4, 5, 6], 50.0).tolist() == pytest.approx([STEPPED[3], STEPPED[4], STEPPED[5]])
    assert costs.verify_s(1, 1, 50.0) == pytest.approx(STEPPED[0])
    assert costs.first_draft_s([0, 1], 50.0).tolist() == pytest.approx([0.0, 0.25])
    cold = synthetic_profile(STEPPED, 0.25)
    cold = dataclasses.replace(
        cold,
        **{
            side: dataclasses.replace(getattr(cold, side), draft_s=(0.45, 0.45), later_draft_s=0.25)
            for side in ("low", "high")
        },
    )
    assert CostGrid(cold).fit(2, 2).drafts[:, 1].tolist() == pytest.approx([0.45, 0.25])
    assert CostGrid(cold).fit(2, 2).drafting_s(np.array([1]), np.arange(4)).tolist() == pytest.approx(
        [0.0, 0.45, 0.7, 0.95]
    )
    dips = synthetic_profile((1.0, 1.5, 1.2, 1.4))
    assert dips.verify_s(1, [1, 2, 3, 4], 50.0).tolist() == pytest.approx([1.0, 1.2, 1.2, 1.4])
    assert dips.verify_s(1, [1, 2], 50.0).tolist() == pytest.approx([1.0, 1.2]), "whatever else is asked for beside it"
    assert dips.verify_s(2, [2, 3], 50.0).tolist() == pytest.approx([1.5, 1.2]), "batches are not filled up"
    level = synthetic_profile((1.0, 1.24, 1.2, 1.4))
    assert level.verify_s(1, 2, 50.0) == pytest.approx(1.24), "no size is clearly cheaper"
    grid = CostGrid(linear_costs(0.5, 0.1)).fit(20, 3)
    assert len(grid.verify) > 20 and grid.verify[2, 5] == pytest.approx(1.4)
    assert grid.verify[4, 1] == pytest.approx(1.3)  # the anchors are always sent


def test_a_folder_is_put_under_the_rule(tmp_path: Path) -> None:
    made = batch_policy("stepped")
    profile = tmp_path / "profile.json"
    synthetic_profile(LINEAR).save(profile)
    save_policy(made, tmp_path / "mine")
    again = load_policy(tmp_path / "mine")
    assert isinstance(again, BatchPolicy) and again.rule.to_dict() == {"kind": "batch", "send": "best"}
    for options, kind in (("rule=batch", BatchPolicy), ("rule=batch&send=all", BatchStop)):
        policy = load_policy(f"{tmp_path / 'mine'}?{options}&profile={profile}")
        assert type(policy) is kind and policy.joint and policy.label.endswith(str(profile))
    with pytest.raises(PolicyError, match="expected rule=batch after the folder"):
        load_policy(f"{tmp_path / 'mine'}?rule=survival")
    with pytest.raises(PolicyError, match="expected best or all for send"):
        load_policy(f"{tmp_path / 'mine'}?rule=batch&send=some")
    with pytest.raises(PolicyError, match=r"adaptive-verification: .*nowhere.json"):
        load_policy("adaptive-verification?profile=nowhere.json")
    bare = for_batches(made)
    bare.metadata = type(bare.metadata)(acceptance=(0.5,) * 3)
    with pytest.raises(PolicyError, match="rule batch needs a latency profile"):
        for_batches(bare)
