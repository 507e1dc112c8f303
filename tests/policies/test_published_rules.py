"""Published rules on chains and trees, and the bandit, against the same rules in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from sklearn.metrics import roc_curve
from specstop.policies.contract import DraftTree, StopPolicy
from specstop.policies.fixed import FixedLength
from specstop.policies.published.adaedl import AdaEDL
from specstop.policies.published.bandit import Bandit
from specstop.policies.published.c2t import C2T
from specstop.policies.published.ddd import DDD
from specstop.policies.published.eagle import Eagle, OptTree
from specstop.policies.published.hugging_face import Heuristic, HeuristicTransient, Roc
from specstop.policies.published.kangaroo import MaxProb
from specstop.policies.published.online import Online
from specstop.policies.published.specdecpp import Product
from specstop.policies.published.svip import EntropyBound
from specstop.policies.tree_rules import UNSEEN
from steps import draft_step, round_outcome

STREAMS, ROUNDS, DEPTH = 6, 40, 5


@dataclass(frozen=True)
class ChainRound:
    """One round of one stream: scores and answers by depth of decision, and the outcome."""

    scores: list[float]
    answers: list[bool]
    verified: int
    accepted: int
    cut: bool


def play_chains(policy: StopPolicy, low: float = 0.0, high: float = 1.0, digits: int = 9) -> list[list[ChainRound]]:
    """Run chains with random scores and outcomes; return the rounds by stream."""
    rng = random.Random(0)
    state = policy.start(STREAMS, np.arange(STREAMS))
    played: list[list[ChainRound]] = [[] for _ in range(STREAMS)]
    for _ in range(ROUNDS):
        active = [rng.random() > 0.1 for _ in range(STREAMS)]
        scores: list[list[float]] = [[] for _ in range(STREAMS)]
        answers: list[list[bool]] = [[] for _ in range(STREAMS)]
        alive = list(active)
        for depth in range(1, min(DEPTH, policy.max_depth)):
            values = [float(np.float32(round(rng.uniform(low, high), digits))) if on else 0.0 for on in alive]
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
            played[s].append(ChainRound(scores[s], answers[s], drafted[s], accepted[s], cut[s]))
    share = np.mean([answer for rounds in played for r in rounds for answer in r.answers])
    assert 0.05 < share < 0.99, "the rule stops and continues"
    return played


Answers = Iterator[list[bool]]
"""Of one stream, by round: what the rule in plain Python answers."""


def threshold(keeps: Callable[[float], bool]) -> Callable[[list[ChainRound]], Answers]:
    return lambda rounds: ([keeps(score) for score in r.scores] for r in rounds)


def heuristic(rounds: list[ChainRound]) -> Answers:
    length = 2
    for r in rounds:
        yield [depth < length for depth in range(1, len(r.scores) + 1)]
        if not r.cut:
            length = min(length + 2, DEPTH) if r.accepted == r.verified else max(1, length - 1)


def adaedl(rounds: list[ChainRound]) -> Answers:
    level, rate = 0.5, 0.0
    for r in rounds:
        yield [1 - math.sqrt(0.2 * h) >= level for h in r.scores]
        if not r.cut:
            rate = 0.5 * rate + 0.5 * r.accepted / r.verified
            level = 0.9 * level + 0.1 * (level + 0.3 if rate <= 0.65 else level - 0.3)
            level = min(max(level, 0.0), 1.0)


def roc(rounds: list[ChainRound]) -> Answers:
    """Hugging Face's, with the curve of scikit-learn."""
    limit, probs, matches = 0.4, list[float](), list[int]()
    for r in rounds:
        yield [p >= limit for p in r.scores]
        if not r.cut:
            labels = [1] * r.accepted + [0] * (r.accepted < r.verified)
            count = min(len(labels), len(r.scores))
            probs += r.scores[:count]
            matches += labels[:count]
            if len(matches) > 5 and {0, 1} <= set(matches):
                fpr, tpr, levels = roc_curve(matches, probs)
                limit = levels[np.argmin(fpr + 3 * (1 - tpr))]


