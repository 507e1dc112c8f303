"""Published rules for trees, and the bandit, against brute force in plain Python."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from specstop.policies.contract import DraftTree, StopPolicy
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.published.bandit import Bandit
from specstop.policies.published.c2t import C2T
from specstop.policies.published.ddd import DDD
from specstop.policies.published.eagle import Eagle, OptTree, keep_best
from specstop.policies.published.hugging_face import Heuristic
from specstop.policies.registry import load_policy
from specstop.policies.tree_rules import UNSEEN, Gain
from steps import draft_step, round_outcome

PARENTS = (-1, -1, -1, 0, 0, 1, 2, 3, 3, 4, 5, 5, 7, 8, 9, 10)
"""Levels of 3, 4, 5 and 4 nodes."""

DEPTHS: list[int] = []
for _parent in PARENTS:
    DEPTHS.append(1 if _parent < 0 else DEPTHS[_parent] + 1)
LEVELS = [[n for n, d in enumerate(DEPTHS) if d == depth] for depth in (1, 2, 3, 4)]


@dataclass
class Played:
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


def grow(policy: StopPolicy, streams: int = 8, seed: int = 0) -> list[Played]:
    """Let a policy grow trees with random probabilities; return one round of each stream."""
    rng = random.Random(seed)
    played = [Played() for _ in range(streams)]
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


def valued(one: Played, power: float = 1.0) -> dict[int, float]:
    """Return the values of the drawn nodes, estimated at depths without a decision."""
    estimate: dict[int, float] = {}
    for node in sorted(one.drawn):
        parent = PARENTS[node]
        if DEPTHS[node] in one.kept:
            estimate[node] = power * one.values[node]
        else:
            better = sum(PARENTS[n] == parent for n in range(node))
            estimate[node] = (estimate[parent] if parent >= 0 else 0.0) + (1 + better) * math.log(UNSEEN)
    return estimate


def best(values: dict[int, float], count: int) -> set[int]:
    return set(sorted(values, key=lambda n: (-values[n], n))[:count])


@pytest.mark.parametrize(("nodes", "top"), [(5, 2), (7, 1), (59, 10), (3, 3)])
def test_eagle_keeps_the_best_branches_and_sends_the_best_nodes(nodes: int, top: int) -> None:
    for one in grow(Eagle(nodes, top)):
        for depth, kept in one.kept.items():
            assert kept == best({n: one.values[n] for n in one.level(depth)}, top)
        assert one.selected == best(valued(one), nodes)


@pytest.mark.parametrize(("delta", "nodes"), [(0.3, 60), (0.8, 60), (0.2, 4)])
def test_opt_tree_continues_while_the_expected_length_grows(delta: float, nodes: int) -> None:
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
def test_ddd_continues_while_the_beam_has_enough_mass(begin: int, every: int, width: int) -> None:
    continued = []
    for one in grow(DDD(-0.7, begin, every, width), streams=16):
        for depth, kept in one.kept.items():
            beam = best({n: one.values[n] for n in one.level(depth)}, width)
            decides = depth >= begin and (depth - begin) % every == 0
            if decides and beam:
                continued.append(math.log(sum(math.exp(one.values[n]) for n in beam)) >= -0.7)
            assert kept == (beam if not decides or (beam and continued[-1]) else set())
    assert 0 < sum(continued) < len(continued)


def test_c2t_prunes_by_probability_entropy_and_depth() -> None:
    answers = []
    for one in grow(C2T(2.0, 0.3, 0.2)):
        for depth, kept in one.kept.items():
            for n in one.level(depth):
                chance = 1 / (1 + math.exp(-(one.values[n] - 0.3 * one.entropy[n] - 0.2 * depth + 2.0)))
                answers.append(chance >= 0.5)
                assert (n in kept) == answers[-1]
    assert 0.1 < sum(answers) / len(answers) < 0.9
    assert C2T.trims


@pytest.mark.parametrize("power", [1.0, 0.4])
def test_gain_takes_branches_and_nodes_that_are_worth_their_price(power: float) -> None:
    """No other number of branches, and no other set of nodes closed under parents, is worth more."""
    policy = Gain(step=0.3, row=0.1, verify=0.05, power=power, follow=0.7)
    stopped, widths = 0, set()
    for one in grow(policy, streams=16):
        for depth, kept in one.kept.items():
            chances = sorted((math.exp(power * one.values[n]) for n in one.level(depth)), reverse=True)
            worth = [0.0, *(0.7 * sum(chances[:m]) - 0.2 - 0.1 * m - 0.05 * m for m in range(1, len(chances) + 1))]
            assert worth[len(kept)] == pytest.approx(max(worth), abs=1e-6)
            assert kept == best({n: one.values[n] for n in one.level(depth)}, len(kept))
            stopped += bool(chances) and not kept
            widths.add(len(kept))
        values = {n: math.exp(v) for n, v in valued(one, power).items()}
        earned = sum(values[n] for n in one.selected) - 0.05 * len(one.selected)
        for count in range(len(one.drawn) + 1):
            assert earned >= sum(values[n] for n in best(values, count)) - 0.05 * count - 1e-6
        if len(one.drawn) <= 7:
            for nodes in itertools.chain.from_iterable(itertools.combinations(one.drawn, c) for c in range(8)):
                if all(PARENTS[n] < 0 or PARENTS[n] in nodes for n in nodes):
                    assert earned >= sum(values[n] for n in nodes) - 0.05 * len(nodes) - 1e-6
    assert stopped
    assert len(widths) > 2


def test_the_first_of_equals_are_the_best() -> None:
    values = np.array([[0.5, 2.0, 0.5, -np.inf, 2.0]], dtype=np.float32)
    order = [1, 4, 0, 2]
    for count in range(6):
        kept = np.zeros(values.shape, dtype=bool)
        keep_best(values, np.isfinite(values), count, 0, -math.inf, kept)
        assert kept[0].nonzero()[0].tolist() == sorted(order[:count])


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


def test_ucb_takes_the_arm_with_the_best_rate_and_bonus() -> None:
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
def test_a_bandit_finds_the_fastest_arm(kind: str) -> None:
    """Arm 1 gains 2 tokens in 1.25 s, arm 0 1.67 in 1.15 s, arm 2 2 in 1.95 s."""
    for picked in simulate(Bandit(0.5 if kind == "ucb" else 1.0, kind, ARMS), 600)[0]:
        late = picked[300:]
        assert late.count(1) > 0.6 * len(late)


def test_thompson_draws_by_the_key_of_the_stream() -> None:
    policy = Bandit(kind="thompson", arms=ARMS)
    one, other = simulate(policy, 40)[0], simulate(policy, 40)[0]
    assert one == other
    assert one[0] != one[1] or one[1] != one[2]


def test_only_the_arm_of_the_round_decides_and_observes() -> None:
    policy = Bandit(0.0, "ucb", [FixedLength(1), Confidence(0.5, 6), Heuristic(1, max_depth=4)])
    assert (policy.features, policy.first, policy.max_depth) == (("drawn_prob",), 1, 6)
    state = policy.start(3, np.arange(3))
    state = type(state)(state.key, np.array([0, 1, 2]), state.sums, state.arms)
    kept, state = policy.keep(draft_step(1, [[[0.9], [0.2]]] * 3), state)
    assert kept.tolist() == [[False, False], [True, False], [False, False]]
    after = policy.observe(round_outcome([1, 1, 1], [1, 1, 1], [1.0, 1.0, 1.0]), state)
    assert after.arms[2].tolist() == [1.0, 1.0, 3.0]
    assert after.sums[:, :, 0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    cut = policy.observe(round_outcome([1, 1, 1], [1, 1, 1], [1.0, 1.0, 1.0], cut=True), state)
    assert not cut.sums.any()


def test_a_limited_bandit_limits_its_arms() -> None:
    limited = Bandit(arms=[FixedLength(8), Confidence(0.4)]).limited(3)
    assert isinstance(limited, Bandit)
    assert ([arm.max_depth for arm in limited.parts], limited.max_depth) == ([3, 3], 3)
    assert load_policy("bandit?kind=thompson").limited(3).shown_name == "bandit?kind=thompson"


def test_without_a_profile_a_drafted_token_has_a_nominal_price() -> None:
    policy = Bandit(0.0, "ucb", ARMS[:2])
    state = policy.observe(round_outcome([1], [1], [0.0]), policy.start(1, np.zeros(1, dtype=np.int64)))
    assert state.sums[0, 0, 1:3].tolist() == pytest.approx([2.0, 1.1])
