"""Replay: round for round what the live loop does, in the seconds of the profile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH, TEST_POLICIES, SelectingByToken
from specstop.collect.prompts import Prompt
from specstop.collect.store import Trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.records import Generation
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.errors import TraceError
from specstop.policies.features import TOKEN_FEATURES
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.heads.tables import TokenHead
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.rules import Derived
from specstop.train.replay.run import Replayed, replay
from specstop.train.replay.arrays import TraceArrays, seen_features, trace_arrays

Live = Callable[[StopPolicy, float], list[Generation]]


@pytest.fixture(scope="module")
def arrays(traces: dict[float, Trace]) -> dict[float, TraceArrays]:
    return {t: trace_arrays(trace) for t, trace in traces.items()}


@pytest.fixture(scope="module")
def live(pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile) -> Live:
    """Run a policy live on the prompts of the trace, once for each policy and temperature."""
    done: dict[tuple[str, float], list[Generation]] = {}

    def run(policy: StopPolicy, temperature: float) -> list[Generation]:
        if (policy.name, temperature) not in done:
            speculator = Speculator(pair, policy, Settings(temperature, NEW, verification="match"), profile)
            done[policy.name, temperature] = [
                speculator.generate(ids, stream_key(0, p.id)) for p, ids in zip(prompts, prompt_ids, strict=True)
            ]
        return done[policy.name, temperature]

    return run


def rounds(generations: list[Generation]) -> list[list[list[int]]]:
    return [[[r.anchor, r.drafted, r.verified, r.accepted] for r in g.rounds] for g in generations]


def rounds_of(replayed: Replayed) -> list[list[list[int]]]:
    sequences = range(len(replayed.tokens))
    return [replayed.log[replayed.log[:, 0] == s, 1:].tolist() for s in sequences]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", [*TEST_POLICIES, "selecting-by-token"])
def test_rounds_are_those_of_the_live_loop(
    arrays: dict[float, TraceArrays], live: Live, profile: Profile, name: str, temperature: float
) -> None:
    policy = TEST_POLICIES.get(name) or SelectingByToken()
    assert rounds_of(replay(arrays[temperature], policy, profile)) == rounds(live(policy, temperature))


def token_policy(vocabulary: int) -> LearnedPolicy:
    """A policy that goes by all tokens it may read, and what it hashed them with, through tables of chance."""
    names = ("mean_accepted", "noisy_margin", "noisy_score", *TOKEN_FEATURES)
    chance, size = np.random.default_rng(0), 97
    strides = chance.integers(0, 3, (5, len(names) + 1))
    strides[:, 0] = 0  # the running mean is not crossed
    tensors = {
        "mean": np.zeros(3, dtype=np.float32),
        "scale": np.ones(3, dtype=np.float32),
        "weight": 0.1 * chance.standard_normal((3, 3), dtype=np.float32),
        "bias": np.ones((2, DEPTH + 1), dtype=np.float32),
        "table": chance.standard_normal((2, len(TOKEN_FEATURES), vocabulary), dtype=np.float32),
        "strides": strides,
        "edges": np.array([[0.5, 1.0, 2.0], [-1.0, 0.0, 1.0]], dtype=np.float32),
        "hashed": chance.standard_normal((2, len(strides), size), dtype=np.float32),
    }
    return LearnedPolicy(
        "by-tokens", names, TokenHead(names, tensors), Calibrator(), Calibrator(),
        Derived([0.3] * DEPTH), DEPTH,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rounds_of_a_token_head_are_those_of_the_live_loop(
    arrays: dict[float, TraceArrays], live: Live, profile: Profile, temperature: float
) -> None:
    policy = token_policy(arrays[temperature].header.vocabulary)
    played = replay(arrays[temperature], policy, profile)
    assert rounds_of(played) == rounds(live(policy, temperature))
    assert len(played.log[:, 2].unique()) > 2, "it stops at several depths"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["fixed:0", "fixed:4", "confidence:0.4", "trimming", "from-anchor", "adaptive"])
def test_seconds_are_those_of_the_live_rounds_under_the_profile(
    arrays: dict[float, TraceArrays], live: Live, profile: Profile, name: str, temperature: float
) -> None:
    replayed = replay(arrays[temperature], TEST_POLICIES[name], profile)
    for seconds, generation in zip(replayed.seconds.tolist(), live(TEST_POLICIES[name], temperature), strict=True):
        total = profile.prefill_seconds(np.array([generation.prompt_tokens])).item()
        for r in generation.rounds:
            row = [np.array([x]) for x in (r.context, r.drafted, r.verified, r.backlog, r.decisions)]
            total += profile.round_seconds(*row, profile.decision(TEST_POLICIES[name].cost_name)).item()
        assert seconds == pytest.approx(total, rel=1e-12)


def test_sums_are_those_of_the_log(arrays: dict[float, TraceArrays], profile: Profile) -> None:
    replayed = replay(arrays[0.7], TEST_POLICIES["trimming"], profile)
    for s, log in enumerate(rounds_of(replayed)):
        assert [len(log), *(sum(column) for column in list(zip(*log, strict=True))[1:])] == [
            int(x[s]) for x in (replayed.rounds, replayed.drafted, replayed.verified, replayed.accepted)
        ]
    assert replayed.tokens.tolist() == arrays[0.7].text_tokens.tolist()
    assert replayed.rate == pytest.approx(float(replayed.tokens.sum() / replayed.seconds.sum()))
    assert replayed.block_efficiency == pytest.approx(float(replayed.committed.sum()) / len(replayed.log))


def test_a_sequence_is_replayed_alike_in_any_company(arrays: dict[float, TraceArrays], profile: Profile) -> None:
    for name in ("reads-history", "adaptive", "trimming", "randomised"):
        whole = replay(arrays[0.7], TEST_POLICIES[name], profile)
        part = replay(arrays[0.7].subset([5, 2]), TEST_POLICIES[name], profile)
        assert rounds_of(part) == [rounds_of(whole)[s] for s in (5, 2)]
        assert torch.equal(part.seconds, whole.seconds[[5, 2]])


def test_a_policy_limited_to_the_trace_is_that_policy_live(
    arrays: dict[float, TraceArrays], live: Live, profile: Profile
) -> None:
    policy = Confidence(0.1).limited(DEPTH)
    assert rounds_of(replay(arrays[0.7], policy, profile)) == rounds(live(policy, 0.7))


class Looking(StopPolicy):
    """Drafts all it may and remembers what it saw: (row, depth, features) of the streams in a round."""

    features = ("anchor_margin", "mean_full", "top3", "noisy_margin", "last_verified", "depth")
    name, first, max_depth = "looking", 0, DEPTH

    def __init__(self, arrays: TraceArrays) -> None:
        self.arrays = arrays
        self.seen: list[tuple[int, int, Array]] = []

    def start(self, streams: int, keys: Array) -> State:
        return self.arrays.offset.numpy()

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        for s in step.alive[:, 0].nonzero()[0].tolist():
            self.seen.append((int(state[s]), step.depth, step.features[s, 0]))
        return step.alive, state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + (outcome.accepted + 1) * outcome.active


def test_seen_features_are_what_a_policy_sees(arrays: dict[float, TraceArrays], profile: Profile) -> None:
    here = arrays[0.7]
    policy = Looking(here)
    replayed = replay(here, policy, profile)
    row = here.offset[replayed.log[:, 0]] + replayed.log[:, 1] - here.first_anchor[replayed.log[:, 0]]
    table = seen_features(here, policy.features, row, replayed.history)
    assert table.shape == (len(replayed.log), DEPTH + 1, len(policy.features))
    place = {int(r): i for i, r in enumerate(row)}
    assert len(place) == len(row), "no anchor is visited twice"
    for r, depth, features in policy.seen:
        assert features.tolist() == table[place[r], depth].tolist()
    history = table[:, 0, [1, 4]]
    assert bool((history > 0).any())
    assert not table[:, 0, [2, 3, 5]].any(), "depth 0 knows ANCHOR and HISTORY columns only"


class Clocked(FixedLength):
    reads_clock = True


class Hidden(FixedLength):
    hidden = ("draft_hidden",)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            FixedLength(DEPTH + 1),
            rf"drafts up to {DEPTH + 1} tokens, but the trace was recorded to depth {DEPTH}",
        ),
        (Confidence(), "recorded to depth"),
        (Clocked(2), "the clock"),
        (Hidden(2), r"reads hidden states \(draft_hidden\), which the trace was recorded without; .* `hidden` draft"),
    ],
    ids=["deeper", "default confidence", "clock", "hidden states"],
)
def test_a_policy_the_trace_cannot_answer_is_refused(
    arrays: dict[float, TraceArrays], profile: Profile, policy: StopPolicy, message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        replay(arrays[0.0], policy, profile)


def test_a_profile_that_ends_above_the_policy_is_refused(arrays: dict[float, TraceArrays], profile: Profile) -> None:
    import dataclasses

    short = dataclasses.replace(
        profile,
        **{side: dataclasses.replace(getattr(profile, side), verify_s=(1.0, 2.0, 3.0)) for side in ("low", "high")},
    )
    with pytest.raises(TraceError, match="the profile ends at 2"):
        replay(arrays[0.0], FixedLength(3), short)


def test_a_feature_that_was_not_recorded_is_refused_by_name(traces: dict[float, Trace], profile: Profile) -> None:
    few = trace_arrays(traces[0.7], ["entropy"])
    with pytest.raises(TraceError, match="no feature 'drawn_prob'"):
        replay(few, Confidence(0.4, DEPTH), profile)
    with pytest.raises(TraceError, match="no feature 'top1'"):
        seen_features(few, ["top1"], torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4))


def test_a_policy_that_carries_its_state_is_replayed_in_order_or_refused(
    arrays: dict[float, TraceArrays], live: Live, profile: Profile
) -> None:
    class Carrying(StopPolicy):
        """Drafts one token more after each text."""

        name, carries, max_depth = "carrying", True, DEPTH

        def start(self, streams: int, keys: Array) -> State:
            return np.zeros(streams, dtype=np.int64)

        def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
            return step.alive & (step.depth <= state // 4)[:, None], state

        def observe(self, outcome: RoundOutcome, state: State) -> State:
            return state + outcome.active

    try:
        replayed = replay(arrays[0.7], Carrying(), profile)
    except TraceError:
        return
    assert rounds_of(replayed) == rounds(live(Carrying(), 0.7))


def test_a_trace_with_a_missing_anchor_is_refused(traces: dict[float, Trace]) -> None:
    trace = traces[0.0]
    rows = trace.rows.select([i for i in range(len(trace.rows)) if i != 3])
    with pytest.raises(TraceError, match="misses anchors"):
        trace_arrays(Trace(trace.folder, trace.header, rows))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("accepted_length", -1, "has accepted lengths beyond 0 to"),
        ("accepted_length", DEPTH + 1, "has accepted lengths beyond 0 to"),
        ("tokens", None, "has rows without tokens"),
        ("top1", None, "has rows without top1"),
    ],
)
def test_a_row_that_cannot_be_is_refused(
    traces: dict[float, Trace], column: str, value: int | None, message: str
) -> None:
    """An accepted length of -1 would commit nothing, for ever."""
    trace = traces[0.0]
    rows = trace.rows.map(lambda row, at: {column: value if at == 3 else row[column]}, with_indices=True)
    with pytest.raises(TraceError, match=f"traces: .* {message}.*; collect it again"):
        trace_arrays(Trace(trace.folder, trace.header, rows))