def online(rounds: list[ChainRound]) -> Answers:
    """One Newton step of a logistic regression per round."""
    weights, precision = np.array([1.0, 0.0]), 3.0 * np.eye(2)
    for r in rounds:
        odds = [math.log(p / (1 - p)) for p in np.clip(np.array(r.scores), 1e-3, 1 - 1e-3)]
        survival = np.cumprod([1 / (1 + math.exp(-(weights[0] * z + weights[1]))) for z in odds])
        yield (survival >= 0.3).tolist()
        observed = [] if r.cut else odds[: min(r.accepted + 1, r.verified)]
        precision *= 0.9 if observed else 1.0
        gradient = np.zeros(2)
        for j, z in enumerate(observed):
            basis = np.array([z, 1.0])
            p = 1 / (1 + math.exp(-weights @ basis))
            precision += p * (1 - p) * np.outer(basis, basis)
            gradient += ((j < r.accepted) - p) * basis
        weights = weights + np.linalg.solve(precision, gradient)


RULES: list[
    tuple[StopPolicy, Callable[[list[ChainRound]], Answers], float, float, int]
] = [  # range and digits of the scores
    (EntropyBound(0.6), threshold(lambda h: math.sqrt(0.15 * h) <= 0.3), 0.0, 2.0, 9),
    (MaxProb(0.75), threshold(lambda p: p >= 0.75), 0.0, 1.0, 9),
    (Product(0.3), threshold(lambda logp: math.exp(logp) >= 0.3), -3.0, 0.0, 9),
    (Heuristic(2, max_depth=DEPTH), heuristic, 0.0, 1.0, 9),
    (HeuristicTransient(2, max_depth=DEPTH), heuristic, 0.0, 1.0, 9),
    (AdaEDL(0.5, eps=0.3, alpha=0.65, max_depth=DEPTH), adaedl, 0.0, 2.5, 9),
    (Roc(max_depth=DEPTH + 1), roc, 0.0, 1.0, 9),
    (Roc(max_depth=DEPTH + 1), roc, 0.0, 1.0, 1),  # equal probabilities are one point of the curve
    (Online(0.3, prior=3.0, decay=0.9, max_depth=DEPTH), online, 0.02, 1.0, 9),
]


@pytest.mark.parametrize(("policy", "reference", "low", "high", "digits"), RULES)
def test_a_rule_on_chains_answers_as_the_plain_rule(policy, reference, low, high, digits):
    for rounds in play_chains(policy, low, high, digits):
        assert [r.answers for r in rounds] == list(reference(rounds))


# Trees

PARENTS = (-1, -1, -1, 0, 0, 1, 2, 3, 3, 4, 5, 5, 7, 8, 9, 10)
"""Levels of 3, 4, 5 and 4 nodes."""

DEPTHS: list[int] = []
for _parent in PARENTS:
    DEPTHS.append(1 if _parent < 0 else DEPTHS[_parent] + 1)
LEVELS = [[n for n, d in enumerate(DEPTHS) if d == depth] for depth in (1, 2, 3, 4)]


@dataclass
class TreeRound:
    """One round of one stream.

    Attributes:
        values: log-probability of the path of each node.
        entropy: of each node's distribution.
        kept: nodes kept, by depth of decision.
        drawn: nodes.
        selected: nodes to verify.
    """

    values: dict[int, float] = field(default_factory=dict)
    entropy: dict[int, float] = field(default_factory=dict)
    kept: dict[int, set[int]] = field(default_factory=dict)
    drawn: set[int] = field(default_factory=lambda: set(LEVELS[0]))
    selected: set[int] = field(default_factory=set)

    def level(self, depth: int) -> list[int]:
        return [n for n in LEVELS[depth - 1] if n in self.drawn]


