"""The continuation value of a probability: thresholds of S_j next_j by backward search, from what lengths cost in hindsight.

The derived rule works its thresholds out from costs, a rate and mean acceptance. That leaves out where the next
round begins, what decisions still to come cost, and how well far acceptance really goes with S_j next_j. Here the same
scores are cut where drafting on began to pay on the training traces: for depth j = K-1, ..., 0, with the decisions below it
settled, the threshold under which the cost-to-go comes out least. One number a depth is all that is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from specstop.collect.schema import NO_TOKEN
from specstop.policies.contract import DraftStep
from specstop.policies.heads.base import Array
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.rules import Derived, Threshold
from specstop.train.heads.calibration import Scored
from specstop.train.heads.rows import Visits
from specstop.train.replay.bounds.cost_to_go import CostToGo, Played
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, seen_features
from torch import Tensor

LATEST = 3
"""Latest first decision that is tried."""

UNVISITED = 0.2
"""Weight of an anchor that the policy does not visit, against 1 for a visited one."""

ROUNDS = 3
NEVER = 2.0
"""A threshold that no probability passes."""


def settle_thresholds(
    policy: LearnedPolicy,
    arrays: TraceArrays,
    profile: Profile,
    rounds: int = ROUNDS,
    firsts: Sequence[int] = tuple(range(LATEST + 1)),
) -> tuple[LearnedPolicy, float]:
    """Return the policy under the derived rule with thresholds settled on traces, and its tokens per second there.

    Args:
        policy: head and calibration; of hidden states it may read none.
        arrays: dense training traces of chains, never the evaluated ones.
        profile: what rounds and this policy's decisions cost.
        rounds: of policy iteration: settled on the cost-to-go in seconds under the last thresholds; the fastest counts.
        firsts: first decisions that are tried.
    """
    costs = CostToGo(arrays, profile)
    price = profile.decision(policy.cost_name)
    length, played = costs.fixed()
    value = costs.value(torch.full_like(costs.bound, length))
    deepest = min(policy.max_depth, costs.depth)
    best: tuple[float, LearnedPolicy] | None = None
    for _ in range(rounds):
        seen = seen_features(arrays, policy.features, torch.arange(len(played.visits)), played.history)
        seen = seen[:, :deepest]
        turn: tuple[float, LearnedPolicy, Tensor, Tensor, Played] | None = None
        for first in (f for f in firsts if f < deepest):
            score = scores(policy, seen.numpy(), first)
            rule, lengths, asked = _backward(costs, score, first, value, played.visits, price)
            now = costs.play(lengths, price * asked.numpy())
            total = float(now.seconds.sum())
            if turn is None or total < turn[0]:
                turn = total, policy.with_rule(rule), lengths, asked, now
        assert turn is not None
        if best is None or turn[0] < best[0]:
            best = turn[0], turn[1]
        value, played = costs.value(turn[2], price * turn[3].numpy()), turn[4]
    assert best is not None
    return best[1], replay(arrays, best[1], profile).rate


def scores(policy: LearnedPolicy, seen: Array, first: int) -> Tensor:
    """Return [N, K] S_j next_j as the derived rule has them if its first decision is at `first`; 0 before.

    Args:
        policy: head and calibration.
        seen: [N, K, F], what is seen from each anchor at depths 0..K - 1.
        first: depth of the first decision.
    """
    asked = policy.with_rule(Derived([NEVER] * seen.shape[1], first))
    out = np.zeros(seen.shape[:2])
    for depth, (survival, _, next_) in enumerate(survivals(asked, seen), first):
        out[:, depth] = survival * next_
    return torch.from_numpy(out)


def _backward(
    costs: CostToGo, score: Tensor, first: int, value: Tensor, visits: Tensor, price: float
) -> tuple[Derived, Tensor, Tensor]:
    """Return the rule, and the [N] lengths and decisions of its rounds."""
    deepest = score.shape[1]
    stop = costs.outcomes(value)
    bound = costs.bound.clamp(max=deepest)
    weight = visits.double().clamp_min(UNVISITED)
    length, asked = bound.clone(), torch.zeros(len(bound), dtype=torch.float64)
    taus = [NEVER] * deepest
    for j in range(deepest - 1, first - 1, -1):
        open_ = bound > j
        later = stop.gather(1, length[:, None])[:, 0] + price * asked
        use = open_ & ~costs.arrays.cut
        taus[j] = cut_where_it_pays(score[use, j], (weight * (stop[:, j] - later))[use])
        on = score[:, j] > taus[j]
        length = torch.where(open_ & ~on, j, length)
        asked = torch.where(open_, torch.where(on, asked, 0.0) + 1.0, 0.0)
    return Derived(taus, first), length, asked


def cut_where_it_pays(score: Tensor, gain: Tensor) -> float:
    """Return the threshold above which the gains [M] add up to most; `NEVER` where none does."""
    if not len(score):
        return NEVER
    order = score.argsort(descending=True)
    total = gain[order].cumsum(0)
    ranked = score[order]
    ends = torch.cat([ranked[1:] < ranked[:-1], torch.ones(1, dtype=torch.bool)])  # equal scores go together
    total = torch.where(ends, total, -math.inf)
    at = int(total.argmax())
    if float(total[at]) <= 0.0:
        return NEVER
    below = float(ranked[at + 1]) if at + 1 < len(ranked) else -1.0
    return 0.5 * (float(ranked[at]) + below)


def policy_survival(policy: LearnedPolicy, arrays: TraceArrays, visited: Visits) -> Scored:
    """Return what the policy would say of survival in these rounds, drafted to full depth, beside what came of them.

    Args:
        policy: any learned policy of scalar features; its product is taken from depth 1 on, whenever it is asked first.
        arrays: a trace of chains, held out where the answer shall mean something.
        visited: rounds, such as `visits(arrays, [replay(arrays, policy, profile)])`.
    """
    seen = seen_features(arrays, policy.features, visited.row, visited.history).numpy()
    asked = policy.with_rule(Threshold("survival", 0.0))
    columns = [values[0] for values in survivals(asked, seen[:, : policy.max_depth + 1])]
    temperature = arrays.column("temperature")[visited.row].numpy()
    there = (arrays.tokens[visited.row] != NO_TOKEN).numpy()
    return Scored(np.stack(columns, 1), arrays.accepted[visited.row].numpy(), temperature, there)


def survivals(policy: LearnedPolicy, seen: Array) -> Iterator[Array]:
    """Yield [3, R] S_j, accept and next of a policy of scalars, depth by depth from its first decision on.

    Args:
        policy: asked at every depth.
        seen: [R, K + 1, F], what it sees of rounds of chains at depths 0..K.
    """
    rounds = len(seen)
    alive, parent = np.ones((rounds, 1), dtype=bool), np.zeros((rounds, 1), dtype=np.int64)
    before = None
    for depth in range(policy.first, seen.shape[1]):
        features = np.ascontiguousarray(seen[:, depth, None])
        found, _ = policy.survive(DraftStep(depth, alive, parent, features, {}, np.arange(rounds)), before)
        before = found[0] if depth else None
        yield found[..., 0]
