"""The price of a policy's decisions, timed in the loop and without a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCABULARY
from contract_policies import TEST_POLICIES
from known_costs import DEPTH, EXACT, PROMPTS, TICK, known_clock, ticking_clock
from specstop.decode.loop import Settings
from specstop.decode.models.pair import Pair
from specstop.decode.profile import add_decisions, decisions, loop_decisions, measure_decision, missing_decisions
from specstop.decode.profile.scripts import ChainScript
from specstop.decode.topology import parse_tree
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.errors import SpecstopWarning
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.measurements import Measurements, decision_prices
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return ticking_clock(monkeypatch)


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


class FromDepth(StopPolicy):
    """Is called from a depth on, where its state begins, like a learned policy."""

    features, max_depth = ("top1",), 9

    def __init__(self, first: int) -> None:
        self.first = first

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        assert step.depth == self.first or state is not None
        return step.alive & (step.features[..., 0] > 0.1), 1.0


class OfTrees(StopPolicy):
    """Records the sizes of what it is shown of a tree, and keeps all nodes."""

    features, max_depth, first = ("top1",), 3, 1

    def __init__(self, now: list[float]) -> None:
        self.now, self.branches, self.nodes = now, list[int](), list[int]()

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.branches.append(step.alive.shape[1])
        assert step.features.shape == (1, step.alive.shape[1], 1) and (step.features > 0.0).all()
        self.now[0] += 3e-5 * step.alive.shape[1]
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        self.nodes.append(int(tree.drawn.sum()))
        self.now[0] += 1e-3
        return tree.drawn


def price(timed: Measurements, policy: StopPolicy) -> float:
    return decision_prices(timed.pooled)[policy.cost_name]


def test_a_decision_is_timed_without_a_model(ticking: list[float]) -> None:
    names = ("from-anchor", "trimming", "reads-history", "adaptive")
    for policy in (Confidence(0.4), *(TEST_POLICIES[name] for name in names), *map(FromDepth, (0, 1, 3))):
        assert price(measure_decision(policy, VOCABULARY, 0.7), policy) == pytest.approx(4 * TICK / 3)
    slow = OnTheClock(DEPTH, ticking)
    assert price(measure_decision(slow, VOCABULARY, 0.7), slow) > 5e-5


def test_decisions_about_trees_are_timed_in_rounds_of_the_tree(ticking: list[float]) -> None:
    policy = OfTrees(ticking)
    seconds = price(measure_decision(policy, VOCABULARY, 0.7, tree=parse_tree("4,2,1")), policy)
    assert set(policy.branches) == {4, 8} and set(policy.nodes) == {4 + 8 + 8}
    # Two decisions read 4 and 8 branches, and nodes are selected once.
    assert seconds == pytest.approx((3 * TICK + 3e-5 * 12 + 1e-3) / 2)
    assert price(measure_decision(OfTrees(ticking), VOCABULARY, 0.7), policy) < seconds


@pytest.mark.usefixtures("ticking")
def test_a_simulated_round_is_priced_only_for_policies_that_read_seconds(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced: list[int] = []
    monkeypatch.setattr(Profile, "round_seconds", lambda self, context, *rest: priced.append(1) or np.zeros(1))
    bandit = load_policy("bandit?arms=fixed:1,fixed:3,confidence:0.4")
    for policy, is_priced in ((TEST_POLICIES["reads-history"], False), (ChainScript(DEPTH), False), (bandit, True)):
        priced.clear()
        measure_decision(policy, VOCABULARY, 0.7, profile=profile)
        assert bool(priced) == is_priced, policy.name


@pytest.mark.parametrize("depth", [DEPTH, 1])
def test_known_prices_of_decisions_are_recovered(pair: Pair, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    policy = OnTheClock(depth, known_clock(pair, monkeypatch))
    timed = loop_decisions(pair, [policy], PROMPTS, Settings(0.0, 40, depth, ignore_eos=True))
    rounds = {key.counts[0]: len(seconds) for key, seconds in timed.pooled.items()}  # by number of decisions
    for key, seconds in timed.pooled.items():
        assert seconds == pytest.approx(2e-4 + 5e-5 * key.counts[0], abs=EXACT)
    total = sum(count * (2e-4 + 5e-5 * calls) for calls, count in rounds.items())
    calls = sum(count * calls for calls, count in rounds.items())
    assert len(rounds) >= min(depth, 2) and price(timed, policy) == pytest.approx(total / calls, abs=EXACT)


def test_only_missing_decisions_are_measured(profile: Profile) -> None:
    never_called = [*(FixedLength(k) for k in (0, 1, 9)), load_policy("load?table=1:3,4:1")]
    assert add_decisions(profile, [Confidence(0.9), *never_called], VOCABULARY) == profile
    more = add_decisions(profile, [*never_called, TEST_POLICIES["from-anchor"], Confidence(0.1)], VOCABULARY)
    assert set(more.decision_s) - set(profile.decision_s) == {"from-anchor"}
    assert more.decision_s["confidence"] == profile.decision_s["confidence"]
    assert more.same_costs(profile.to_dict())
    unpriced = dataclasses.replace(profile, decision_s={})
    assert list(missing_decisions(unpriced, [*never_called, Confidence(0.4)])) == ["confidence"]


@pytest.mark.parametrize("is_available", [True, False])
def test_decisions_are_timed_on_the_device_of_the_profile(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, is_available: bool
) -> None:
    policy, devices = Confidence(0.3), list[torch.device]()

    def record(policy: object, vocabulary: int, temperature: float, device: torch.device, *rest: Any) -> Measurements:
        devices.append(device)
        return Measurements()

    monkeypatch.setattr(policy, "name", "unpriced")
    monkeypatch.setattr(decisions, "measure_decision", record)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * is_available)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: ("A100", "H100")[number])
    profile = dataclasses.replace(profile, facts={"device": "H100"})
    if is_available:
        add_decisions(profile, [policy], VOCABULARY)
    else:
        with pytest.warns(SpecstopWarning, match="H100"):
            add_decisions(profile, [policy], VOCABULARY)
    assert devices == [torch.device("cuda:1" if is_available else "cpu")]
