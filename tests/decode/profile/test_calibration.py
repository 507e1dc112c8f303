"""The latency profile: known costs on a made-up clock come back exactly."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_policies import TEST_POLICIES
from known_costs import (
    DEPTH,
    DRAFT,
    EXACT,
    FURTHER,
    PROMPTS,
    ROUND,
    ROW,
    SECOND,
    STEP,
    TARGET,
    TICK,
    known_clock,
    ticking_clock,
)
from specstop.decode.hooks import Timer
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.device import Recorded
from specstop.decode.models.pair import Pair
from specstop.decode.profile import CalibrationRun, measure_profile
from specstop.decode.profile.calibration import _affordable_tokens
from specstop.decode.profile.measuring import Effort
from specstop.decode.profile.scripts import TWICE, ChainScript, TreeScript, is_full
from specstop.policies.contract import DraftStep, RoundOutcome
from specstop.policies.costs import CostTable
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.measurements import PLAIN, TREE_VERIFY, VERIFY
from specstop.policies.profile import Profile

THRICE = Effort(repetitions=3)


@pytest.fixture
def clock(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return known_clock(pair, monkeypatch)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return ticking_clock(monkeypatch)


@pytest.fixture(scope="module")
def known(pair: Pair) -> Profile:
    """What is measured on that clock."""
    with pytest.MonkeyPatch.context() as patch:
        known_clock(pair, patch)
        return measure_profile(pair, PROMPTS, depth=DEPTH, new_tokens=60, effort=THRICE)


def test_a_timer_adds_up_what_the_clock_says(ticking: list[float]) -> None:
    watch = Timer(torch.device("cpu"))
    for phase, spent in (("draft", 3.0), ("verify", 0.0), ("draft", 4.0)):
        mark = watch.mark()
        ticking[0] += spent
        watch.add(phase, mark)
    assert watch.laps == {"draft": pytest.approx([3.0 + TICK, 4.0 + TICK]), "verify": pytest.approx([TICK])}
    watch.restart()
    assert watch.laps == {}


def test_known_costs_are_found_again(known: Profile) -> None:
    profile = known
    for table in (profile.low, profile.high):
        assert table.draft_s == pytest.approx((DRAFT, DRAFT + SECOND), rel=EXACT)
        assert table.draft_token_s == pytest.approx(FURTHER, rel=1e-4)
        assert table.verify_s == pytest.approx([TARGET + ROW * (k + 1) for k in range(DEPTH + 1)], rel=EXACT)
    assert profile.step_s == pytest.approx(STEP, rel=1e-4)
    assert profile.round_s == pytest.approx(ROUND + STEP, rel=1e-4)
    assert profile.prefill_s == pytest.approx((TARGET + STEP, ROW), rel=1e-4)
    assert profile.facts["spread"] == pytest.approx(0.0, abs=1e-9)
    assert 12 < profile.low.context < profile.high.context < 128


def test_a_round_costs_what_it_took(pair: Pair, known: Profile, clock: list[float]) -> None:
    """The profile's prices of the rounds of another run, whose prompt is longer, add up to its seconds."""
    for policy in (FixedLength(3), TEST_POLICIES["trimming"].limited(DEPTH)):
        generation = Speculator(pair, policy, Settings(0.0, 40)).generate([*PROMPTS[3], *PROMPTS[1]], 5)
        for r in generation.rounds:
            row = [np.array([n]) for n in (r.context, r.drafted, r.verified, r.backlog, r.decisions)]
            assert known.round_seconds(*row, 0.0).item() == pytest.approx(r.seconds, rel=1e-4)


def test_longer_contexts_cost_more_where_they_do(pair: Pair, clock: list[float]) -> None:
    clock[1] = 2e-5
    profile = measure_profile(pair, PROMPTS, depth=DEPTH, new_tokens=60, effort=Effort(repetitions=4))
    span = profile.high.context - profile.low.context
    for low, high in zip(profile.low.verify_s, profile.high.verify_s, strict=True):
        assert high - low == pytest.approx(2e-5 * span, rel=0.5), "contexts vary by 60 tokens within a text"
    assert profile.low.draft_s == pytest.approx(profile.high.draft_s, rel=EXACT)


def test_a_depth_of_one_and_of_none(pair: Pair, clock: list[float]) -> None:
    one = measure_profile(pair, PROMPTS, depth=1, new_tokens=30, effort=Effort(repetitions=1))
    assert len(one.low.verify_s) == 2
    assert one.low.draft_s[0] == pytest.approx(DRAFT, rel=EXACT)
    assert one.low.draft_s[1] == pytest.approx(DRAFT + SECOND, rel=EXACT)


