"""Rules that look at one score or at earlier rounds, against the same rule in plain Python."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from asking import ask, tell
from sklearn.metrics import roc_curve
from specstop.policies.contract import StopPolicy
from specstop.policies.counter_rng import keyed_normal, keyed_uniform, mix
from specstop.policies.errors import PolicyError
from specstop.policies.fixed import Confidence
from specstop.policies.host import take
from specstop.policies.published.adaedl import AdaEDL
from specstop.policies.published.bandit import Bandit
from specstop.policies.published.hugging_face import Heuristic, HeuristicTransient, Roc
from specstop.policies.published.kangaroo import MaxProb
from specstop.policies.published.online import Online
from specstop.policies.published.specdecpp import Product
from specstop.policies.published.svip import EntropyBound
from specstop.policies.registry import load_policy
from specstop.policies.testing import play as play_some

STREAMS, ROUNDS, DEPTH = 6, 40, 5
RULES = ("heuristic", "heuristic-transient", "roc", "entropy", "adaedl", "maxprob", "product", "online", "bandit", "ddd",
         "eagle", "opt", "c2t", "gain")  # fmt: skip


def state_arrays(state: Any) -> list[np.ndarray]:
    """Return the arrays of a state."""
    if state is None or isinstance(state, np.ndarray):
        return [] if state is None else [state]
    fields = state if isinstance(state, tuple) else [getattr(state, f.name) for f in dataclasses.fields(state)]
    return [array for part in fields for array in state_arrays(part)]


@dataclass(frozen=True)
class Round:
    """What one stream was asked in a round (a score for each depth that was reached), what it said, and how it went."""

    scores: list[float]
    answers: list[bool]
    verified: int
    accepted: int
    cut: bool


def play(policy: StopPolicy, low: float = 0.0, high: float = 1.0, seed: int = 0) -> list[list[Round]]:
    """Run chains with made-up scores and outcomes; return the rounds by stream."""
    dice = random.Random(seed)
    state = policy.start(STREAMS, np.arange(STREAMS))
    played: list[list[Round]] = [[] for _ in range(STREAMS)]
    for _ in range(ROUNDS):
        alive = [dice.random() > 0.1 for _ in range(STREAMS)]
        scores: list[list[float]] = [[] for _ in range(STREAMS)]
        answers: list[list[bool]] = [[] for _ in range(STREAMS)]
        going = list(alive)
        for depth in range(1, min(DEPTH, policy.max_depth)):
            values = [float(np.float32(dice.uniform(low, high))) if on else 0.0 for on in going]
            mask = np.array(going)[:, None]
            kept, state = policy.keep(ask(depth, np.array(values)[:, None, None], mask), state)
            assert not (kept & ~mask).any()
            for s in range(STREAMS):
                if going[s]:
                    scores[s].append(values[s])
                    answers[s].append(bool(kept[s, 0]))
                    going[s] = answers[s][-1]
        drafted = [sum(a) + 1 if on else 0 for a, on in zip(answers, alive, strict=True)]
        accepted = [min(d, dice.randrange(DEPTH + 1)) for d in drafted]
        cut = [dice.random() < 0.1 for _ in range(STREAMS)]
        state = policy.observe(tell(accepted, drafted, cut=cut, active=alive), state)
        for s in range(STREAMS):
            if alive[s]:
                played[s].append(Round(scores[s], answers[s], drafted[s], accepted[s], cut[s]))
    return played


def stops_and_goes(played: Sequence[Sequence[Round]]) -> None:
    said = [answer for rounds in played for r in rounds for answer in r.answers]
    assert 0.05 < sum(said) / len(said) < 0.99, "the case does not tell the rule from another"


@pytest.mark.parametrize(
    ("policy", "keeps", "low", "high"),
    [
        (EntropyBound(0.6), lambda h: math.sqrt(0.15 * h) <= 0.3, 0.0, 2.0),
        (MaxProb(0.6), lambda p: p >= 0.6, 0.0, 1.0),
        (MaxProb(0.75), lambda p: p >= 0.75, 0.0, 1.0),
        (Product(0.3), lambda logp: math.exp(logp) >= 0.3, -3.0, 0.0),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_score_is_compared_with_its_level(policy: StopPolicy, keeps: object, low: float, high: float) -> None:
    played = play(policy, low, high)
    stops_and_goes(played)
    for rounds in played:
        for r in rounds:
            assert r.answers == [keeps(score) for score in r.scores]  # type: ignore[operator]


@pytest.mark.parametrize("kind", [Heuristic, HeuristicTransient])
def test_the_heuristic_adds_two_or_takes_one(kind: type[HeuristicTransient]) -> None:
    played = play(kind(2, max_depth=DEPTH))
    stops_and_goes(played)
    for rounds in played:
        length = 2
        for r in rounds:
            assert r.verified == min(length, DEPTH - 1) or length == DEPTH
            if not r.cut:
                length = min(length + 2, DEPTH) if r.accepted == r.verified else max(1, length - 1)
    assert (kind().first_length, kind().up, kind().down, kind().max_depth) == (20, 2, 1, 20)
    assert (Heuristic.carries, HeuristicTransient.carries) == (True, False)


def test_adaedl_moves_its_level_with_the_share_accepted() -> None:
    played = play(AdaEDL(0.5, eps=0.3, alpha=0.65, max_depth=DEPTH), 0.0, 2.5)
    stops_and_goes(played)
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
    policy = AdaEDL()
    assert (policy.gamma, *policy._constants[:4]) == (0.2, 0.9, 0.01, 0.5, 0.9)


def test_the_roc_threshold_is_that_of_hugging_face() -> None:
    """Its update, with scikit-learn's curve."""
    played = play(Roc(max_depth=DEPTH + 1))
    stops_and_goes(played)
    thresholds = set()
    for rounds in played:
        threshold, probs, matches = 0.4, [], []
        for r in rounds:
            assert r.answers == [p >= threshold for p in r.scores]
            if r.cut:
                continue
            labels = [1] * r.accepted + [0] * (r.accepted < r.verified)
            seen = min(len(labels), len(r.scores))
            probs += r.scores[:seen]
            matches += labels[:seen]
            if len(matches) > 5 and {0, 1} <= set(matches):
                fpr, tpr, found = roc_curve(matches, probs)
                threshold = found[np.argmin(fpr + 3 * (1 - tpr))]
                thresholds.add(threshold)
    assert len(thresholds) > 10


