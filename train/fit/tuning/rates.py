"""Tuning by replayed throughput: the best fixed length, a threshold, and rho of the derived rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from ....policies.contract import Array, StopPolicy
from ....policies.errors import PolicyError
from ....policies.fixed import Confidence, FixedLength
from ....policies.learned import LearnedPolicy, TreeGain
from ....policies.profile import Profile
from ....policies.rules import Derived
from ...replay.run import Replayed, replay
from ...replay.traces.arrays import TraceArrays, typical_context
from ..rates import Part, Rates, replayed_rates
from ..trees.solve import FIRST, solve_tree

THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))
LOOK_AHEAD = (0.0, 0.5, 1.0)
SETTLED = 3e-3
"""Relative change of rho below which another replay would not move the thresholds to speak of."""

PRICED = ("derived", "gain")
"""Rules that hold for the costs of one profile, whose rate `solve_rate` solves."""


def is_priced(policy: StopPolicy) -> TypeGuard[LearnedPolicy]:
    """Whether a policy's rule holds for the costs of one profile."""
    return isinstance(policy, LearnedPolicy) and policy.rule.kind in PRICED


CLEARLY = 0.01
"""What another first decision has to gain over the one before: less is as likely a matter of the prompts at hand."""

_ROUNDS = 4


def fixed_grid(arrays: TraceArrays, profile: Profile) -> list[Replayed]:
    """Replay every fixed length 0..K."""
    return [replay(arrays, FixedLength(k), profile) for k in range(min(arrays.depth, profile.max_depth) + 1)]


def tune_confidence(arrays: TraceArrays, profile: Profile, thresholds: Sequence[float] = THRESHOLDS) -> Confidence:
    """Return the confidence rule with the threshold that replays fastest."""
    depth = min(arrays.depth, profile.max_depth)
    rules = [Confidence(t, depth) for t in thresholds]
    return max(rules, key=lambda rule: replay(arrays, rule, profile).rate)


def solve_rate(
    policy: LearnedPolicy,
    arrays: TraceArrays,
    profile: Profile,
    acceptance: Sequence[float],
    firsts: Sequence[int] = FIRST,
    rates: Rates | None = None,
) -> tuple[LearnedPolicy, float]:
    """Solve rho of the derived rule, or of a tree policy's, by Dinkelbach's iteration: assume a rate, replay, assume it anew.

    Two things that the traces alone can say are settled on the way, by replayed rate: at which depth decisions begin to pay
    for themselves, and how far to look ahead, as a share of the mean acceptance (a doubtful token is followed by less of it
    than the mean).

    Args:
        policy: whose head and calibration are used.
        arrays: training traces, never the evaluated ones.
        profile: what rounds cost.
        acceptance: a_1..a_K of the training traces.
        firsts: depths of the first decision that are tried.
        rates: of policies; by default on `arrays`.

    Returns:
        The policy under the fastest rule met, and its rate in tokens per second.

    Raises:
        PolicyError: `acceptance` ends before the policy does.
    """
    if isinstance(policy, TreeGain):
        return solve_tree(policy, arrays, profile, firsts, rates)
    if len(acceptance) < policy.max_depth:
        raise PolicyError(
            f"{policy.name}: expected the mean acceptance at {policy.max_depth} depths to solve the derived rule with, got "
            f"{len(acceptance)}; train the policy again"
        )
    context, price = typical_context(arrays), profile.decision(policy.cost_name)
    rates = rates or replayed_rates([Part(arrays)], profile)
    start = max(r.rate for r in fixed_grid(arrays, profile))
    best, best_rate = policy, 0.0
    # After a depth where nothing was ever accepted there is nothing to decide.
    for first in (first for first in firsts if first < policy.max_depth and _before(first, acceptance) > 0.0):
        costs = profile.chain_costs(context, price, first, policy.max_depth)
        found, rate = _solved(policy, costs, first, acceptance, max(start, best_rate), rates)
        if rate > (1.0 + CLEARLY) * best_rate:  # `FIRST` begins with 1, which others have to beat
            best, best_rate = found, rate
    return best, best_rate


def _before(first: int, acceptance: Sequence[float]) -> float:
    """Return the mean survival of what lies before the first decision, P(A >= first - 1)."""
    return math.prod(acceptance[: max(first - 1, 0)])


def _solved(
    policy: LearnedPolicy, costs: Array, first: int, acceptance: Sequence[float], start: float, rates: Rates
) -> tuple[LearnedPolicy, float]:
    """Return the fastest rule met whose first decision is at this depth, and its rate; rho is `start` to begin with."""
    best, best_rate = policy, 0.0
    known = _before(first, acceptance)
    assumed = dict.fromkeys(LOOK_AHEAD, start)  # by share; settled ones leave
    for _ in range(_ROUNDS):
        candidates = []
        for share, rho in assumed.items():
            taus = derived_thresholds(rho, costs, [share * a for a in acceptance])
            # S_j counts from x_first on: it lacks what lies before, so that thresholds are divided by its mean.
            candidates.append(policy.with_rule(Derived([tau / known for tau in taus], first)))
        found = rates(candidates)
        for candidate, rate in zip(candidates, found, strict=True):
            if rate > best_rate:
                best, best_rate = candidate, rate
        now = zip(assumed.items(), found, strict=True)
        assumed = {share: rate for (share, rho), rate in now if abs(rate - rho) >= SETTLED * rho}
        if not assumed:
            break
    return best, best_rate


def best_of(replays: Sequence[Replayed]) -> Replayed:
    """Return the fastest replay."""
    return max(replays, key=lambda played: played.rate)


def derived_thresholds(rho: float, costs: Array, acceptance: Sequence[float]) -> list[float]:
    """Return tau_0 .. tau_{K-1} of the derived rule.

    Args:
        rho: tokens per second of the policy itself.
        costs: [K + 1] float64, seconds of a round that drafts k = 0..K tokens.
        acceptance: a_1 .. a_K, mean conditional acceptance by depth.
    """
    depth = len(costs) - 1
    a = np.array(acceptance[:depth], dtype=np.float64)
    thresholds = []
    for j in range(depth):
        # 1, 1 + a_{j+2}, 1 + a_{j+2} + a_{j+2} a_{j+3}, ...: expected tokens of m = 1, 2, ... per unit of S_j next_j.
        tokens = np.cumsum(np.append(1.0, np.cumprod(a[j + 1 :])))  # [K - j]
        thresholds.append(float((rho * (costs[j + 1 :] - costs[j]) / tokens).min()))
    return thresholds
