"""Latency profiles: known costs on simulated clocks are recovered exactly; decisions are timed with and without a model.

Measurements take turns, and clocks of noisy machines are recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simulated_machines as machines
import torch
from conftest import VOCABULARY
from contract_policies import TEST_POLICIES
from specstop.decode import Pair, Settings, Speculator, measure_profile
from specstop.decode.hooks import Timer
from specstop.decode.model_source import ModelSource
from specstop.decode.models.attention import Part
from specstop.decode.models.cache import CachedModel
from specstop.decode.profile import loop_decisions, measure_decision
from specstop.decode.profile.measuring import MIN_QUIET, Effort
from specstop.decode.profile.scripts import ChainScript
from specstop.decode.verify.sampler import Sampler
from specstop.policies import FixedLength, Profile
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.measurements import Measurements, decision_prices

Patch = pytest.MonkeyPatch

DEPTH, PROMPTS = 4, [[6 + (7 * i + j) % 40 for j in range(12)] for i in range(5)]
EXACT = 1e-6  # rounding of sums and differences near 1 s
STEP, ROUND, DRAFT, SECOND, FURTHER, TARGET, ROW = 3e-5, 2e-4, 1e-3, 3e-4, 2e-5, 4e-3, 1e-4
STREAM, DRAFT_TOKEN = 2e-4, 5e-5


def known_clock(pair: Pair, monkeypatch: Patch, streams: bool = False) -> list[float]:
    """Return the clock of single texts or batches."""
    now = [0.0]

    def timed(owner: Any, name: str, seconds: Callable[..., float]) -> None:
        method = getattr(owner, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            now[0] += seconds(self, *args)
            return method(self, *args, **options)

        monkeypatch.setattr(owner, name, call)

    def read(cache: CachedModel, tokens: torch.Tensor, *rest: Any) -> float:
        count = tokens.shape[1]
        if cache.original is pair.target:
            return TARGET + ROW * count
        return DRAFT + (SECOND if count > 1 else 0.0) + FURTHER * max(0, count - 2)

    def read_streams(cache: CachedModel, parts: Any, *rest: Any) -> float:
        parts = [parts] if isinstance(parts, Part) else parts
        tokens = sum(len(part.tokens) for part in parts)
        is_target = cache.original is pair.target
        return TARGET + STREAM * len(parts) + ROW * tokens if is_target else DRAFT + DRAFT_TOKEN * tokens

    monkeypatch.setattr(Timer, "now", lambda self: now[0])
    timed(ModelSource, "commit", lambda *args: ROUND)
    if streams:
        timed(CachedModel, "_read_packed", read_streams)
        timed(CachedModel, "_read_alone", read_streams)
    else:
        timed(CachedModel, "read", read)
        timed(Sampler, "__call__", lambda *args: STEP)
    return now


def measure(pair: Pair, repetitions: int = 2, **options: Any) -> Profile:
    options = {"depth": DEPTH, "new_tokens": 60, "progress": lambda *call: None, **options}
    return measure_profile(pair, options.pop("prompts", PROMPTS), effort=Effort(repetitions=repetitions), **options)


@pytest.fixture
def clock(pair, monkeypatch):
    return known_clock(pair, monkeypatch)


class OnTheClock(ChainScript):
    """Advances the clock with each decision and each outcome."""

    def __init__(self, depth: int, now: list[float]) -> None:
        super().__init__(depth)
        self.now = now

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.now[0] += 5e-5
        return super().keep(step, state)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        self.now[0] += 2e-4
        return super().observe(outcome, state)


@pytest.fixture(scope="module")
def calibrated(pair):
    """The profile that is measured on the known clock."""
    with Patch.context() as patch:
        known_clock(pair, patch)
        return measure(pair, tree="3,2,1,1")


def test_known_costs_are_recovered(calibrated):
    for table in (calibrated.low, calibrated.high):
        assert table.draft_s == pytest.approx((DRAFT, DRAFT + SECOND), rel=EXACT)
        assert table.draft_token_s == pytest.approx(FURTHER, rel=1e-4)
        assert table.verify_s == pytest.approx([TARGET + ROW * (k + 1) for k in range(DEPTH + 1)], rel=EXACT)
        assert table.tree_verify_s[0] == (0, table.verify_s[0]), "plain decoding costs the same"
        assert table.tree_verify(20)[1:] == pytest.approx([TARGET + ROW * (n + 1) for n in range(1, 21)], rel=1e-4)
        assert table.tree_draft(4)[[1, 4]] == pytest.approx([DRAFT, DRAFT + SECOND + 2 * FURTHER], rel=0.1), "a line"
    assert (calibrated.step_s, calibrated.round_s) == pytest.approx((STEP, ROUND + STEP), rel=1e-4)
    assert calibrated.prefill_s == pytest.approx((TARGET + STEP, ROW), rel=1e-4)
    assert calibrated.facts["spread"] == pytest.approx(0.0, abs=1e-9)
    assert 12 < calibrated.low.context < calibrated.high.context < 128


def test_predicted_seconds_of_rounds_equal_the_measured_ones(pair, calibrated, clock):
    for policy in (FixedLength(3), TEST_POLICIES["trimming"].limited(DEPTH)):
        generation = Speculator(pair, policy, Settings(0.0, 40)).generate([*PROMPTS[3], *PROMPTS[1]], 5)
        for r in generation.rounds:
            row = [np.array([n]) for n in (r.context, r.drafted, r.verified, r.backlog, r.decisions)]
            assert calibrated.round_seconds(*row, 0.0).item() == pytest.approx(r.seconds, rel=1e-4)


def test_known_costs_of_batches_are_recovered(pair, monkeypatch):
    known_clock(pair, monkeypatch, streams=True)
    profile = measure(pair, batch=(3,))
    costs = profile.batch
    assert costs is not None and costs.sizes == (1, 3), "and single texts, with which batches end"
    drafting = np.array([1, 2, 3])
    for context in (costs.low.context, costs.high.context):
        tokens = np.array([count for count, _ in costs.low.verify_s[3]])
        assert tokens[0] == 3 and tokens[-1] == 3 * (1 + DEPTH)
        expected = TARGET + STREAM * 3 + ROW * tokens + ROUND
        assert profile.verify_s(3, tokens, context) == pytest.approx(expected, rel=EXACT)
        assert profile.draft_s(drafting, context) == pytest.approx(DRAFT + DRAFT_TOKEN * drafting, rel=EXACT)
        assert (profile.first_draft_s(drafting, context) >= profile.draft_s(drafting, context)).all(), "it reads more"


# Turns, warm-up and budget


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("half the time a fifth slower, 6 s", "slowest repetition"), ("one slow second", "slowest repetition"),
        ("time slices of another process", "stalls"), ("jitter of a third", "quartiles"),
        ("slower by a third in 10 s", "slower"), ("faster by a quarter in 10 s", "faster"),
        *((kind, "") for kind in ("much jitter", "fast machine", "jitter, hiccups and wandering")),
    ],
)  # fmt: skip
def test_a_noisy_machine_is_reported_with_the_reason_and_a_quiet_one_is_not(kind, reason):
    noise, seconds = machines.profiled({**machines.NOISY, **machines.QUIET}[kind], seed=5, budget_s=15.0)
    assert noise.is_noisy == bool(reason) and reason in noise.text
    assert ("busy" if reason else "quiet") in noise.text
    if not reason:
        assert noise.repetitions == MIN_QUIET and seconds < 10.0


# Decisions


def price(timed: Measurements, policy: StopPolicy) -> float:
    return decision_prices(timed.pooled)[policy.cost_name]


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_decision_is_timed_without_a_model(clock, first):
    policy = OnTheClock(9, clock)
    policy.first = first
    assert price(measure_decision(policy, VOCABULARY, 0.7), policy) == pytest.approx(5e-5 + 2e-4 / 3, abs=EXACT)


@pytest.mark.parametrize("depth", [DEPTH, 1])
def test_known_prices_of_decisions_are_recovered(pair, clock, depth):
    policy = OnTheClock(depth, clock)
    timed = loop_decisions(pair, [policy], PROMPTS, Settings(0.0, 40, depth, ignore_eos=True))
    rounds, total, calls = 0, 0.0, 0
    for key, seconds in timed.pooled.items():  # by number of decisions
        assert seconds == pytest.approx(2e-4 + 5e-5 * key.counts[0], abs=EXACT)
        rounds, total, calls = rounds + 1, total + seconds.sum(), calls + len(seconds) * key.counts[0]
    assert rounds >= min(depth, 2) and price(timed, policy) == pytest.approx(total / calls, abs=EXACT)
