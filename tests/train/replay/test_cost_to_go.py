"""Cost-to-go: texts and their seconds as replay has them."""

from __future__ import annotations

import pytest
import torch
from specstop.collect.store import Trace
from specstop.policies.costs import CostTable
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.replay.bounds.cost_to_go import CostToGo
from specstop.train.replay.run import replay
from specstop.train.replay.arrays import trace_arrays
from synthetic import telling_trace

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
