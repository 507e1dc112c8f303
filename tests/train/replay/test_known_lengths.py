"""Rules with known lengths, replayed as policies are."""

from __future__ import annotations

import pytest
import torch
from specstop.collect.store import Trace
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.replay.run import replay_fixed, replay_lengths
from specstop.train.replay.run import replay
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from synthetic import synthetic_trace

EXACT = 1e-12


class Sure(StopPolicy):
    """Stops where the draft is not sure; drops that token, or has it verified."""

    features, name = ("top1",), "sure"

    def __init__(self, threshold: float, length: int) -> None:
        self.threshold, self.max_depth = threshold, length

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[..., 0] >= self.threshold), state


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    """With ends of text and length limits, sampled at 0.7."""
    return trace_arrays(sides[0])


def test_fixed_lengths_take_what_replay_says(arrays: TraceArrays, profile: Profile) -> None:
    assert bool(arrays.ends.any()), "the trace should have drafts that end"
    depth = min(arrays.depth, profile.max_depth)
    found = replay_fixed(arrays, depth).seconds(profile)
    for k in range(depth + 1):
        torch.testing.assert_close(found[k], replay(arrays, FixedLength(k), profile).seconds, rtol=EXACT, atol=0.0)


@pytest.mark.parametrize("threshold", [0.2, 0.35, 0.6])
def test_known_lengths_take_what_the_policy_takes_in_replay(
    threshold: float, arrays: TraceArrays, profile: Profile
) -> None:
    length = min(arrays.depth, profile.max_depth)
    sure = (arrays.column("top1") >= threshold).long().cumprod(1).sum(1)
    drafted = (sure + 1).clamp_max(length)[None]
    found = replay_lengths(arrays, drafted, drafted).seconds(profile)[0]
    torch.testing.assert_close(found, replay(arrays, Sure(threshold, length), profile).seconds, rtol=EXACT, atol=0.0)
    assert found.sum() != replay(arrays, FixedLength(length), profile).seconds.sum()


def test_dropped_tokens_are_drafted_and_not_verified(profile: Profile) -> None:
    arrays = synthetic_trace([[3, 3, 3, 3, 3, 3, 3]], depth=3)
    drafted, verified = torch.full((1, 7), 2), torch.full((1, 7), 1)
    replayed = replay_lengths(arrays, drafted, verified)
    assert replayed.every.accepted.tolist() == [1, 1, 1, 0]
    assert replayed.every.drafted.tolist() == [2, 2, 2, 2] and replayed.every.verified.tolist() == [1, 1, 1, 1]
    assert replayed.every.backlog[1:].tolist() == [1, 1, 1], "the draft has read the accepted token"