def grow(policy: StopPolicy, streams: int = 8, seed: int = 0) -> list[TreeRound]:
    """Let a policy grow trees with random probabilities; return one round of each stream."""
    rng = random.Random(seed)
    played = [TreeRound() for _ in range(streams)]
    for one in played:
        for node, parent in enumerate(PARENTS):
            inherited = one.values[parent] if parent >= 0 else 0.0
            one.values[node] = inherited + math.log(rng.choice([0.9, 0.6, 0.3, 0.1]) * rng.uniform(0.9, 1.0))
            one.entropy[node] = rng.uniform(0.0, 3.0)
    state = policy.start(streams, np.arange(streams))
    columns = {"path_logprob": "values", "entropy": "entropy"}
    for depth in range(1, min(len(LEVELS), policy.max_depth)):
        level = LEVELS[depth - 1]
        alive = np.array([[n in one.drawn for n in level] for one in played])
        if not alive.any():
            break
        rows = [
            [[float(depth) if f == "depth" else getattr(one, columns[f])[n] for f in policy.features] for n in level]
            for one in played
        ]
        first = LEVELS[depth - 2][0] if depth > 1 else 0
        parent = np.tile([PARENTS[n] - first if depth > 1 else 0 for n in level], (streams, 1))
        kept, state = policy.keep(draft_step(depth, np.where(alive[..., None], rows, 0.0), alive, parent), state)
        for s, one in enumerate(played):
            one.kept[depth] = {n for at, n in enumerate(level) if kept[s, at]}
            assert one.kept[depth] <= one.drawn
            one.drawn |= {n for n in LEVELS[depth] if PARENTS[n] in one.kept[depth]}
    drawn = np.array([[n in one.drawn for n in range(len(PARENTS))] for one in played])
    shape = tuple(np.tile(values, (streams, 1)) for values in (PARENTS, DEPTHS))
    mask = policy.select(DraftTree(np.where(drawn, 7, -1), *shape, drawn), state)
    for s, one in enumerate(played):
        one.selected = one.drawn if mask is None else {n for n in range(len(PARENTS)) if mask[s, n]}
        assert all(PARENTS[n] < 0 or PARENTS[n] in one.selected for n in one.selected), "closed under parents"
    return played


def valued(one: TreeRound) -> dict[int, float]:
    """Return the values of the drawn nodes, estimated at depths without a decision."""
    estimate: dict[int, float] = {}
    for node in sorted(one.drawn):
        parent = PARENTS[node]
        if DEPTHS[node] in one.kept:
            estimate[node] = one.values[node]
        else:
            better = sum(PARENTS[n] == parent for n in range(node))
            estimate[node] = (estimate[parent] if parent >= 0 else 0.0) + (1 + better) * math.log(UNSEEN)
    return estimate


def best(values: dict[int, float], count: int) -> set[int]:
    return set(sorted(values, key=lambda n: (-values[n], n))[:count])


@pytest.mark.parametrize(("nodes", "top"), [(5, 2), (7, 1), (59, 10), (3, 3)])
def test_eagle_keeps_the_best_branches_and_sends_the_best_nodes(nodes, top):
    for one in grow(Eagle(nodes, top)):
        for depth, kept in one.kept.items():
            assert kept == best({n: one.values[n] for n in one.level(depth)}, top)
        assert one.selected == best(valued(one), nodes)


@pytest.mark.parametrize(("delta", "nodes"), [(0.3, 60), (0.8, 60), (0.2, 4)])
def test_opt_tree_continues_while_the_expected_length_grows(delta, nodes):
    continued = []
    for one in grow(OptTree(delta, nodes), streams=16):
        expected, chances = [0.0], {}
        for depth, kept in one.kept.items():
            level = one.level(depth)
            chances |= {n: math.exp(one.values[n]) for n in level}
            expected.append(sum(sorted(chances.values(), reverse=True)[:nodes]))
            goes = bool(level) and expected[-1] - expected[-2] > delta
            continued.append(goes)
            assert kept == (set(level) if goes else set())
        assert one.selected == best(valued(one), nodes)
    assert 0 < sum(continued) < len(continued)