def test_short_prompts_take_the_price_of_a_backlog_from_the_long_context(pair: Pair, clock: list[float]) -> None:
    """At the short context no backlog is long enough to tell it."""
    profile = measure_profile(pair, [p[:3] for p in PROMPTS], depth=DEPTH, new_tokens=60, effort=Effort(repetitions=2))
    assert profile.high.draft_token_s == pytest.approx(FURTHER, rel=1e-4)
    assert profile.low.draft_token_s == pytest.approx(FURTHER, rel=1e-4)


@pytest.mark.usefixtures("ticking")
def test_a_measured_profile_is_positive_and_comes_back_from_its_file(pair: Pair, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    profile = measure_profile(
        pair, PROMPTS, depth=DEPTH, temperature=0.7, policies=[Confidence(0.3, DEPTH), TEST_POLICIES["trimming"]],
        new_tokens=30, effort=Effort(repetitions=1), facts={"device": "here"}, progress=lambda *call: calls.append(call),
    )  # fmt: skip
    for table in (profile.low, profile.high):
        numbers = (*table.draft_s, *table.verify_s, table.context)
        assert len(table.verify_s) == DEPTH + 1
        assert min(numbers) > 0
        assert table.draft_token_s >= 0
        assert table.draft_s[1] >= table.draft_s[0]
    assert min(profile.step_s, profile.prefill_s[1]) >= 0 < profile.round_s
    assert profile.prefill_seconds(np.array([12])) > 0
    assert set(profile.decision_s) == {"confidence", "trimming"}
    assert all(profile.decision(name) > 0 for name in profile.decision_s)
    assert (profile.max_depth, profile.temperature, profile.facts["device"]) == (DEPTH, 0.7, "here")
    assert profile.facts["rounds"] > 10
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert calls == [("profile", done, 6) for done in range(7)]  # rounds and two policies, after a warm-up


@pytest.mark.parametrize("depth", [0, 1, 4, 10])
def test_the_script_deals_every_length_equally_often(depth: int) -> None:
    """Streams have decks of their own, and a stream has another order in each deck."""
    streams, decks = 4, 6
    policy = ChainScript(depth)
    alive, parent = np.ones((streams, 1), dtype=bool), np.zeros((streams, 1), dtype=np.int64)
    batch, none = np.arange(streams), np.zeros((streams, 1, 0), dtype=np.float32)
    state = policy.start(streams, batch * 7919)
    dealt: list[list[int]] = []
    for _ in range(decks * (depth + 1) * TWICE):
        length = np.zeros(streams, dtype=np.int64)
        for j in range(depth):
            keep, state = policy.keep(DraftStep(j, alive, parent, none, {}, batch), state)
            assert not (keep[:, 0] & (length < j)).any(), "a length is cut once"
            length += keep[:, 0]
        dealt.append(length.tolist())
        zero = np.zeros(streams, dtype=np.int64)
        state = policy.observe(RoundOutcome(alive[:, 0], length, length, zero, ~alive[:, 0], np.zeros(streams)), state)
    for at in range(1, TWICE):
        assert dealt[::TWICE] == dealt[at::TWICE], "each comes some times in a row"
    dealt = dealt[::TWICE]
    for s in range(streams):
        mine = [row[s] for row in dealt]
        for at in range(0, len(mine), depth + 1):
            assert sorted(mine[at : at + depth + 1]) == list(range(depth + 1))
    if depth >= 4:
        assert len({tuple(row[0] for row in dealt[at : at + depth + 1]) for at in range(0, len(dealt), depth + 1)}) > 3
        assert len({tuple(row[s] for row in dealt) for s in range(streams)}) == streams


def test_the_script_plays_live_as_dealt(pair: Pair) -> None:
    run = Speculator(pair, ChainScript(3), Settings(0.7, 90, ignore_eos=True, verification="match")).generate(
        PROMPTS[0], 1
    )
    counts = Counter(r.drafted for r in run.rounds if not r.cut)
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) - min(counts.values()) <= TWICE


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "at least one prompt"), ([[6, 7], []], "none empty"), ([[6] * 60], "no room for 80 new tokens")],
    ids=["no prompt", "an empty prompt", "long prompts"],
)
def test_prompts_that_give_no_two_contexts_are_refused(pair: Pair, prompts: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_profile(pair, prompts, depth=2, new_tokens=80, effort=Effort(repetitions=1))


def test_the_record_is_plain_json(profile: Profile) -> None:
    raw = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    assert Profile.from_dict(raw, "here") == profile
    assert CostTable(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw["low"].items()}) == profile.low
    assert dataclasses.replace(profile, facts={}) != profile


