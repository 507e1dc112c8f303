"""The oracle bound: no policy is faster, and exhaustive search over all lengths is not either."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from contract_policies import TEST_POLICIES
from specstop.collect.store import Trace
from specstop.policies.costs import CostTable
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.replay.bounds import oracle_seconds
from specstop.train.replay.run import replay
from specstop.train.replay.arrays import trace_arrays
from synthetic import synthetic_trace


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_replayed_policy_is_faster(traces: dict[float, Trace], profile: Profile, temperature: float) -> None:
    arrays = trace_arrays(traces[temperature])
    bound = oracle_seconds(arrays, profile)
    for policy in [*TEST_POLICIES.values(), FixedLength(2), FixedLength(3)]:
        assert (replay(arrays, policy, profile).seconds >= bound - 1e-9).all(), policy.name


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_best_of_all_choices_of_lengths(seed: int) -> None:
    """Exhaustive search: at each anchor any k, paying for that or any deeper round."""
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
    assert oracle_seconds(synthetic_trace(accepted, depth), profile).tolist() == pytest.approx(expected, abs=1e-9)


def test_a_perfect_draft_makes_the_bound_that_of_the_best_fixed_length() -> None:
    """With every token accepted at no verification cost by length, one round of 3 + 1 tokens serves 4."""
    table = CostTable(8.0, (0.0, 0.0), 0.0, (1.0, 1.0, 1.0, 1.0))
    profile = Profile(table, table, 0.0, 0.0, (0.0, 0.0))
    assert oracle_seconds(synthetic_trace([[3] * 8], 3), profile).tolist() == pytest.approx([2.0])


def test_no_policy_is_faster_where_a_step_reads_two_tokens_cheaper_than_one() -> None:
    """A noisy profile may order them so; full acceptance then leaves a backlog of two each round."""
    table = CostTable(8.0, (0.11, 0.10), 0.0, (1.0, 1.0, 1.0, 1.0))
    profile = Profile(table, table, 0.0, 0.0, (0.0, 0.0))
    arrays = synthetic_trace([[3] * 12], 3)
    assert replay(arrays, FixedLength(3), profile).seconds >= oracle_seconds(arrays, profile) - 1e-9


def test_the_bound_of_a_text_does_not_depend_on_the_others(traces: dict[float, Trace], profile: Profile) -> None:
    arrays = trace_arrays(traces[0.7], [])
    whole = oracle_seconds(arrays, profile)
    assert torch.allclose(oracle_seconds(arrays.subset([4, 1]), profile), whole[[4, 1]], rtol=1e-12)


def test_nobody_drafts_deeper_than_was_timed() -> None:
    """A trace of depth 3 under a profile that ends at 1: two tokens a round at most, in 1.1 seconds each."""
    table = CostTable(8.0, (0.1, 0.1), 0.0, (1.0, 1.0))
    profile = Profile(table, table, 0.0, 0.0, (0.0, 0.0))
    arrays = synthetic_trace([[3] * 8], 3)
    assert oracle_seconds(arrays, profile).tolist() == pytest.approx([4.4])
    assert replay(arrays, FixedLength(1), profile).seconds == pytest.approx(4.4)
