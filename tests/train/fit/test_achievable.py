"""The achievable estimate: cost-to-go as replay has it, backward regression against brute force, batches near the bound."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from specstop.collect.store.folder import Trace
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.evaluate.batches import by_batch
from specstop.train.fit.achievable import NAME, achievable_estimate, achievable_in_batches, backward
from specstop.train.heads.crossfit import prompt_folds
from specstop.train.replay.bounds.cost_to_go import CostToGo
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import seen_features, trace_arrays
from synthetic import telling_trace, told

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
        float(backward(costs, seen, prompt_folds(arrays, 4, 0), torch.ones(len(seen)), value, price).decisions.mean())
        for price in (0.0, 1.0)
    ]
    assert asked[1] < asked[0]


def test_noise_is_worth_nothing() -> None:
    arrays = telling_trace()
    noise = torch.rand(arrays.ends.shape, generator=torch.Generator().manual_seed(1))
    arrays = told(arrays, noise, noise[:, 0])
    fixed = float(arrays.text_tokens.sum() / CostToGo(arrays, FLAT).fixed()[1].seconds.sum())
    assert achievable_estimate(arrays, FLAT, ("entropy", "depth")).rate < 1.03 * fixed


# Batches

SIZE = 4


def costs() -> Profile:
    """A draft step takes a quarter of a second, a verification 4 s and half a second for each token beyond one a stream."""
    alone = CostTable(1.0, (0.25, 0.25), 0.0, tuple(4.0 + 0.5 * n for n in range(5)))
    verify = {size: ((size, 4.0), (5 * size, 4.0 + 2.0 * size)) for size in (1, SIZE)}
    steps = ((1, 0.25), (SIZE, 0.25))
    one = BatchTable(1.0, steps, verify)
    later = dataclasses.replace(one, context=99.0)
    return Profile(alone, dataclasses.replace(alone, context=99.0), 0.0, 0.0, (0.0, 0.0), batch=BatchCosts(one, later))


def test_it_goes_no_deeper_than_the_profile() -> None:
    profile = costs()
    cut = {side: dataclasses.replace(getattr(profile, side), verify_s=(4.0, 4.5, 5.0)) for side in ("low", "high")}
    arrays, shallow = telling_trace(12), dataclasses.replace(profile, **cut)
    assert shallow.max_depth == 2 < arrays.depth
    known, policy = achievable_in_batches(arrays, shallow)
    assert policy.max_depth == 2
    assert by_batch(known, [], shallow, [SIZE], estimate=(known, policy))["lines"][1]["to_best_fixed"][0]["value"] > 0.9
    assert achievable_in_batches(arrays, shallow, price=1e-3)[1].max_depth == 2


@pytest.mark.parametrize("tells", [True, False])
def test_it_is_worth_what_the_features_tell(tells: bool) -> None:
    arrays, profile = telling_trace(12), costs()
    if not tells:
        noise = torch.rand(arrays.ends.shape, generator=torch.Generator().manual_seed(1))
        arrays = told(arrays, noise, noise[:, 0])
    estimate = achievable_in_batches(arrays, profile)
    found = by_batch(arrays, [], profile, [SIZE], estimate=estimate)
    best, known, bound = (line["to_best_fixed"][0]["value"] for line in found["lines"])
    assert [line["name"] for line in found["lines"]] == ["best fixed", NAME, "oracle bound of the batch"]
    assert best == 1.0 and known < bound and found["use"][0] != NAME
    assert known > 1.08 if tells else known < 1.03