def test_plain_decoding_costs_the_same_in_a_profile_of_trees(pair: Pair, clock: list[float]) -> None:
    profile = measure_profile(pair, PROMPTS, depth=2, new_tokens=40, effort=Effort(repetitions=2), tree="2,1")
    for table in (profile.low, profile.high):
        assert table.tree_verify_s[0] == (0, table.verify_s[0])
        assert [count for count, _ in table.tree_verify_s] == sorted({count for count, _ in table.tree_verify_s})


def assert_costs_of_trees(profile: Profile) -> None:
    for table in (profile.low, profile.high):
        assert table.tree_verify(20)[1:] == pytest.approx([TARGET + ROW * (n + 1) for n in range(1, 21)], rel=1e-4)


def test_known_costs_of_trees_are_found_again(pair: Pair, clock: list[float]) -> None:
    assert_costs_of_trees(measure_profile(pair, PROMPTS, depth=DEPTH, new_tokens=60, effort=THRICE, tree="3,2,1,1"))


def test_whole_trees_are_timed_one_after_the_other(pair: Pair) -> None:
    """As a static tree is decoded: what comes again costs less than what comes now and then."""
    speculator = Speculator(pair, TreeScript(2, 4), Settings(0.0, 60, ignore_eos=True, tree="2,2"))
    again, total, wholes = [], 0, []
    for key in range(1, 9):
        sizes = [r.verified for r in speculator.generate(PROMPTS[0], key).rounds if not r.cut]
        again += [later == 6 for size, later in pairwise(sizes) if size == 6]
        total += len(sizes)
        wholes.append(sizes.count(6))
    assert all(a + b for a, b in pairwise(wholes)), "of any two texts in a row one has whole trees"
    assert all(is_full(key, 4 * (key - 1)) for key in (1, 2, 3)), "the first ones early, which may be all there are"
    assert len(again) / total > 0.1 and sum(again) / len(again) > 2 * len(again) / total


def test_trees_are_timed_in_the_minutes_of_chains(pair: Pair) -> None:
    """What is compared is one case: a case that is quiet rests while others are timed again."""
    run = CalibrationRun(pair, PROMPTS, depth=2, temperature=0.0, new_tokens=20, tree="2,1", batch=(2,))
    cases = run.cases()
    assert list(cases) == ["rounds", "batch 1", "batch 2"]
    assert {key.what for key in cases["rounds"](1)} >= {VERIFY, PLAIN, TREE_VERIFY}


def test_a_gpu_is_warmed_up_until_calls_are_played(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    run, numbers = CalibrationRun(pair, [[3, 4, 5]], depth=2, temperature=0.0, new_tokens=4), list[int]()
    recorded = set[int]()

    def rounds(number: int) -> dict[Any, Any]:
        numbers.append(number)
        Recorded.fresh += len(numbers) in recorded
        run._contexts[0].append(1.0)
        return {}

    monkeypatch.setattr(run, "_rounds", rounds)
    for run.on_host, recording, expected in (
        (True, {1, 2}, [0, 1]),
        (False, {1, 2, 3}, [0, 1, 2, 3, 1]),  # nothing is new in the fourth
        (False, {1, 3}, [0, 1, 1, 1]),  # and a timed one that records is timed again
    ):
        recorded = recording
        numbers.clear()
        run._contexts[0].clear()
        for number in (0, 1):
            run.cases()["rounds"](number)
        assert numbers == expected
        assert len(run._contexts[0]) == 1, "only timed texts count"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_budget_allows_for_the_warm_up(pair: Pair, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A GPU may warm up for longer, so its texts are shorter: 10 repetitions, and 2 or 12 before them."""
    probe = CalibrationRun(pair, [[3, 4, 5]], depth=2, temperature=0.0, new_tokens=8)
    probe.on_host, now = device == "cpu", [0.0]

    def play(number: int) -> None:
        now[0] += 4.0  # half a second a token

    monkeypatch.setattr(probe, "play", play)
    assert (
        _affordable_tokens(probe, 48, Effort(budget_s=264.0, fewest=10), lambda: now[0])
        == {"cpu": 44, "cuda": 24}[device]
    )