@pytest.mark.parametrize(("begin", "every", "width"), [(1, 1, 10), (2, 1, 2), (1, 2, 3)])
def test_ddd_continues_while_the_beam_has_enough_mass(begin, every, width):
    continued = []
    for one in grow(DDD(-0.7, begin, every, width), streams=16):
        for depth, kept in one.kept.items():
            beam = best({n: one.values[n] for n in one.level(depth)}, width)
            decides = depth >= begin and (depth - begin) % every == 0
            if decides and beam:
                continued.append(math.log(sum(math.exp(one.values[n]) for n in beam)) >= -0.7)
            assert kept == (beam if not decides or (beam and continued[-1]) else set())
    assert 0 < sum(continued) < len(continued)


def test_c2t_prunes_by_probability_entropy_and_depth():
    answers = []
    for one in grow(C2T(2.0, 0.3, 0.2)):
        for depth, kept in one.kept.items():
            for n in one.level(depth):
                chance = 1 / (1 + math.exp(-(one.values[n] - 0.3 * one.entropy[n] - 0.2 * depth + 2.0)))
                answers.append(chance >= 0.5)
                assert (n in kept) == answers[-1]
    assert 0.1 < sum(answers) / len(answers) < 0.9
    assert C2T.trims


def simulate(policy: Bandit, rounds: int, seed: int = 0) -> tuple[list[list[int]], list[list[tuple[int, float, int]]]]:
    """Run rounds with rates that depend on the arm; return by stream the choices and (arm, seconds, tokens)."""
    rng = random.Random(seed)
    state = policy.start(3, np.array([11, 22, 33]))
    choices: list[list[int]] = [[], [], []]
    logs: list[list[tuple[int, float, int]]] = [[], [], []]
    for _ in range(rounds):
        chosen = state.choice.tolist()
        accepted = [min(rng.randrange(3), arm + 1) for arm in chosen]
        seconds = [1.0 + (0.1, 0.2, 0.9)[arm] + rng.random() / 10 for arm in chosen]
        for s, arm in enumerate(chosen):
            choices[s].append(arm)
            logs[s].append((arm, seconds[s], accepted[s] + 1))
        state = policy.observe(round_outcome(accepted, [arm + 1 for arm in chosen], seconds), state)
    return choices, logs


ARMS = (FixedLength(1), FixedLength(2), FixedLength(3))


def test_ucb_takes_the_arm_with_the_best_rate_and_bonus():
    choices, logs = simulate(Bandit(0.3, "ucb", ARMS), 60)
    for picked, log in zip(choices, logs, strict=True):
        assert picked[:3] == [0, 1, 2]
        for t in range(3, 60):
            count = [sum(arm == a for arm, _, _ in log[:t]) for a in range(3)]
            rate = [
                sum(k for arm, _, k in log[:t] if arm == a) / sum(x for arm, x, _ in log[:t] if arm == a)
                for a in range(3)
            ]
            worth = [rate[a] / max(rate) + 0.3 * math.sqrt(math.log(t) / count[a]) for a in range(3)]
            assert picked[t] == worth.index(max(worth))
        assert len(set(picked[3:])) > 1


@pytest.mark.parametrize("kind", ["ucb", "thompson"])
def test_a_bandit_finds_the_fastest_arm(kind):
    """Arm 1 gains 2 tokens in 1.25 s, arm 0 1.67 in 1.15 s, arm 2 2 in 1.95 s."""
    for picked in simulate(Bandit(0.5 if kind == "ucb" else 1.0, kind, ARMS), 600)[0]:
        late = picked[300:]
        assert late.count(1) > 0.6 * len(late)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_the_online_model_stays_bounded_for_equal_odds(decay):
    policy = Online(0.3, decay=decay, max_depth=3)
    state = policy.start(2, np.arange(2))
    for number in range(4000):
        accepted = [number % 2, number % 5 > 0] if number % 2000 < 1000 else [0, 1]
        _, state = policy.keep(draft_step(1, np.full((2, 1, 1), 0.9, dtype=np.float32)), state)
        state = policy.observe(round_outcome(accepted, [1, 1]), state)
        assert (np.abs(state[0][:, :2]) < 1000.0).all(), state[0]