def test_equal_probabilities_are_one_point_of_the_curve() -> None:
    policy = Roc(samples=3, weight=1.0, max_depth=6)
    probs, labels = np.array([0.5, 0.5, 0.25, 0.75, 0.25], dtype=np.float32), [True, False, True, True, True]
    state = policy.start(1, np.zeros(1, dtype=np.int64))
    # Three rounds: two accepted and one refused at 0.5, then the others.
    for asked, accepted in (((0.75, 0.5, 0.5), 2), ((0.25, 0.25), 2)):
        for depth, prob in enumerate(asked, start=1):
            _, state = policy.keep(ask(depth, [[[prob]]]), state)
        state = policy.observe(tell([accepted], [len(asked)]), state)
    fpr, tpr, found = roc_curve(labels, probs)
    assert float(state[0][0]) == found[np.argmin(fpr + (1 - tpr))]
    assert state[2][0, :5, 0].tolist() == sorted(probs.tolist(), reverse=True)


def test_the_online_model_takes_a_newton_step_a_round() -> None:
    played = play(Online(0.3, prior=3.0, decay=0.9, max_depth=DEPTH), 0.02, 1.0)
    stops_and_goes(played)
    slopes = set()
    for rounds in played:
        weights, precision = np.array([1.0, 0.0]), 3.0 * np.eye(2)
        for r in rounds:
            odds = [math.log(p / (1 - p)) for p in np.clip(np.array(r.scores), 1e-3, 1 - 1e-3)]
            survival, said = 1.0, []
            for z in odds:
                survival /= 1 + math.exp(-(weights[0] * z + weights[1]))
                said.append(survival >= 0.3)
            assert r.answers == said
            if r.cut:
                continue
            seen = [(z, j < r.accepted) for j, z in enumerate(odds) if j < min(r.accepted + 1, r.verified)]
            if not seen:
                continue
            precision *= 0.9
            gradient = np.zeros(2)
            for z, label in seen:
                basis = np.array([z, 1.0])
                p = 1 / (1 + math.exp(-weights @ basis))
                precision += p * (1 - p) * np.outer(basis, basis)
                gradient += (label - p) * basis
            weights = weights + np.linalg.solve(precision, gradient)
            slopes.add(round(float(weights[0]), 6))
    assert len(slopes) > 50


