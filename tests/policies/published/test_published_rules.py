"""Published rules on chains against the same rule in plain Python, and the random numbers of policies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_curve
from specstop.policies.contract import StopPolicy
from specstop.policies.counter_rng import keyed_normal, keyed_uniform, mix
from specstop.policies.fixed import Confidence
from specstop.policies.published.adaedl import AdaEDL
from specstop.policies.published.hugging_face import Heuristic, HeuristicTransient, Roc
from specstop.policies.published.kangaroo import MaxProb
from specstop.policies.published.online import Online
from specstop.policies.published.specdecpp import Product
from specstop.policies.published.svip import EntropyBound
from steps import draft_step, round_outcome

STREAMS, ROUNDS, DEPTH = 6, 40, 5


@dataclass(frozen=True)
class Round:
    """One round of one stream: scores and answers by depth of decision, and the outcome."""

    scores: list[float]
    answers: list[bool]
    verified: int
    accepted: int
    cut: bool


def play(policy: StopPolicy, low: float = 0.0, high: float = 1.0) -> list[list[Round]]:
    """Run chains with random scores and outcomes; return the rounds by stream."""
    rng = random.Random(0)
    state = policy.start(STREAMS, np.arange(STREAMS))
    played: list[list[Round]] = [[] for _ in range(STREAMS)]
    for _ in range(ROUNDS):
        active = [rng.random() > 0.1 for _ in range(STREAMS)]
        scores: list[list[float]] = [[] for _ in range(STREAMS)]
        answers: list[list[bool]] = [[] for _ in range(STREAMS)]
        alive = list(active)
        for depth in range(1, min(DEPTH, policy.max_depth)):
            values = [float(np.float32(rng.uniform(low, high))) if on else 0.0 for on in alive]
            mask = np.array(alive)[:, None]
            kept, state = policy.keep(draft_step(depth, np.array(values)[:, None, None], mask), state)
            assert not (kept & ~mask).any()
            for s in np.flatnonzero(alive).tolist():
                scores[s].append(values[s])
                answers[s].append(bool(kept[s, 0]))
                alive[s] = answers[s][-1]
        drafted = [sum(a) + 1 if on else 0 for a, on in zip(answers, active, strict=True)]
        accepted = [min(d, rng.randrange(DEPTH + 1)) for d in drafted]
        cut = [rng.random() < 0.1 for _ in range(STREAMS)]
        state = policy.observe(round_outcome(accepted, drafted, cut=cut, active=active), state)
        for s in np.flatnonzero(active).tolist():
            played[s].append(Round(scores[s], answers[s], drafted[s], accepted[s], cut[s]))
    share = np.mean([answer for rounds in played for r in rounds for answer in r.answers])
    assert 0.05 < share < 0.99, "the rule stops and continues"
    return played


@pytest.mark.parametrize(
    ("policy", "keeps", "low", "high"),
    [
        (EntropyBound(0.6), lambda h: math.sqrt(0.15 * h) <= 0.3, 0.0, 2.0),
        (MaxProb(0.75), lambda p: p >= 0.75, 0.0, 1.0),
        (Product(0.3), lambda logp: math.exp(logp) >= 0.3, -3.0, 0.0),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_score_is_compared_with_its_threshold(
    policy: StopPolicy, keeps: Callable[[float], bool], low: float, high: float
) -> None:
    for rounds in play(policy, low, high):
        for r in rounds:
            assert r.answers == [keeps(score) for score in r.scores]


@pytest.mark.parametrize("kind", [Heuristic, HeuristicTransient])
def test_the_heuristic_adds_two_or_subtracts_one(kind: type[HeuristicTransient]) -> None:
    played = play(kind(2, max_depth=DEPTH))
    for rounds in played:
        length = 2
        for r in rounds:
            assert r.verified == min(length, DEPTH - 1) or length == DEPTH
            if not r.cut:
                length = min(length + 2, DEPTH) if r.accepted == r.verified else max(1, length - 1)
    assert (kind().first_length, kind().up, kind().down, kind().max_depth) == (20, 2, 1, 20)
    assert (Heuristic.carries, HeuristicTransient.carries) == (True, False)


def test_adaedl_moves_its_level_with_the_acceptance_rate() -> None:
    played = play(AdaEDL(0.5, eps=0.3, alpha=0.65, max_depth=DEPTH), 0.0, 2.5)
    levels = set()
    for rounds in played:
        level, rate = 0.5, 0.0
        for r in rounds:
            assert r.answers == [1 - math.sqrt(0.2 * h) >= level for h in r.scores]
            if not r.cut:
                rate = 0.5 * rate + 0.5 * r.accepted / r.verified
                level = 0.9 * level + 0.1 * (level + 0.3 if rate <= 0.65 else level - 0.3)
                level = min(max(level, 0.0), 1.0)
                levels.add(level)
    assert min(levels) < 0.45 < 0.55 < max(levels)


def test_the_roc_threshold_is_that_of_hugging_face() -> None:
    """With the curve of scikit-learn."""
    played = play(Roc(max_depth=DEPTH + 1))
    thresholds = set()
    for rounds in played:
        threshold, probs, matches = 0.4, [], []
        for r in rounds:
            assert r.answers == [p >= threshold for p in r.scores]
            if r.cut:
                continue
            labels = [1] * r.accepted + [0] * (r.accepted < r.verified)
            count = min(len(labels), len(r.scores))
            probs += r.scores[:count]
            matches += labels[:count]
            if len(matches) > 5 and {0, 1} <= set(matches):
                fpr, tpr, levels = roc_curve(matches, probs)
                threshold = levels[np.argmin(fpr + 3 * (1 - tpr))]
                thresholds.add(threshold)
    assert len(thresholds) > 10


def test_equal_probabilities_are_one_point_of_the_curve() -> None:
    policy = Roc(samples=3, weight=1.0, max_depth=6)
    probs, labels = np.array([0.5, 0.5, 0.25, 0.75, 0.25], dtype=np.float32), [True, False, True, True, True]
    state = policy.start(1, np.zeros(1, dtype=np.int64))
    for scores in ((0.75, 0.5, 0.5), (0.25, 0.25)):
        for depth, prob in enumerate(scores, start=1):
            _, state = policy.keep(draft_step(depth, [[[prob]]]), state)
        state = policy.observe(round_outcome([2], [len(scores)]), state)
    fpr, tpr, levels = roc_curve(labels, probs)
    assert float(state[0][0]) == levels[np.argmin(fpr + (1 - tpr))]


def test_the_online_model_takes_one_newton_step_per_round() -> None:
    played = play(Online(0.3, prior=3.0, decay=0.9, max_depth=DEPTH), 0.02, 1.0)
    slopes = set()
    for rounds in played:
        weights, precision = np.array([1.0, 0.0]), 3.0 * np.eye(2)
        for r in rounds:
            odds = [math.log(p / (1 - p)) for p in np.clip(np.array(r.scores), 1e-3, 1 - 1e-3)]
            survival, answers = 1.0, []
            for z in odds:
                survival /= 1 + math.exp(-(weights[0] * z + weights[1]))
                answers.append(survival >= 0.3)
            assert r.answers == answers
            if r.cut:
                continue
            observed = [(z, j < r.accepted) for j, z in enumerate(odds) if j < min(r.accepted + 1, r.verified)]
            if not observed:
                continue
            precision *= 0.9
            gradient = np.zeros(2)
            for z, label in observed:
                basis = np.array([z, 1.0])
                p = 1 / (1 + math.exp(-weights @ basis))
                precision += p * (1 - p) * np.outer(basis, basis)
                gradient += (label - p) * basis
            weights = weights + np.linalg.solve(precision, gradient)
            slopes.add(round(float(weights[0]), 6))
    assert len(slopes) > 50


def test_the_online_model_converges_to_the_true_weights() -> None:
    """Accepted with probability sigmoid(0.5 z - 1)."""
    policy = Online(0.0, max_depth=3)
    rng = np.random.default_rng(0)
    state = policy.start(4, np.arange(4))
    for _ in range(1000):
        prob = (rng.random((4, 1, 1)) * 0.96 + 0.02).astype(np.float32)
        _, state = policy.keep(draft_step(1, prob), state)
        odds = np.log(prob[:, 0, 0] / (1.0 - prob[:, 0, 0]))
        accepted = rng.random(4) < 1.0 / (1.0 + np.exp(1.0 - 0.5 * odds))
        state = policy.observe(round_outcome(accepted.tolist(), [1] * 4), state)
    # Four standard errors of about 0.07.
    assert (np.abs(state[0][:, :2] - [0.5, -1.0]) < 0.3).all(), state[0]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_the_online_model_stays_bounded_for_equal_odds(decay: float) -> None:
    policy = Online(0.3, decay=decay, max_depth=3)
    state = policy.start(2, np.arange(2))
    for number in range(4000):
        accepted = [number % 2, number % 5 > 0] if number % 2000 < 1000 else [0, 1]
        _, state = policy.keep(draft_step(1, np.full((2, 1, 1), 0.9, dtype=np.float32)), state)
        state = policy.observe(round_outcome(accepted, [1, 1]), state)
        assert (np.abs(state[0][:, :2]) < 1000.0).all(), state[0]


def splitmix(value: int) -> int:
    mask = (1 << 64) - 1
    value &= mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)


def test_draws_depend_on_their_key_and_number_only() -> None:
    key, number = np.array([5, -7, 1 << 62]), np.array([0, 3, 99])
    drawn = keyed_uniform(key, number, 4)
    golden = 0x9E3779B97F4A7C15
    for s in range(3):
        row = splitmix(splitmix(int(number[s]) * golden + 1) ^ int(key[s]) & ((1 << 64) - 1))
        assert drawn[s].tolist() == [(splitmix(row + at * golden) >> 11) * 2.0**-53 for at in range(1, 5)]
    assert np.array_equal(keyed_uniform(key[1:2], number[1:2], 4), drawn[1:2])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_counters_are_mixed_alike_in_arrays_and_tensors(kind: Callable[[list[int]], Any]) -> None:
    values = [0, 1, -1, 12345, (1 << 63) - 1, -(1 << 63), 0x9E3779B97F4A7C15 - (1 << 64)]
    counters = kind(values)
    assert [v & ((1 << 64) - 1) for v in mix(counters).tolist()] == [splitmix(v) for v in values]
    assert counters.tolist() == values, "unchanged"


def test_normal_draws_are_normal() -> None:
    drawn = keyed_normal(np.arange(100), np.full(100, 7), 100).ravel()
    assert np.isfinite(drawn).all() and len(set(drawn.tolist())) == 10_000
    # Five standard errors of 0.01 and 0.007.
    assert abs(drawn.mean()) < 0.05
    assert abs(drawn.std(ddof=1) - 1.0) < 0.036


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.4, 0.75])
def test_a_value_at_the_threshold_is_compared_in_single_precision(threshold: float) -> None:
    at = np.float32(threshold)
    values = np.array([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(1))])[:, None, None]
    for policy in (Confidence(threshold), MaxProb(threshold), Roc(threshold)):
        kept, _ = policy.keep(draft_step(1, values), policy.start(3, np.zeros(3, dtype=np.int64)))
        assert kept[:, 0].tolist() == [False, True, True], policy.name
    kept, _ = EntropyBound(threshold).keep(draft_step(1, values), None)
    assert kept[:, 0].tolist() == [True, True, False]
