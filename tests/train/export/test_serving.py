"""Known lengths replayed as policies are, and a profile scaled to a batch."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from specstop.collect.store import Trace
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.errors import InputError, TraceError
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.export.by_batch import batch_seconds
from specstop.train.export.serving import (
    ASSUMPTIONS,
    assumptions,
    batch_profile,
    is_extrapolated,
    measured_rows,
    split_sides,
)
from specstop.train.replay.known_lengths import replay_fixed, replay_lengths
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays
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


def test_a_batch_of_one_is_the_profile(arrays: TraceArrays, profile: Profile) -> None:
    replayed = replay_fixed(arrays, 4)
    torch.testing.assert_close(batch_seconds(replayed, profile, 1), replayed.seconds(profile), rtol=EXACT, atol=0.0)


def flat(rise: float, context: float) -> Profile:
    """Return a profile whose verification rises by `rise` a row and by `context` a token of context."""

    def table(at: float) -> CostTable:
        return CostTable(at, (1e-3, 1e-3), 0.0, tuple(4e-3 + rise * n + context * at for n in range(6)), 1e-3)

    return Profile(table(10.0), table(100.0), 1e-5, 1e-4, (5e-3, 1e-4))


def test_weights_are_read_once_a_step_and_each_cache_once_a_request() -> None:
    free, cached = batch_profile(flat(0.0, 0.0), 8), batch_profile(flat(0.0, 1e-6), 8)
    assert 8 * free.low.verify_s[3] == pytest.approx(4e-3)
    assert 8 * free.low.draft_s[0] == pytest.approx(1e-3)
    assert 8 * free.round_s == pytest.approx(1e-4)
    assert 8 * cached.high.verify_s[3] == pytest.approx(4e-3 + 8 * 100 * 1e-6)
    assert free.prefill_s == (5e-3, 1e-4), "reading a prompt is as much work in a batch"


def test_later_draft_steps_keep_their_own_seconds_and_a_batch_of_one_is_the_profile() -> None:
    even = flat(0.0, 0.0)
    assert 8 * batch_profile(even, 8).low.later_draft_s == pytest.approx(1e-3)
    falling = dataclasses.replace(
        even, high=dataclasses.replace(even.high, verify_s=tuple(x / 2 for x in even.low.verify_s))
    )
    assert batch_profile(falling, 1) == falling, "whatever was measured"


def test_rows_are_priced_on_the_measured_line_and_beyond_it() -> None:
    profile = flat(1e-4, 0.0)
    for batch, length in ((1, 5), (2, 2), (3, 5), (64, 1)):
        rows = batch * (length + 1)
        found = batch_profile(profile, batch).low.verify_s[length]
        assert batch * found == pytest.approx(4e-3 + 1e-4 * (rows - 1))
    assert measured_rows(profile) == 6


def test_measured_wide_passes_are_used() -> None:
    profile = flat(1e-4, 0.0)
    wide = dataclasses.replace(
        profile,
        low=dataclasses.replace(profile.low, tree_verify_s=((39, 20e-3),)),
        high=dataclasses.replace(profile.high, tree_verify_s=((39, 20e-3),)),
    )
    assert measured_rows(wide) == 40
    shared = batch_profile(wide, 40)
    assert 40 * shared.low.verify_s[0] == pytest.approx(20e-3)


def test_measured_batches_are_priced_as_they_were_measured(profile: Profile) -> None:
    depth = profile.max_depth
    verify = {n: ((n, 4e-3), (2 * n, 4e-3), (2 * n + 1, 6e-3), (n * (depth + 1), 6e-3 + 1e-3 * n)) for n in (2, 8)}
    side = BatchTable(8.0, ((1, 8e-4), (8, 1.5e-3)), verify)
    costs = BatchCosts(side, dataclasses.replace(side, context=40.0))
    known = dataclasses.replace(profile, batch=costs)
    for batch in (2, 4, 8, 16):
        shared = batch_profile(known, batch)
        k = np.arange(depth + 1)
        found = batch * shared.round_seconds(0 * k + 20, k, k, 0 * k + 1, 0 * k, 0.0)
        said = known.verify_s(batch, batch * (k + 1), 20.0) + k * known.draft_s(batch, 20.0)
        assert found == pytest.approx(said)
    assert measured_rows(known) == 8 * (depth + 1)
    assert [is_extrapolated(known, size, size) for size in (1, 8, 9)] == [False, False, True], "rows are but 9"
    assert "2, 8 requests side by side were measured" in assumptions(known)[0] and assumptions(profile) == ASSUMPTIONS


def test_a_larger_batch_costs_a_request_less_and_the_engine_more(profile: Profile) -> None:
    shared = [batch_profile(profile, batch) for batch in (1, 2, 4, 16, 64)]
    for (small, one), (large, more) in itertools.pairwise(zip((1, 2, 4, 16, 64), shared, strict=True)):
        for few, many in zip(one.low.verify_s, more.low.verify_s, strict=True):
            assert many <= few * (1 + EXACT) and large * many >= small * few * (1 - EXACT)
    with pytest.raises(InputError, match="1 or more"):
        batch_profile(profile, 0)


def test_sides_do_not_share_prompts(sides: tuple[Trace, Trace], arrays: TraceArrays, profile: Profile) -> None:
    parts = split_sides(arrays, profile)
    assert not set(parts.fit.prompt_ids) & set(parts.held.prompt_ids)
    assert len(parts.fit.prompt_ids) + len(parts.held.prompt_ids) == arrays.sequences
    other = trace_arrays(sides[1])
    given = split_sides(arrays, profile, other)
    assert given.held is other and not given.is_part
    with pytest.raises(TraceError, match="prompts are in `traces` too"):
        split_sides(arrays, profile, arrays)
    few = split_sides(arrays.subset([0, 1, 2]), profile)
    assert few.fit is few.held and "too few" in few.note


def test_what_cannot_be_exported_is_refused(arrays: TraceArrays, profile: Profile) -> None:
    live = dataclasses.replace(arrays, header=dataclasses.replace(arrays.header, collector="live"))
    with pytest.raises(TraceError, match="expected dense traces"):
        split_sides(live, profile)
    tree = dataclasses.replace(arrays, header=dataclasses.replace(arrays.header, topology=(-1, -1, 0)))
    with pytest.raises(TraceError, match="expected traces of chains"):
        split_sides(tree, profile)
