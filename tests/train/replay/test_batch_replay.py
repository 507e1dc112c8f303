"""Replay of a batch: the rounds of the live batch, on a clock that all its streams share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from batch_profile import table, with_batches
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES
from hypothesis import given, strategies as st
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
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.batch import FULL, BatchRounds, at_once, deal, poisson, recorded, replay_batch
from specstop.train.replay.bounds import batch_bound
from specstop.train.replay.run import replay

EXACT = 1e-9
COLUMNS = ("anchor", "drafted", "verified", "accepted", "committed", "backlog", "decisions")
Arrays = dict[float, TraceArrays]


@pytest.fixture(scope="module")
def arrays(traces: dict[float, Trace]) -> Arrays:
    return {t: trace_arrays(trace) for t, trace in traces.items()}


@pytest.fixture(scope="module")
def timed(profile: Profile) -> Profile:
    return with_batches(profile)


class AboveMean(StopPolicy):
    """Continues the streams with a draft that is surer than the mean of the batch, while rounds are short."""

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
SINGLE = [BY_SIZE, *(TEST_POLICIES[name] for name in ("trimming", "reads-history", "selecting")), FixedLength(3)]


def joint(timed: Profile) -> list[StopPolicy]:
    """Return joint policies of each kind that decide by these costs."""
    by_batch = [
        for_batches(batch_policy(names=("top1", "mean_accepted", feature), depth=DEPTH), send, timed)
        for send, feature in (("best", "noisy_margin"), ("all", "drawn_prob"))
    ]
    rules = (
        BatchRule("best", [(1, 1.1), (4, 0.9)], first=2),
        BatchRule("best", [(1, 1.0), (2, 1.0), (4, 0.9)], 1, [(2, 2), (4, 3)]),  # decides for one stream only
    )
    by_batch += [for_batches(by_batch[0], rule=rule, profile=timed) for rule in rules]
    fitted = AdaptiveVerification(DEPTH, profile=timed)
    fitted.EVERY = 3  # type: ignore[misc]
    published = [LoadLength("1:5,2:3,3:2,4:1"), SmartSpec(profile=timed, max_depth=DEPTH), Tetris(2, 2), fitted]
    return [AboveMean(), *published, *by_batch]


def served(arrays: TraceArrays, policy: StopPolicy, profile: Profile, batch: int) -> BatchRounds:
    return replay_batch(arrays, policy, profile, batch, at_once(arrays.sequences))


@pytest.mark.parametrize(
    ("batch", "temperature", "policies"),
    [
        (3, 0.7, lambda timed: [AboveMean(), *SINGLE]),
        (4, 0.0, lambda timed: [AboveMean(), *SINGLE]),
        (3, 0.7, joint),
        (4, 0.7, joint),
    ],
)
def test_rounds_are_those_of_the_live_batch(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], arrays: Arrays, timed: Profile, batch: int,
    temperature: float, policies: Callable[[Profile], Sequence[StopPolicy]],
) -> None:  # fmt: skip
    """Eight texts: streams are refilled while others are in the middle of theirs."""
    held, compared = arrays[temperature], 0
    ids = {prompt.id: tokens for prompt, tokens in zip(prompts, prompt_ids, strict=True)}
    requests = [Request(ids[name], stream_key(0, name)) for name in held.prompt_ids]
    for policy in policies(timed):
        streams: dict[int, int] = {}

        def end(number: int, text: Generation, stream: int, streams: dict[int, int] = streams) -> None:
            streams[number] = stream

        settings = Settings(temperature, NEW, verification="match")
        live = Speculator(pair, policy, settings, timed, batch=batch).run(requests, on_end=end)
        played = served(held, policy, timed, batch)
        for number, text in enumerate(live):
            mine = played.sequence == number
            rows = torch.stack([getattr(played, name)[mine] for name in COLUMNS], 1).tolist()
            assert rows == [[getattr(r, name) for name in COLUMNS] for r in text.rounds], (
                f"{policy.name}, text {number}"
            )
            assert played.tokens[number] == len(text.tokens)
            assert set(played.stream[mine].tolist()) <= {streams[number]}
            compared += len(rows)
        assert len(played.call.unique()) < len(played), "verified together"
    assert compared > 200


def test_the_clock_is_shared_and_a_round_costs_what_the_batch_does(arrays: Arrays, timed: Profile) -> None:
    held = arrays[0.7]
    played = served(held, FixedLength(2), timed, 4)
    prompts = timed.prefill_seconds(held.prompt_tokens.numpy())
    clock, shares = 0.0, prompts.copy()
    for call in played.call.unique():
        context, drafted, verified, request = (
            getattr(played, name)[played.call == call].numpy()
            for name in ("context", "drafted", "verified", "sequence")
        )
        fed = [(drafted > depth).sum() for depth in range(2)]
        verify_s = timed.verify_s(len(request), len(request) + verified.sum(), context.mean())
        seconds = float(verify_s + timed.draft_s(fed, context.mean()).sum())
        shares[request] += seconds / len(request)
        clock += seconds
    assert played.seconds.tolist() == pytest.approx(shares.tolist(), rel=EXACT)
    assert float(played.ended.max()) == pytest.approx(clock + prompts.sum(), rel=EXACT)
    assert played.rate == pytest.approx(int(played.tokens.sum()) / float(played.ended.max()), rel=EXACT), "never idle"


def test_a_decision_about_all_streams_of_a_batch_is_priced_once(arrays: Arrays, timed: Profile) -> None:
    free, paid = (
        served(arrays[0.7], Confidence(0.4, 3), timed.with_decisions({"confidence": price}), 4) for price in (0.0, 2.0)
    )
    assert torch.equal(free.log, paid.log)
    per_call = torch.zeros(int(free.call.max()) + 1).scatter_reduce(0, free.call, free.decisions.float(), "amax")
    assert float(paid.seconds.sum() - free.seconds.sum()) == pytest.approx(2.0 * float(per_call.sum()), rel=EXACT)


@pytest.mark.parametrize("policy", [FixedLength(3), TEST_POLICIES["trimming"]])
def test_a_batch_of_one_is_replay_of_single_streams(arrays: Arrays, profile: Profile, policy: StopPolicy) -> None:
    alone, played = replay(arrays[0.7], policy, profile), served(arrays[0.7], policy, profile, 1)
    assert torch.equal(played.log, alone.log) and torch.equal(played.tokens, alone.tokens)
    assert played.seconds.tolist() == pytest.approx(alone.seconds.tolist(), rel=EXACT)


def test_requests_wait_for_their_arrival_and_for_a_stream(arrays: Arrays, timed: Profile) -> None:
    held, policy = arrays[0.0], FixedLength(2)
    count, now = held.sequences, served(held, policy, timed, 2)
    late = replay_batch(held, policy, timed, 2, np.full(count, 100.0))
    assert torch.equal(late.log, now.log) and late.latency.tolist() == pytest.approx(now.latency.tolist())
    assert late.ended.tolist() == pytest.approx((now.ended + 100.0).tolist())
    apart = replay_batch(held, policy, timed, 2, 1e3 * np.arange(count))
    assert len(apart.call.unique()) == len(apart), "each alone in the batch"
    assert apart.latency.tolist() == pytest.approx(apart.seconds.tolist()), "no request waits"
    assert float(apart.latency.max()) < float(now.latency.max())
    order = np.array([3, 1, 1])
    repeated = replay_batch(held, policy, timed, 2, recorded([7.0, 7.0, 8.0], 3), order)
    assert repeated.tokens.tolist() == held.text_tokens[order].tolist() and repeated.text.tolist() == [3, 1, 1]


@given(texts=st.integers(1, 30), size=st.integers(1, 9), seed=st.integers(0, 3))
def test_requests_are_whole_permutations_that_fill_several_batches(texts: int, size: int, seed: int) -> None:
    order = deal(texts, size, seed)
    assert (
        len(set(np.bincount(order, minlength=texts).tolist())) == 1
        and order.tolist() == deal(texts, size, seed).tolist()
    )
    assert len(order) == texts if size == 1 else FULL * size <= len(order) < FULL * size + texts or len(order) == texts


def test_arrivals_are_seeded_and_validated() -> None:
    times = poisson(4000, 5.0, seed=1)
    assert (np.diff(times) > 0).all() and times.tolist() == poisson(4000, 5.0, seed=1).tolist()
    assert times.tolist() != poisson(4000, 5.0, seed=2).tolist()
    assert times[-1] / 4000 == pytest.approx(0.2, rel=0.1)  # six standard errors
    assert recorded([5.0, 5.0, 6.5, 9.0], 3).tolist() == [0.0, 0.0, 1.5]
    for wrong, count in (([], 1), ([2.0, 1.0], 1), ([0.0, float("nan")], 1), ([1.0, 2.0], 3)):
        with pytest.raises(InputError, match="times"):
            recorded(wrong, count)
    with pytest.raises(InputError, match="rate above 0"):
        poisson(3, 0.0)


def test_what_a_profile_or_a_trace_cannot_answer_is_refused(arrays: Arrays, timed: Profile, profile: Profile) -> None:
    held = arrays[0.0]
    only_four = {4: table(8.0).verify_s[4]}
    sides = (dataclasses.replace(table(context), verify_s=only_four) for context in (8.0, 40.0))
    large = dataclasses.replace(timed, batch=BatchCosts(*sides))
    for costs, batch, error, noun in (
        (profile, 2, InputError, "no batches"),
        (timed, 5, InputError, "got 5"),
        (large, 2, InputError, "got 2"),
        (timed, 0, InputError, "1 or more"),
    ):
        with pytest.raises(error, match=noun):
            served(held, FixedLength(2), costs, batch)
    with pytest.raises(InputError, match="expected 8 times"):
        replay_batch(held, FixedLength(2), timed, 2, at_once(3))
    with pytest.raises(TraceError, match="drafts up to"):
        served(held, FixedLength(DEPTH + 1), timed, 2)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_no_batch_is_faster_than_the_bound(arrays: Arrays, timed: Profile, batch: int) -> None:
    held, free = arrays[0.7], dataclasses.replace(timed, decision_s={})
    policies = [*SINGLE, *joint(timed), *(FixedLength(k) for k in range(DEPTH + 1))]
    fastest = min(float(served(held, policy, free, batch).seconds.sum()) for policy in policies)
    assert 0.3 * fastest < float(batch_bound(held, free, batch).sum()) <= fastest * (1 + EXACT)


def test_the_bound_of_streams_that_share_nothing_is_that_of_each_alone(arrays: Arrays, profile: Profile) -> None:
    """A draft step takes 1 ms per stream, a verification 3 ms per stream and 1 ms per token."""
    held = arrays[0.7]
    verify = {n: ((n, 4e-3 * n), (n * (DEPTH + 1), 3e-3 * n + 1e-3 * n * (DEPTH + 1))) for n in (1, 2, 4)}
    one = BatchTable(8.0, ((1, 1e-3), (4, 4e-3)), verify)
    batch = BatchCosts(one, dataclasses.replace(one, context=40.0))
    alone = CostTable(8.0, (1e-3, 1e-3), 0.0, tuple(4e-3 + 1e-3 * n for n in range(DEPTH + 1)))
    linear = Profile(alone, dataclasses.replace(alone, context=40.0), 0.0, 0.0, (1e-3, 1e-4), batch=batch)
    assert batch_bound(held, linear, 4).tolist() == pytest.approx(batch_bound(held, linear, 1).tolist(), rel=EXACT)
