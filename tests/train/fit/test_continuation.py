"""Continuation values: cost-to-go as replay has it, backward regression against brute force, policies that are saved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from specstop.collect.store import Trace
from specstop.policies.contract import DraftStep
from specstop.policies.costs import CostTable
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.fixed import FixedLength
from specstop.policies.heads.layers import LinearHead
from specstop.policies.learned import Calibrator, ContinuationPolicy, build_rule, head_names, remembered
from specstop.policies.profile import Profile
from specstop.policies.rules import Continuation
from specstop.policies.storage import load_policy_folder
from specstop.train.fit.achievable import FOLDS, achievable_estimate, backward
from specstop.train.fit.continuation.fit import fit_continuation, rounds_of, values, with_memory
from specstop.train.fit.policy_iteration import Iteration, distance
from specstop.train.fit.run import train
from specstop.train.heads.continuation import VALUE_FITTERS, ValueRows
from specstop.train.heads.crossfit import prompt_folds
from specstop.train.replay.bounds.cost_to_go import CostToGo
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import seen_features, trace_arrays
from synthetic import telling_trace, told
from told_head import ToldHead

EXACT = 1e-12
TABLE = CostTable(1.0, (1.0, 1.0), 0.0, (4.0, 4.0, 4.0, 4.0, 4.0))
FLAT = Profile(TABLE, TABLE, 0.0, 0.0, (0.0, 0.0), {})
"""A draft step takes 1 s, a verification 4 s, nothing else any time."""


@pytest.mark.parametrize("length", [0, 1, 3])
def test_texts_take_the_seconds_that_replay_says(sides: tuple[Trace, Trace], profile: Profile, length: int) -> None:
    arrays = trace_arrays(sides[0])
    costs = CostToGo(arrays, profile)
    played = costs.play(torch.full_like(costs.bound, length))
    replayed = replay(arrays, FixedLength(length), profile)
    assert float((played.seconds - replayed.seconds).abs().max()) < EXACT
    row = arrays.offset[replayed.log[:, 0]] + replayed.log[:, 1] - arrays.first_anchor[replayed.log[:, 0]]
    assert torch.equal(played.visits.nonzero()[:, 0], row.sort().values)


def test_seconds_to_go_add_up_to_those_of_the_text() -> None:
    arrays = telling_trace()
    costs = CostToGo(arrays, FLAT)
    lengths = torch.randint(0, 5, costs.bound.shape, generator=torch.Generator().manual_seed(0))
    value = costs.value(lengths)
    assert torch.allclose(value[arrays.offset], costs.play(lengths).seconds)
    assert float(value[-1]) == 0.0
    every = costs.outcomes(value)
    chosen = every.gather(1, torch.minimum(lengths, costs.bound)[:, None])[:, 0]
    assert torch.allclose(chosen, value[:-1])


def test_backward_regression_stops_where_brute_force_does() -> None:
    arrays = telling_trace()
    costs = CostToGo(arrays, FLAT)
    value = costs.value(torch.full_like(costs.bound, 2))
    seen = seen_features(
        arrays,
        ("entropy", "anchor_entropy"),
        torch.arange(len(costs.bound)),
        torch.zeros(len(costs.bound), 4),
    )
    stages = backward(costs, seen, prompt_folds(arrays, 4, 0), torch.ones(len(costs.bound)), value, 0.0, firsts=(0,))
    outcome = costs.outcomes(value)
    taken = outcome.gather(1, stages.lengths[:, None])[:, 0]
    use = ~arrays.cut
    for right in range(5):
        group = use & (arrays.accepted == right)
        best = float(outcome[group].mean(0).min())  # the best length for all that are told as much
        assert float(taken[group].mean()) < best + 0.15, right
    assert stages.rate > 1.15 * float(arrays.text_tokens.sum() / costs.fixed()[1].seconds.sum())


def test_decisions_that_cost_more_are_taken_less_often() -> None:
    arrays = telling_trace()
    costs = CostToGo(arrays, FLAT)
    seen = seen_features(arrays, ("entropy",), torch.arange(len(costs.bound)), torch.zeros(len(costs.bound), 4))
    value = costs.value(torch.full_like(costs.bound, 2))
    asked = [
        float(backward(costs, seen, prompt_folds(arrays, 4, 0), torch.ones(len(seen)), value, price).asked.mean())
        for price in (0.0, 1.0)
    ]
    assert asked[1] < asked[0]


def test_noise_is_worth_nothing() -> None:
    arrays = telling_trace()
    noise = torch.rand(arrays.ends.shape, generator=torch.Generator().manual_seed(1))
    arrays = told(arrays, noise, noise[:, 0])
    fixed = float(arrays.text_tokens.sum() / CostToGo(arrays, FLAT).fixed()[1].seconds.sum())
    assert achievable_estimate(arrays, FLAT, ("entropy", "depth")).rate < 1.03 * fixed


@pytest.mark.parametrize("kind", list(VALUE_FITTERS))
def test_every_kind_of_head_learns_a_value(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6000, 2, generator=generator)
    depth = torch.randint(1, 4, (6000,), generator=generator)
    rows = ValueRows(x, depth, 2.0 * x[:, 0] - 1.0 + 0.1 * torch.randn(6000, generator=generator), torch.ones(6000))
    names = ("entropy", "noisy_score")
    head = VALUE_FITTERS[kind](rows.part(depth < 3), rows.part(depth == 3), names, 0)
    seen = x[:200].numpy()
    found = head.scores(seen, 2)
    assert not found[:, 0].any()
    assert float(np.abs(found[:, 1] - (2.0 * seen[:, 0] - 1.0)).mean()) < 0.12
    assert np.array_equal(np.concatenate([head.scores(seen[i : i + 1], 2) for i in range(20)]), found[:20])
    train = x[depth < 3].numpy()
    assert head.tensors()["low"].tolist() == train.min(0).tolist()
    assert head.tensors()["high"].tolist() == train.max(0).tolist()


@pytest.mark.parametrize("kind", list(VALUE_FITTERS))
def test_a_policy_that_is_told_beats_every_fixed_length_and_replays_as_it_was_planned(kind: str) -> None:
    arrays = telling_trace()
    fit, held = arrays.subset(range(16)), arrays.subset(range(16, 24))
    settled = fit_continuation(fit, FLAT, ("entropy", "anchor_entropy", "depth"), kind, name="told", rounds=2)
    best = float(held.text_tokens.sum() / CostToGo(held, FLAT).fixed()[1].seconds.sum())
    assert settled.rates[settled.best] == max(settled.rates)
    assert replay(held, settled.made, FLAT).rate > 1.1 * best
    # The round is chosen on a fold of the training prompts that no head was fitted on.
    chosen_on = fit.subset(prompt_folds(fit, FOLDS, 0).sequences(0))
    assert settled.rates == [pytest.approx(replay(chosen_on, one, FLAT).rate) for one in settled.policies]


def test_rounds_of_a_policy_are_those_of_its_replay() -> None:
    arrays = telling_trace()
    settled = fit_continuation(arrays, FLAT, ("entropy", "anchor_entropy", "depth"), "xgboost", name="told", rounds=1)
    policy, costs = settled.made, CostToGo(arrays, FLAT)
    seen = seen_features(arrays, policy.features, torch.arange(len(costs.bound)), torch.zeros(len(costs.bound), 4))
    seen = with_memory(seen, remembered(policy.features), policy.first)
    lengths, _ = rounds_of(
        costs, values(policy.head, seen), policy.first, policy.max_depth, policy.rule.to_dict()["margin"]
    )
    assert torch.allclose(costs.play(lengths).seconds, replay(arrays, policy, FLAT).seconds)


def test_training_saves_a_policy_that_loads_as_it_was(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    made = train(sides[0], full_profile, rule="continuation", head="xgboost", out=tmp_path / "p", passes=2)
    loaded = load_policy_folder(tmp_path / "p")
    assert loaded.rule.to_dict() == made.policy.rule.to_dict()
    assert loaded.features[-1] == "path_logprob"
    arrays = trace_arrays(sides[1])
    assert replay(arrays, loaded, full_profile).log.equal(replay(arrays, made.policy, full_profile).log)
    assert made.metrics["policy_iterations"] in (1, 2)


@pytest.mark.parametrize("remembers", [False, True])
def test_what_is_remembered_is_that_of_the_parent_for_one_stream_as_for_many(remembers: bool) -> None:
    """By hand: the value is the sum of what is seen at this depth and, where the rule remembers, at the parent's."""
    names, rule, draws = (
        ("mean_full", "entropy", "noisy_score"),
        Continuation(0.9, 1, remembers),
        np.random.default_rng(0),
    )
    columns = head_names(names, rule)
    width = len(columns) + 1  # `mean_full` is a share, and has log-odds
    weight = np.zeros((3, width), dtype=np.float32)
    weight[1, : len(columns)] = 1.0
    fitted = {"mean": np.zeros(width), "scale": np.ones(width), "weight": weight, "bias": np.zeros(3)}
    head = LinearHead(columns, {name: values.astype(np.float32) for name, values in fitted.items()})
    policy = ContinuationPolicy("c", names, head, Calibrator(), Calibrator(), rule, 4)
    streams, branches = 40, 3
    seen = draws.random((3, streams, branches, 3), dtype=np.float32) - 0.3
    parents, alive = draws.integers(0, branches, (3, streams, branches)), draws.random((3, streams, branches)) < 0.8
    for part in (slice(None), *(slice(s, s + 1) for s in range(streams))):
        state = None
        for depth in (1, 2, 3):
            step = DraftStep(depth, alive[depth - 1, part], parents[depth - 1, part], seen[depth - 1, part], {},
                             np.arange(len(seen[0, part])))  # fmt: skip
            kept, state = policy.keep(step, state)
            value = seen[depth - 1].sum(-1, dtype=np.float64)
            if remembers and depth > 1:
                before = seen[depth - 2][np.arange(streams)[:, None], parents[depth - 1]]
                value += before[..., 1:].sum(-1, dtype=np.float64)
            assert np.array_equal(kept, (alive[depth - 1] & (value > 0.9))[part])


