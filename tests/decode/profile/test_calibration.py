"""The latency profile: known costs on a simulated clock are recovered exactly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_policies import TEST_POLICIES
from known_costs import (
    DEPTH,
    DRAFT,
    DRAFT_TOKEN,
    EXACT,
    FURTHER,
    PROMPTS,
    ROUND,
    ROW,
    SECOND,
    STEP,
    STREAM,
    TARGET,
    known_batch_clock,
    known_clock,
    ticking_clock,
)
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.device import Recorded
from specstop.decode.models.pair import Pair
from specstop.decode.profile import CalibrationRun, measure_profile
from specstop.decode.profile.calibration import _affordable_tokens
from specstop.decode.profile.measuring import Effort
from specstop.decode.profile.scripts import TWICE, BatchScript, ChainScript, TreeScript, card_at, is_full
from specstop.policies.contract import DraftStep, RoundOutcome
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.measurements import PLAIN, TREE_VERIFY, VERIFY
from specstop.policies.profile import Profile

SIZES = (2, 3)


def measure(pair: Pair, repetitions: int = 2, **options: Any) -> Profile:
    options = {"depth": DEPTH, "new_tokens": 60, "progress": lambda *call: None, **options}
    return measure_profile(pair, options.pop("prompts", PROMPTS), effort=Effort(repetitions=repetitions), **options)


@pytest.fixture
def clock(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return known_clock(pair, monkeypatch)


@pytest.fixture(scope="module")
def known(pair: Pair) -> Profile:
    """The profile that is measured on the known clock."""
    with pytest.MonkeyPatch.context() as patch:
        known_clock(pair, patch)
        return measure(pair, tree="3,2,1,1")


def test_known_costs_are_recovered(known: Profile) -> None:
    for table in (known.low, known.high):
        assert table.draft_s == pytest.approx((DRAFT, DRAFT + SECOND), rel=EXACT)
        assert table.draft_token_s == pytest.approx(FURTHER, rel=1e-4)
        assert table.verify_s == pytest.approx([TARGET + ROW * (k + 1) for k in range(DEPTH + 1)], rel=EXACT)
        assert table.tree_verify_s[0] == (0, table.verify_s[0]), "plain decoding costs the same"
        assert table.tree_verify(20)[1:] == pytest.approx([TARGET + ROW * (n + 1) for n in range(1, 21)], rel=1e-4)
    assert known.step_s == pytest.approx(STEP, rel=1e-4)
    assert known.round_s == pytest.approx(ROUND + STEP, rel=1e-4)
    assert known.prefill_s == pytest.approx((TARGET + STEP, ROW), rel=1e-4)
    assert known.facts["spread"] == pytest.approx(0.0, abs=1e-9)
    assert 12 < known.low.context < known.high.context < 128


def test_rounds_cost_their_seconds(pair: Pair, known: Profile, clock: list[float]) -> None:
    """The predicted seconds of another run with a longer prompt equal the measured ones."""
    for policy in (FixedLength(3), TEST_POLICIES["trimming"].limited(DEPTH)):
        generation = Speculator(pair, policy, Settings(0.0, 40)).generate([*PROMPTS[3], *PROMPTS[1]], 5)
        for r in generation.rounds:
            row = [np.array([n]) for n in (r.context, r.drafted, r.verified, r.backlog, r.decisions)]
            assert known.round_seconds(*row, 0.0).item() == pytest.approx(r.seconds, rel=1e-4)


def test_longer_contexts_cost_more(pair: Pair, clock: list[float]) -> None:
    clock[1] = 2e-5
    profile = measure(pair, 4)
    span = profile.high.context - profile.low.context
    for low, high in zip(profile.low.verify_s, profile.high.verify_s, strict=True):
        assert high - low == pytest.approx(2e-5 * span, rel=0.5), "contexts vary by 60 tokens within a text"
    assert profile.low.draft_s == pytest.approx(profile.high.draft_s, rel=EXACT)


def test_a_depth_of_one(pair: Pair, clock: list[float]) -> None:
    profile = measure(pair, 1, depth=1, new_tokens=30)
    assert len(profile.low.verify_s) == 2
    assert profile.low.draft_s == pytest.approx((DRAFT, DRAFT + SECOND), rel=EXACT)


def test_short_prompts_take_the_price_of_a_backlog_from_the_long_context(pair: Pair, clock: list[float]) -> None:
    profile = measure(pair, prompts=[prompt[:3] for prompt in PROMPTS])
    assert (profile.low.draft_token_s, profile.high.draft_token_s) == pytest.approx((FURTHER, FURTHER), rel=1e-4)


def test_a_measured_profile_is_positive_and_survives_its_file(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticking_clock(monkeypatch)
    calls: list[tuple[str, int, int]] = []
    profile = measure(
        pair, 1, temperature=0.7, policies=[Confidence(0.3, DEPTH), TEST_POLICIES["trimming"]], new_tokens=30,
        facts={"device": "here"}, progress=lambda *call: calls.append(call),
    )  # fmt: skip
    for table in (profile.low, profile.high):
        assert len(table.verify_s) == DEPTH + 1 and min(*table.draft_s, *table.verify_s, table.context) > 0
        assert table.draft_token_s >= 0 and table.draft_s[1] >= table.draft_s[0]
    assert min(profile.step_s, profile.prefill_s[1]) >= 0 < profile.round_s
    assert set(profile.decision_s) == {"confidence", "trimming"} and min(profile.decision_s.values()) > 0
    assert (profile.max_depth, profile.temperature, profile.facts["device"]) == (DEPTH, 0.7, "here")
    assert profile.facts["rounds"] > 10
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert calls == [("profile", done, 6) for done in range(7)], "rounds and two policies, after a warm-up"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[6, 7], []]}, "none empty"),
        ({"prompts": [[6] * 60], "new_tokens": 80}, "no room"),
        ({"batch": (0, 2)}, "batch"),
    ],
)
def test_invalid_arguments_are_refused(pair: Pair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure(pair, 1, **{"depth": 2, **options})


def test_known_costs_of_batches_are_recovered(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_batch_clock(pair, monkeypatch)
    profile = measure(pair, batch=SIZES)
    costs = profile.batch
    assert costs is not None and costs.sizes == (1, *SIZES), "and single texts, with which batches end"
    drafting = np.array([1, 2, 3])
    for context in (costs.low.context, costs.high.context):
        for size in SIZES:
            tokens = np.array([count for count, _ in costs.low.verify_s[size]])
            assert tokens[0] == size and tokens[-1] == size * (1 + DEPTH)
            expected = TARGET + STREAM * size + ROW * tokens + ROUND
            assert profile.verify_s(size, tokens, context) == pytest.approx(expected, rel=EXACT)
        assert profile.draft_s(drafting, context) == pytest.approx(DRAFT + DRAFT_TOKEN * drafting, rel=EXACT)
        assert (profile.first_draft_s(drafting, context) >= profile.draft_s(drafting, context)).all(), "it reads more"
    profile.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded.batch == costs and loaded.noise == profile.noise
    resampled = loaded.resampled(np.random.default_rng(0)).batch
    assert resampled is not None
    assert dict(resampled.low.verify_s[3]) == pytest.approx(dict(costs.low.verify_s[3])), "all repetitions agree"


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_scripted_chains_have_every_length_equally_often(depth: int) -> None:
    """Each stream has its own order, and another one in each deck."""
    streams, decks = 4, 6
    policy, batch = ChainScript(depth), np.arange(4)
    alive, parent, empty = (
        np.ones((streams, 1), bool),
        np.zeros((streams, 1), int),
        np.zeros((streams, 1, 0), np.float32),
    )
    state = policy.start(streams, batch * 7919)
    lengths = []
    for _ in range(decks * (depth + 1) * TWICE):
        length = np.zeros(streams, dtype=np.int64)
        for j in range(depth):
            keep, state = policy.keep(DraftStep(j, alive, parent, empty, {}, batch), state)
            length += keep[:, 0]
        lengths.append(length.tolist())
        zero = np.zeros(streams, dtype=np.int64)
        state = policy.observe(RoundOutcome(alive[:, 0], length, length, zero, ~alive[:, 0], np.zeros(streams)), state)
    assert lengths[::TWICE] == lengths[1::TWICE], "each length comes twice in a row"
    by_deck = np.array(lengths[::TWICE]).reshape(decks, depth + 1, streams)
    assert (np.sort(by_deck, axis=1) == np.arange(depth + 1)[None, :, None]).all()
    if depth == 4:
        assert len({tuple(deck[:, 0]) for deck in by_deck}) > 3
        assert len({tuple(by_deck[:, :, stream].ravel()) for stream in range(streams)}) == streams


def test_scripted_batches_draft_every_length_in_the_order_of_their_tokens() -> None:
    script = BatchScript(3, DEPTH)
    deck = script.deck
    assert set(deck) == {(0, 0), *((r, n) for r in (1, 2, 3) for n in (1, 2, 3, 4))}
    assert [count * length for count, length in deck] == sorted(count * length for count, length in deck)
    assert set(BatchScript(1, 7).deck) == {(0, 0), *((1, n) for n in range(1, 8))}, "a single text drafts all lengths"
    assert max(n for _, n in BatchScript(8, 100).deck) == 100
    state, alive = script.start(3, np.full(3, 5)), np.ones((3, 1), dtype=bool)
    observed: set[tuple[int, int]] = set()
    for number in range(4 * len(deck)):  # up and down
        state = (state[0], np.full(3, number))
        lengths = np.zeros(3, dtype=int)
        for depth in range(DEPTH):
            empty = np.zeros((3, 1, 0), np.float32)
            lengths += script.keep(DraftStep(depth, alive, alive.astype(int), empty, {}, np.zeros(3, int)), state)[0][
                :, 0
            ]
        drafting = lengths[lengths > 0]
        assert len(set(drafting.tolist())) <= 1, "all streams that draft go equally deep"
        observed.add((len(drafting), int(lengths.max())))
    assert observed == set(deck)
    for key in (0, 1, 77):
        cards = [card_at(len(deck), key, number) for number in range(0, 8 * len(deck), TWICE)]
        assert all(card_at(len(deck), key, n + 1) == card_at(len(deck), key, n) for n in range(0, 40, TWICE)), "twice"
        assert {abs(a - b) for a, b in pairwise(cards)} == {1} and set(cards) == set(range(len(deck)))
    starts = Counter(card_at(len(deck), key, 0) for key in range(2 * (len(deck) - 1)))
    assert starts == {card: 1 if card in (0, len(deck) - 1) else 2 for card in range(len(deck))}
    assert card_at(1, 5, 3) == 0


def test_full_trees_are_timed_in_runs(pair: Pair) -> None:
    """As a static tree is decoded: a size that repeats costs less than one that comes now and then."""
    speculator = Speculator(pair, TreeScript(2, 4), Settings(0.0, 60, ignore_eos=True, tree="2,2"))
    repeats, total, full = [], 0, []
    for key in range(1, 9):
        sizes = [r.verified for r in speculator.generate(PROMPTS[0], key).rounds if not r.cut]
        repeats += [later == 6 for size, later in pairwise(sizes) if size == 6]
        total += len(sizes)
        full.append(sizes.count(6))
    assert all(a + b for a, b in pairwise(full)), "of any two texts in a row one has full trees"
    assert all(is_full(key, 4 * (key - 1)) for key in (1, 2, 3)), "the first texts have them early"
    assert len(repeats) / total > 0.1 and sum(repeats) / len(repeats) > 2 * len(repeats) / total


def test_trees_and_chains_are_timed_in_the_same_turn(pair: Pair) -> None:
    cases = CalibrationRun(pair, PROMPTS, depth=2, temperature=0.0, new_tokens=20, tree="2,1", batch=(2,)).cases()
    assert len(cases) == 3 and {key.what for key in cases["rounds"](1)} >= {VERIFY, PLAIN, TREE_VERIFY}


def test_a_gpu_is_warmed_up_until_no_call_is_recorded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (False, {1, 2, 3}, [0, 1, 2, 3, 1]),  # the fourth call records nothing
        (False, {1, 3}, [0, 1, 1, 1]),  # a timed call that records is repeated
    ):
        recorded = recording
        numbers.clear()
        run._contexts[0].clear()
        for number in (0, 1):
            run.cases()["rounds"](number)
        assert numbers == expected
        assert len(run._contexts[0]) == 1, "only timed texts count"


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 44), ("cuda", 24)])
def test_the_budget_includes_the_warm_up(pair: Pair, monkeypatch: pytest.MonkeyPatch, device: str, tokens: int) -> None:
    """A GPU may warm up for longer, so its texts are shorter: 10 repetitions after 2 or 12."""
    probe = CalibrationRun(pair, [[3, 4, 5]], depth=2, temperature=0.0, new_tokens=8)
    probe.on_host, now = device == "cpu", [0.0]

    def play(number: int) -> None:
        now[0] += 4.0  # half a second a token

    monkeypatch.setattr(probe, "play", play)
    assert _affordable_tokens(probe, 48, Effort(budget_s=264.0, fewest=10), lambda: now[0]) == tokens
