"""The achievable estimate: close to what the features tell, and nothing where they are noise."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.profile import Profile
from specstop.train.evaluate.batches import by_batch
from specstop.train.fit.achievable import NAME, achievable_estimate, achievable_in_batches
from specstop.train.fit.rules import best_of, fixed_grid
from synthetic import telling_trace, told

EXACT = 1e-12
TABLE = CostTable(1.0, (1.0, 1.0), 0.0, (4.0, 4.0, 4.0, 4.0, 4.0))
FLAT = Profile(TABLE, TABLE, 0.0, 0.0, (0.0, 0.0), {})
"""A draft step takes 1 s, a verification 4 s, nothing else any time."""


def test_features_that_tell_the_accepted_length_are_worth_much() -> None:
    arrays = telling_trace()
    fixed = best_of(fixed_grid(arrays, FLAT)).rate
    assert achievable_estimate(arrays, FLAT, ("entropy", "anchor_entropy", "depth")).rate > 1.15 * fixed


def test_noise_is_worth_nothing() -> None:
    arrays = telling_trace()
    noise = torch.rand(arrays.ends.shape, generator=torch.Generator().manual_seed(1))
    arrays = told(arrays, noise, noise[:, 0])
    fixed = best_of(fixed_grid(arrays, FLAT)).rate
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
