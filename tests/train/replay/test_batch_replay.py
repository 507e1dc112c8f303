"""Replay of a batch: the rounds of the live loop in the same company, on a clock that all its streams share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from batch_profile import table, with_batches
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES
from joint_policies import batch_policy
from learned_policies import learned
from specstop.collect.prompts import Prompt
from specstop.collect.store import Trace
from specstop.decode.loop import Request, Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.records import Generation
from specstop.decode.verify.noise import stream_key
from specstop.policies.batch_rules import for_batches
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.errors import InputError, TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.published.adaptive_verification import AdaptiveVerification
from specstop.policies.published.load import LoadLength
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.published.tetris import Tetris
from specstop.policies.rules import BatchRule, Derived
from specstop.train.replay.batch import at_once, poisson, recorded
from specstop.train.replay.batch import COLUMNS, BatchReplayed, replay_batch
from specstop.train.replay.bounds import batch_bound
from specstop.train.replay.run import replay
from specstop.train.replay.arrays import TraceArrays, trace_arrays

EXACT = 1e-9


@pytest.fixture(scope="module")
def arrays(traces: dict[float, Trace]) -> dict[float, TraceArrays]:
    return {t: trace_arrays(trace) for t, trace in traces.items()}


@pytest.fixture(scope="module")
def timed(profile: Profile) -> Profile:
    return with_batches(profile)


class AboveMean(StopPolicy):
    """Goes on with the streams whose draft is surer than the mean of those it is verified with, while rounds are short."""

    name, features, joint, max_depth = "above-mean", ("top1",), True, DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        assert set(step.batch.tolist()) <= {0, -1}, "one verification"
        assert not step.alive[step.batch < 0].any(), "no round"
        sure = step.features[..., 0].astype(np.float64)
        mean = sure[step.alive].mean() if step.alive.any() else 0.0
        return step.alive & ((sure >= mean) | (state[:, None] > 9e-3)), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        assert len(np.unique(outcome.seconds[outcome.active])) == 1, "all streams wait for the round"
        return np.where(outcome.active, outcome.seconds, state)


BY_SIZE = learned(rule=Derived([0.1, 0.2, 0.3, 0.2], 1, scales=[(1, 1.0), (2, 1.8), (4, 2.5)]))
POLICIES = [
    AboveMean(),
    BY_SIZE,
    *(TEST_POLICIES[name] for name in ("trimming", "reads-history", "selecting")),
    FixedLength(3),
]


def rounds(made: BatchReplayed, request: int) -> list[list[int]]:
    log = made.log[made.log[:, COLUMNS.index("request")] == request]
    names = ("anchor", "drafted", "verified", "accepted", "committed", "backlog", "decisions")
    return log[:, [COLUMNS.index(name) for name in names]].tolist()


@pytest.mark.parametrize(("batch", "temperature"), [(3, 0.7), (4, 0.0)])  # `benchmarks/batch.py` has more of both
def test_rounds_are_those_of_the_live_batch(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], arrays: dict[float, TraceArrays], timed: Profile,
    batch: int, temperature: float,
) -> None:  # fmt: skip
    """Eight texts, so that streams are refilled while others are in the midst of theirs."""
    assert same_as_live(pair, prompts, prompt_ids, arrays[temperature], timed, batch, POLICIES) > 200


@pytest.mark.parametrize("batch", [3, 4])
def test_rounds_of_joint_policies_are_those_of_the_live_batch(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], arrays: dict[float, TraceArrays], timed: Profile,
    batch: int,
) -> None:  # fmt: skip
    assert same_as_live(pair, prompts, prompt_ids, arrays[0.7], timed, batch, joint(timed)) > 200


def joint(timed: Profile) -> list[StopPolicy]:
    """Return one of each kind, that decide by these costs."""
    learned = [
        for_batches(batch_policy(names=("top1", "mean_accepted", feature), depth=DEPTH), send, timed)
        for send, feature in (("best", "noisy_margin"), ("all", "drawn_prob"))
    ]
    learned.append(for_batches(learned[0], rule=BatchRule("best", [(1, 1.1), (4, 0.9)], first=2), profile=timed))
    settled = BatchRule("best", [(1, 1.0), (2, 1.0), (4, 0.9)], 1, [(2, 2), (4, 3)])  # asked where one text is left
    learned.append(for_batches(learned[0], rule=settled, profile=timed))
    fitted = AdaptiveVerification(DEPTH, profile=timed)
    fitted.EVERY = 3  # type: ignore[misc]
    return [LoadLength("1:5,2:3,3:2,4:1"), SmartSpec(profile=timed, max_depth=DEPTH), Tetris(2, 2), fitted, *learned]


def same_as_live(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], held: TraceArrays, timed: Profile, batch: int,
    policies: Sequence[StopPolicy],
) -> int:  # fmt: skip
    """Compare replayed batches with live ones, round by round, and return how many rounds they had."""
    temperature, compared = held.header.temperature, 0
    at = {prompt.id: number for number, prompt in enumerate(prompts)}
    asked = [Request(prompt_ids[at[name]], stream_key(0, name)) for name in held.prompt_ids]
    for policy in policies:
        ended: list[tuple[int, int]] = []

        def end(number: int, text: Generation, stream: int, ended: list[tuple[int, int]] = ended) -> None:
            ended.append((number, stream))

        live = Speculator(pair, policy, Settings(temperature, NEW, verification="match"), timed, batch=batch).run(
            asked, on_end=end
        )
        streams = dict(ended)
        made = replay_batch(held, policy, timed, batch, at_once(len(asked)))
        for number, text in enumerate(live):
            said = [
                [r.anchor, r.drafted, r.verified, r.accepted, r.committed, r.backlog, r.decisions] for r in text.rounds
            ]
            assert rounds(made, number) == said, f"{policy.name}, text {number}"
            assert made.tokens[number] == len(text.tokens)
            own = made.log[made.log[:, 1] == number]
            assert set(own[:, COLUMNS.index("stream")].tolist()) <= {streams[number]}
            compared += len(said)
        assert made.calls < len(made.log), "verified together"
    return compared


def test_the_clock_is_shared_and_a_round_costs_what_the_batch_does(
    arrays: dict[float, TraceArrays], timed: Profile
) -> None:
    held = arrays[0.7]
    made = replay_batch(held, FixedLength(2), timed, 4, at_once(held.sequences))
    clock = 0.0
    shares = timed.prefill_seconds(held.prompt_tokens.numpy())
    for number in np.unique(made.log[:, 0]):
        lines = made.log[made.log[:, 0] == number]
        column = {name: lines[:, at] for at, name in enumerate(COLUMNS)}
        fed = [(column["drafted"] > depth).sum() for depth in range(2)]
        context, sent = column["context"].mean(), len(lines) + column["verified"].sum()
        seconds = float(timed.verify_s(len(lines), sent, context) + timed.draft_s(fed, context).sum())
        shares[column["request"]] += seconds / len(lines)
        clock += seconds
    assert made.seconds == pytest.approx(shares, rel=EXACT)
    assert made.ended.max() == pytest.approx(clock + timed.prefill_seconds(held.prompt_tokens.numpy()).sum(), rel=EXACT)
    assert made.rate == pytest.approx(made.tokens.sum() / made.ended.max(), rel=EXACT), "never idle"


def test_a_decision_about_all_streams_of_a_batch_costs_one(arrays: dict[float, TraceArrays], timed: Profile) -> None:
    held, policy = arrays[0.7], Confidence(0.4, 3)
    free, paid = (
        replay_batch(held, policy, timed.with_decisions({"confidence": price}), 4, at_once(held.sequences))
        for price in (0.0, 2.0)
    )
    assert (free.log == paid.log).all()
    owed = 0.0
    for number in np.unique(free.log[:, 0]):
        asked = free.log[free.log[:, 0] == number][:, COLUMNS.index("decisions")]
        owed += 2.0 * asked.max()
    assert paid.seconds.sum() - free.seconds.sum() == pytest.approx(owed, rel=EXACT)


class _Unasked(AboveMean):
    """Is asked where one stream or two are left, and drafts a fixed length where there are more."""

    unasked: ClassVar[dict[int, int]] = {3: 2, 4: 2}


def test_where_a_policy_is_not_asked_a_fixed_length_is_drafted(
    arrays: dict[float, TraceArrays], timed: Profile
) -> None:
    held = arrays[0.7]
    fixed, made, asked = (
        replay_batch(held, policy, timed.with_decisions({"above-mean": 1.0}), 4, at_once(held.sequences))
        for policy in (FixedLength(2), _Unasked(), AboveMean())
    )
    until = int(np.flatnonzero(np.bincount(made.log[:, 0]) < 3)[0])  # the first round of two streams
    assert until > 5
    assert (made.log[made.log[:, 0] < until] == fixed.log[fixed.log[:, 0] < until]).all()
    decisions = COLUMNS.index("decisions")
    assert not made.log[made.log[:, 0] < until, decisions].any() and made.log[:, decisions].any()
    assert asked.log[asked.log[:, 0] < until, decisions].any()


def test_a_batch_of_one_is_replay_of_single_streams(arrays: dict[float, TraceArrays], profile: Profile) -> None:
    held = arrays[0.7]
    for policy in (FixedLength(3), TEST_POLICIES["trimming"]):
        alone, made = replay(held, policy, profile), replay_batch(held, policy, profile, 1, at_once(held.sequences))
        assert made.seconds == pytest.approx(alone.seconds.numpy(), rel=EXACT)
        assert made.log[:, [1, 3, 5, 6, 7]].tolist() == alone.log.tolist()
        assert made.tokens_per_call == pytest.approx(alone.block_efficiency)


def test_requests_wait_until_they_have_come_and_a_stream_is_free(
    arrays: dict[float, TraceArrays], timed: Profile
) -> None:
    held = arrays[0.0]
    count = held.sequences
    late = replay_batch(held, FixedLength(2), timed, 2, np.full(count, 100.0))
    now = replay_batch(held, FixedLength(2), timed, 2, at_once(count))
    assert late.log.tolist() == now.log.tolist() and late.latency == pytest.approx(now.latency)
    assert late.ended == pytest.approx(now.ended + 100.0)
    apart = replay_batch(held, FixedLength(2), timed, 2, 1e3 * np.arange(count))
    assert apart.calls == len(apart.log), "each alone in the batch"
    assert apart.latency == pytest.approx(apart.seconds), "nobody waits"
    assert apart.latency.max() < now.latency.max()
    order = np.array([3, 1, 1])
    some = replay_batch(held, FixedLength(2), timed, 2, recorded([7.0, 7.0, 8.0], 3), order)
    assert some.tokens.tolist() == held.text_tokens[order].tolist() and some.sequence.tolist() == [3, 1, 1]


def test_arrivals_are_keyed_and_checked() -> None:
    times = poisson(4000, 5.0, seed=1)
    assert (np.diff(times) > 0).all() and times.tolist() == poisson(4000, 5.0, seed=1).tolist()
    assert times.tolist() != poisson(4000, 5.0, seed=2).tolist()
    assert times[-1] / 4000 == pytest.approx(0.2, rel=0.1)  # six standard errors
    assert recorded([5.0, 5.0, 6.5, 9.0], 3).tolist() == [0.0, 0.0, 1.5]
    for wrong in ([], [2.0, 1.0], [0.0, float("nan")]):
        with pytest.raises(InputError, match="times in seconds that do not fall"):
            recorded(wrong, 1)
    with pytest.raises(InputError, match="expected 3 times, one a request, not 2"):
        recorded([1.0, 2.0], 3)
    with pytest.raises(InputError, match="expected a rate above 0"):
        poisson(3, 0.0)


def test_what_cannot_be_answered_is_refused(arrays: dict[float, TraceArrays], timed: Profile, profile: Profile) -> None:
    held = arrays[0.0]
    every = at_once(held.sequences)
    with pytest.raises(InputError, match="it has no batches; measure them with `specstop profile --batch"):
        replay_batch(held, FixedLength(2), profile, 2, every)
    with pytest.raises(InputError, match="the largest batch measured is 4, not 5"):
        replay_batch(held, FixedLength(2), timed, 5, every)
    large = {4: table(8.0).verify_s[4]}
    sides = (dataclasses.replace(table(context), verify_s=large) for context in (8.0, 40.0))
    with pytest.raises(InputError, match="the smallest batch measured is 4, not 2"):
        replay_batch(held, FixedLength(2), dataclasses.replace(timed, batch=BatchCosts(*sides)), 2, every)
    with pytest.raises(InputError, match="expected 8 times, one a request, not 3"):
        replay_batch(held, FixedLength(2), timed, 2, at_once(3))
    with pytest.raises(TraceError, match="drafts up to"):
        replay_batch(held, FixedLength(DEPTH + 1), timed, 2, every)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_nothing_is_faster_than_the_bound(arrays: dict[float, TraceArrays], timed: Profile, batch: int) -> None:
    held = arrays[0.7]
    free = dataclasses.replace(timed, decision_s={})
    least = batch_bound(held, free, batch).sum().item()
    every = [*POLICIES, *joint(timed)]
    played = [replay_batch(held, policy, free, batch, at_once(held.sequences)).seconds.sum() for policy in every]
    played += [
        replay_batch(held, FixedLength(k), free, batch, at_once(held.sequences)).seconds.sum() for k in range(DEPTH + 1)
    ]
    assert 0.3 * min(played) < least <= min(played) * (1 + EXACT)


def test_where_streams_share_nothing_the_bound_is_that_of_each_alone(
    arrays: dict[float, TraceArrays], profile: Profile
) -> None:
    """A draft step of 1 ms a stream, a verification of 3 ms a stream and 1 ms a token: the best plan alone is the best."""
    held = arrays[0.7]
    verify = {n: ((n, 4e-3 * n), (n * (DEPTH + 1), 3e-3 * n + 1e-3 * n * (DEPTH + 1))) for n in (1, 2, 4)}
    one = BatchTable(8.0, ((1, 1e-3), (4, 4e-3)), verify)
    batch = BatchCosts(one, dataclasses.replace(one, context=40.0))
    alone = CostTable(8.0, (1e-3, 1e-3), 0.0, tuple(4e-3 + 1e-3 * n for n in range(DEPTH + 1)))
    linear = Profile(alone, dataclasses.replace(alone, context=40.0), 0.0, 0.0, (1e-3, 1e-4), batch=batch)
    assert batch_bound(held, linear, 4).tolist() == pytest.approx(batch_bound(held, linear, 1).tolist(), rel=EXACT)