def test_the_online_model_learns_what_is_true() -> None:
    """Accepted with probability sigmoid(0.5 z - 1): the weights come near after a thousand tokens."""
    policy = Online(0.0, max_depth=3)
    dice = np.random.default_rng(0)
    state = policy.start(4, np.arange(4))
    for _ in range(1000):
        prob = (dice.random((4, 1, 1)) * 0.96 + 0.02).astype(np.float32)
        _, state = policy.keep(ask(1, prob), state)
        odds = np.log(prob[:, 0, 0] / (1.0 - prob[:, 0, 0]))
        accepted = dice.random(4) < 1.0 / (1.0 + np.exp(1.0 - 0.5 * odds))
        state = policy.observe(tell(accepted.tolist(), [1] * 4), state)
    # Standard errors of about 0.07 after 1,000 samples, some of them half forgotten: four of them.
    assert (np.abs(state[0][:, :2] - [0.5, -1.0]) < 0.3).all(), state[0]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("name", [*RULES, "bandit?kind=thompson&arms=heuristic:2,roc?samples=2,online,adaedl"])
def test_states_and_answers_have_the_same_bits_whatever_the_number_of_streams(name: str, branches: int) -> None:
    policy = load_policy(name)
    answers, state = play_some(policy, range(60), branches)
    for some in ([0], [13], [59], list(range(3, 10))):
        said, alone = play_some(policy, some, branches)
        assert all(np.array_equal(one, all_[some]) for one, all_ in zip(said, answers, strict=True))
        ours_of_them = take(state, np.array(some))
        if isinstance(
            policy, Bandit
        ):  # an arm that decides none of these streams is asked nothing where they are alone
            alone, ours_of_them = (replace(known, arms=()) for known in (alone, ours_of_them))
        for one, ours in zip(state_arrays(alone), state_arrays(ours_of_them), strict=True):
            if one.ndim > 1:  # memories are as wide as the longest of them
                width = min(one.shape[1], ours.shape[1])
                one, ours = one[:, :width], ours[:, :width]
            assert one.dtype == ours.dtype and one.tobytes() == ours.tobytes()


