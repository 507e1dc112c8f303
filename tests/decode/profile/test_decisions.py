"""What a policy's decisions cost: timed in the loop, and without a model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conftest import VOCABULARY
from contract_policies import TEST_POLICIES
from known_costs import DEPTH, EXACT, PROMPTS, TICK, known_clock, ticking_clock
from specstop.decode.loop import Settings
from specstop.decode.models.pair import Pair
from specstop.decode.profile import add_decisions, loop_decisions, measure_decision, missing_decisions
from specstop.decode.profile.scripts import ChainScript
from specstop.decode.topology import parse_tree
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.measurements import Measurements, decision_prices
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy


@pytest.fixture
def clock(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return known_clock(pair, monkeypatch)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return ticking_clock(monkeypatch)


class OnTheClock(ChainScript):
    """Takes its time to decide, and to hear how a round went."""

    def __init__(self, depth: int, now: list[float]) -> None:
        super().__init__(depth)
        self.now = now

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.now[0] += 5e-5
        return super().keep(step, state)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        self.now[0] += 2e-4
        return super().observe(outcome, state)


def price(timed: Measurements, policy: StopPolicy) -> float:
    return decision_prices(timed.pooled)[policy.cost_name]


def test_a_decision_is_timed_without_a_model(ticking: list[float]) -> None:
    for policy in (
        Confidence(0.4),
        TEST_POLICIES["from-anchor"],
        TEST_POLICIES["trimming"],
        TEST_POLICIES["reads-history"],
        TEST_POLICIES["adaptive"],
    ):
        assert price(measure_decision(policy, VOCABULARY, 0.7), policy) == pytest.approx(4 * TICK / 3)
    slow = OnTheClock(DEPTH, ticking)
    assert price(measure_decision(slow, VOCABULARY, 0.7), slow) > 5e-5


@pytest.mark.usefixtures("ticking")
def test_without_a_model_a_round_is_priced_where_its_seconds_are_read(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced: list[int] = []
    monkeypatch.setattr(Profile, "round_seconds", lambda self, context, *rest: priced.append(1) or np.zeros(1))
    bandit = load_policy("bandit?arms=fixed:1,fixed:3,confidence:0.4")
    for policy, is_priced in ((TEST_POLICIES["reads-history"], False), (ChainScript(DEPTH), False), (bandit, True)):
        priced.clear()
        measure_decision(policy, VOCABULARY, 0.7, profile=profile)
        assert bool(priced) == is_priced, policy.name


class _FromDepth(StopPolicy):
    """Asked from a depth on, where its state begins, as a learned policy's does."""

    features, max_depth = ("top1",), 9

    def __init__(self, first: int) -> None:
        self.first = first

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        assert step.depth == self.first or state is not None
        return step.alive & (step.features[..., 0] > 0.1), 1.0


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_decision_is_timed_where_the_policy_is_first_asked(first: int) -> None:
    policy = _FromDepth(first)
    assert price(measure_decision(policy, VOCABULARY, 0.7), policy) == pytest.approx(4 * TICK / 3)


def test_only_missing_decisions_are_measured(profile: Profile) -> None:
    fixed = [FixedLength(k) for k in (0, 1, 9)]
    assert add_decisions(profile, [Confidence(0.9), *fixed], VOCABULARY) == profile
    more = add_decisions(profile, [*fixed, TEST_POLICIES["from-anchor"], Confidence(0.1)], VOCABULARY)
    assert set(more.decision_s) - set(profile.decision_s) == {"from-anchor"}
    assert more.decision_s["confidence"] == profile.decision_s["confidence"]
    assert more.same_costs(profile.to_dict())
    for policy in fixed:
        assert policy.first == policy.max_depth, "a fixed length is never asked"


def test_the_price_of_decisions_is_found_again(pair: Pair, clock: list[float]) -> None:
    policy = OnTheClock(DEPTH, clock)
    timed = loop_decisions(pair, [policy], PROMPTS, Settings(0.0, 40, DEPTH, ignore_eos=True))
    rounds = {key.counts[0]: len(seconds) for key, seconds in timed.pooled.items()}  # by number of decisions
    for key, seconds in timed.pooled.items():
        assert seconds == pytest.approx(2e-4 + 5e-5 * key.counts[0], abs=EXACT)
    total = sum(count * (2e-4 + 5e-5 * calls) for calls, count in rounds.items())
    decisions = sum(count * calls for calls, count in rounds.items())
    assert len(rounds) > 1 and price(timed, policy) == pytest.approx(total / decisions, abs=EXACT)


def test_one_count_of_decisions_is_priced_by_the_decision(pair: Pair, clock: list[float]) -> None:
    policy = OnTheClock(1, clock)
    found = price(loop_decisions(pair, [policy], PROMPTS, Settings(0.0, 40, 1, ignore_eos=True)), policy)
    assert found == pytest.approx(2.5e-4, abs=EXACT)


class _OfTrees(StopPolicy):
    """Notes what it is shown of a tree, and chooses nodes."""

    features, max_depth, first = ("top1",), 3, 1

    def __init__(self, now: list[float]) -> None:
        self.now, self.branches, self.nodes = now, [], []  # type: ignore[var-annotated]

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.branches.append(step.alive.shape[1])
        assert step.features.shape == (1, step.alive.shape[1], 1) and (step.features > 0.0).all()
        self.now[0] += 3e-5 * step.alive.shape[1]
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        self.nodes.append(int(tree.drawn.sum()))
        self.now[0] += 1e-3
        return tree.drawn


def test_decisions_about_trees_are_priced_in_rounds_of_the_tree(ticking: list[float]) -> None:
    policy = _OfTrees(ticking)
    found = price(measure_decision(policy, VOCABULARY, 0.7, tree=parse_tree("4,2,1")), policy)
    assert set(policy.branches) == {4, 8} and set(policy.nodes) == {4 + 8 + 8}
    # Two decisions read 4 and 8 branches, and nodes are chosen once.
    assert found == pytest.approx((3 * TICK + 3e-5 * 12 + 1e-3) / 2)
    chains = price(measure_decision(_OfTrees(ticking), VOCABULARY, 0.7), policy)
    assert chains < found


def test_a_policy_that_is_never_called_has_no_price(profile: Profile) -> None:
    load = load_policy("load?table=1:3,4:1")
    unpriced = dataclasses.replace(profile, decision_s={})
    assert list(missing_decisions(unpriced, [load, FixedLength(2), Confidence(0.4)])) == ["confidence"]
    assert add_decisions(profile, [load], VOCABULARY) == profile