def test_a_head_without_a_value_is_refused(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    with pytest.raises(InputError, match="rule continuation has heads logistic, mlp, xgboost, not tokens"):
        train(sides[0], full_profile, rule="continuation", head="tokens", features=("drawn_token",))
    with pytest.raises(InputError, match="mixed: the rule continuation is fitted on the rounds of `traces`"):
        train(sides[0], full_profile, rule="continuation", head="xgboost", mixed=sides[1])
    with pytest.raises(InputError, match="params: the rule continuation"):
        train(sides[0], full_profile, rule="continuation", params={"C": 3.0})
    for rule in ("continuation", "gain"):
        with pytest.raises(InputError, match=f"cross_fit=False: the rule {rule}"):
            train(sides[0], full_profile, rule=rule, cross_fit=False)


def test_the_rule_compares_the_value_with_its_margin_and_refuses_nonsense() -> None:
    for margin, value in itertools.product((-0.3, 0.0, 0.2), (-0.31, -0.29, -0.01, 0.01, 0.19, 0.21)):
        parts = ("top1", "top2"), ToldHead(), Calibrator(), Calibrator(), Continuation(margin), 4
        policy = ContinuationPolicy("told", *parts)
        step = DraftStep(1, np.ones((1, 1), dtype=bool), np.zeros((1, 1), dtype=np.int64),
                         np.array([[[0.5, value]]], dtype=np.float32), {}, np.zeros(1, dtype=np.int64))  # fmt: skip
        assert policy.keep(step, policy.start(1, np.zeros(1, dtype=np.int64)))[0].item() is (value > margin)
    assert build_rule(Continuation(0.1, 2).to_dict()).to_dict() == {
        "kind": "continuation",
        "margin": 0.1,
        "first": 2,
        "remembers": False,
    }
    for raw in ({"margin": float("nan"), "first": 0}, {"margin": 0.0, "first": -1}, {"margin": 0.0, "first": True}):
        with pytest.raises(PolicyError, match="rule continuation"):
            build_rule({"kind": "continuation", "remembers": False, **raw})


def test_policy_iteration_ends_where_visits_settle_and_keeps_the_best_round() -> None:
    still = torch.tensor([1.0, 2.0, 0.0])
    other, over = torch.tensor([0.0, 2.0, 1.0]), []
    rounds: Any = Iteration()
    for number, (rate, before, after) in enumerate(((3.0, still, other), (5.0, other, still), (4.0, still, still))):
        rounds.add(f"round {number}", rate, before, after)
        over.append(rounds.is_over)
    assert over == [False, False, True]
    assert (rounds.made, rounds.best, rounds.rates) == ("round 1", 1, [3.0, 5.0, 4.0])
    assert rounds.moved == pytest.approx((1 / 3, 1 / 3, 0.0))
    assert distance(still, 3 * still) == 0.0
    assert distance(torch.tensor([1, 0]), torch.tensor([0, 2])) == 1.0