@pytest.mark.parametrize(
    ("spec", "name", "depth"),
    [
        ("heuristic", "heuristic:20", 20),
        ("heuristic?start=5&up=1", "heuristic:5", 20),
        ("roc", "roc:0.4", 20),
        ("entropy:0.8", "entropy:0.8", 40),
        ("entropy", "entropy:0.6", 40),
        ("adaedl", "adaedl:0.6", 20),
        ("maxprob:0.75?max_depth=16", "maxprob:0.75", 16),
        ("maxprob", "maxprob:0.6", 6),
        ("product:0.3", "product:0.3", 20),
        ("online?threshold=0.5&prior=5", "online:0.5", 20),
        ("ddd:-0.7?every=1", "ddd:-0.7", 11),
        ("eagle:30?top=4&max_depth=6", "eagle:30", 6),
        ("opt", "opt:0.5", 10),
        ("c2t:3", "c2t:3", 20),
        ("gain?row=0.01&step=0.2", "gain:0.2", 20),
        ("bandit?kind=thompson&arms=fixed:2,confidence:0.3", "bandit:thompson", 20),
        ("bandit:0.5", "bandit:ucb", 40),
    ],
)
def test_a_rule_is_made_by_its_name(spec: str, name: str, depth: int) -> None:
    policy = load_policy(spec)
    assert (policy.name, policy.max_depth) == (name, depth)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("heuristic:0", "heuristic: start: expected a whole number of 1 or more, not 0"),
        ("heuristic?up=-1", "up: expected a number of 0 or more"),
        ("fixed?length=True", "fixed: length: expected a whole number of 0 or more, not 'True'"),
        ("confidence?threshold=some", "confidence: threshold: expected a number between 0 and 1, not 'some'"),
        ("confidence?max_depth=0", "confidence: max_depth: expected a whole number of 1 or more, not 0"),
        ("roc:1.5", "roc: threshold: expected a number between 0 and 1, not 1.5"),
        ("roc?samples=2.5", "whole number"),
        ("entropy:-1", "entropy: level: expected a number of 0 or more"),
        ("entropy:nan", "level: expected a number"),
        ("adaedl?gamma=0", "adaedl: gamma: expected"),
        ("maxprob?max_depth=0", "maxprob: max_depth: expected"),
        ("product:0", "product: threshold: expected"),
        ("online?prior=0", "online: prior: expected"),
        ("ddd:1", "ddd: threshold: expected a number between -100 and 0"),
        ("eagle:0", "eagle: nodes: expected"),
        ("opt?top=x", "opt: top: expected"),
        ("c2t?entropy=much", "c2t: entropy: expected"),
        ("gain?verify=-1", "gain: verify: expected"),
        ("bandit?kind=best", "expected for kind one of ucb, thompson, not 'best'"),
        ("bandit?arms=,", "expected one arm"),
        ("bandit?arms=fixed:2,c2t", "the arm c2t:2 trims, selects"),
        ("bandit?arms=eagle", "the arm eagle:59 trims, selects"),
        ("bandit?arms=fixd:2", "did you mean 'fixed'"),
    ],
)
def test_a_wrong_parameter_is_told(spec: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(spec)


def splitmix(value: int) -> int:
    """The finaliser in scalars."""
    mask = (1 << 64) - 1
    value &= mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)


def test_draws_depend_on_their_key_and_number_alone() -> None:
    key, number = np.array([5, -7, 1 << 62]), np.array([0, 3, 99])
    drawn = keyed_uniform(key, number, 4)
    golden = 0x9E3779B97F4A7C15
    for s in range(3):
        row = splitmix(splitmix(int(number[s]) * golden + 1) ^ int(key[s]) & ((1 << 64) - 1))
        assert drawn[s].tolist() == [(splitmix(row + at * golden) >> 11) * 2.0**-53 for at in range(1, 5)]
    assert np.array_equal(keyed_uniform(key[1:2], number[1:2], 4), drawn[1:2])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_counters_are_scrambled_alike_in_arrays_and_tensors(kind: Callable[[list[int]], Any]) -> None:
    values = [0, 1, -1, 12345, (1 << 63) - 1, -(1 << 63), 0x9E3779B97F4A7C15 - (1 << 64)]
    given = kind(values)
    assert [v & ((1 << 64) - 1) for v in mix(given).tolist()] == [splitmix(v) for v in values]
    assert given.tolist() == values, "mix() leaves what it is given"


def test_normal_draws_are_normal() -> None:
    drawn = keyed_normal(np.arange(100), np.full(100, 7), 100).ravel()
    assert np.isfinite(drawn).all() and len(set(drawn.tolist())) == 10_000
    # 10,000 draws: standard errors 0.01 and 0.007; five of them.
    assert abs(drawn.mean()) < 0.05
    assert abs(drawn.std(ddof=1) - 1.0) < 0.036


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.4, 0.75])
def test_a_value_at_the_threshold_is_compared_in_single_precision(threshold: float) -> None:
    at = np.float32(threshold)
    values = np.array([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(1))])[:, None, None]
    for policy in (Confidence(threshold), MaxProb(threshold), Roc(threshold)):
        kept, _ = policy.keep(ask(1, values), policy.start(3, np.zeros(3, dtype=np.int64)))
        assert kept[:, 0].tolist() == [False, True, True], policy.name
    kept, _ = EntropyBound(threshold).keep(ask(1, values), None)
    assert kept[:, 0].tolist() == [True, True, False]
