"""A batch in step under SGLang's rule: against replay where nothing adapts, and where the outcome is plain."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from specstop.collect.store import Trace
from specstop.policies.profile import Profile
from specstop.train.export.lockstep import Steps, lockstep
from specstop.train.replay.known_lengths import ReplayedRuns, replay_fixed
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays
from synthetic import synthetic_trace

EXACT = 1e-12


@pytest.fixture(scope="module")
def arrays(sides: tuple[Trace, Trace]) -> TraceArrays:
    return trace_arrays(sides[0])


def lengths(played: ReplayedRuns, run: int = 0) -> list[int]:
    """Return the length of each step of a run whose texts never cut a draft."""
    return played.every.drafted[played.run == run].tolist()


def test_one_candidate_alone_is_that_fixed_length(arrays: TraceArrays, profile: Profile) -> None:
    played = lockstep(arrays, [Steps((k,)) for k in range(4)], 1, 2)
    torch.testing.assert_close(played.seconds(profile), replay_fixed(arrays, 3).seconds(profile), rtol=EXACT, atol=0.0)


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_a_batch_is_always_full(batch: int, arrays: TraceArrays) -> None:
    played = lockstep(arrays, [Steps((2,)), Steps((0, 1, 3), 0.0, 0.0)], batch, 2)
    for run in range(2):
        assert int((played.run == run).sum()) % batch == 0
    assert bool((played.every.accepted >= 0).all())


def endless(accepted: int) -> TraceArrays:
    """Return one long text in which every draft is accepted that far."""
    made = synthetic_trace([[accepted] * 300], depth=6)
    return dataclasses.replace(made, header=dataclasses.replace(made.header, max_new_tokens=400))


def test_all_accepted_goes_to_the_top_and_none_to_the_bottom() -> None:
    rule = Steps((1, 3, 5))
    up = lockstep(endless(6), [rule], 1, 1)
    assert lengths(up)[:15] == [1] * 15 and lengths(up)[-8] == 5
    down = lockstep(endless(0), [rule], 1, 5)
    assert lengths(down)[:15] == [5] * 15 and lengths(down)[-8] == 1


def test_the_length_moves_at_the_steps_and_levels_that_are_documented() -> None:
    """EMA from 2 by 0.8 a step with nothing accepted: after 15 steps 0.07, below both 1 - 0.5 - 0.25 and 3 - 0.5 - 0.25."""
    rule = Steps((1, 3))
    assert rule.moved(1, 2.26) == (1, 2.26), "2.25 is the level from 3 down to 1, given 1 below it"
    assert rule.moved(1, 0.25) == (0, 0.25) and rule.moved(1, 0.26) == (1, 0.26)
    assert rule.moved(0, 0.51) == (1, 0.51) and rule.moved(0, 0.5) == (0, 0.5)
    assert [n for n in range(40) if rule.is_time(n)] == [15, 20, 25, 30, 35]
    assert rule.followed(2.0, 3, 0.0) == pytest.approx(1.6) and rule.followed(2.0, 0, 5.0) == 2.0


def test_from_no_draft_the_next_candidate_is_always_tried() -> None:
    rule = Steps((0, 2, 4))
    assert rule.moved(0, -1.0) == (1, 1.0) and rule.moved(0, 0.3) == (1, 0.3)


def test_the_order_is_seeded(arrays: TraceArrays, profile: Profile) -> None:
    rules = [Steps((1, 2, 3))]
    seconds = [lockstep(arrays, rules, 4, 2, seed).seconds(profile).sum().item() for seed in (0, 0, 1)]
    assert seconds[0] == seconds[1] != seconds[2]
