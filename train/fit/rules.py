"""Rates of policies on training prompts, the best fixed length and confidence threshold, and rho of the derived rule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import one_hot

from ...decode.drafters.spec import drafter_index
from ...policies.contract import Array, StopPolicy
from ...policies.errors import PolicyError
from ...policies.fixed import Confidence, fixed_lengths
from ...policies.heads.base import Head
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ...policies.rules import Derived
from ..heads.crossfit import Folds
from ..replay.arrays import TraceArrays, typical_context
from ..replay.rounds import Rounds
from ..replay.run import replay, replay_lengths, replay_many

THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))

LOOK_AHEAD = (0.0, 0.5, 1.0)
"""Shares of the mean acceptance that the derived rule tries."""

FIRST_DEPTHS = (1, 0, 2, 3)
"""Depths of the first decision that are tried."""

RATE_TOLERANCE = 3e-3
"""Relative change of a rate below which the iteration has converged."""

MIN_GAIN = 0.01
"""Relative gain that another first decision must have. A smaller one may be due to the choice of prompts."""

_ROUNDS = 4

Rates = Callable[[Sequence[LearnedPolicy]], list[float]]
"""Returns the tokens per second of policies that differ in their rule only."""


@dataclass(frozen=True)
class Part:
    """Training prompts, and a head that was fitted without them; None = the policy's head.

    A head with many weights overfits the prompts that it was fitted on: each decision, and the first above all, seems to pay
    there.
    """

    arrays: TraceArrays
    head: Head | None = None

    def play_with_head(self, policy: StopPolicy) -> StopPolicy:
        """Return a policy with this head, no deeper than the prompts were drafted."""
        if self.head is not None and isinstance(policy, LearnedPolicy):
            policy = copy.copy(policy)
            policy.head = self.head
        return policy.limited(self.arrays.depth)


def left_out_parts(arrays: TraceArrays, folds: Folds, heads: Sequence[Head]) -> list[Part]:
    """Return the prompts fold by fold, each with the head that was fitted without it; a single head is of the first fold."""
    return [Part(arrays.subset(folds.sequences(fold)), head) for fold, head in enumerate(heads)]


def replayed_rates(parts: Sequence[Part], profile: Profile) -> Rates:
    """Return a function of policies: their tokens per second on all parts together."""

    def rates(policies: Sequence[LearnedPolicy]) -> list[float]:
        tokens, seconds = np.zeros((2, len(policies)))
        for part in parts:
            played = replay_many(part.arrays, [part.play_with_head(policy) for policy in policies], profile)
            tokens += [float(one.tokens.sum()) for one in played]
            seconds += [float(one.seconds.sum()) for one in played]
        return [float(rate) for rate in tokens / seconds]  # a ratio of sums, as one replay of all prompts has it

    return rates


def fixed_grid(arrays: TraceArrays, profile: Profile) -> list[Rounds]:
    """Replay every fixed length 0..K, with each drafter if there are several; HISTORY features are then unknown."""
    policies = fixed_lengths(min(arrays.depth, profile.max_depth), arrays.drafters)
    if arrays.tree.drafters == 1 or not all(tree.is_chain for tree in arrays.tree.trees):
        return [replay(arrays, policy, profile) for policy in policies]
    for policy in policies:
        profile.of_policy(policy, arrays.drafters)  # refuses a profile of fewer drafters
    index = torch.tensor([drafter_index(policy, arrays.drafters) for policy in policies])
    lengths = torch.tensor([policy.max_depth for policy in policies])[:, None] * one_hot(index, len(arrays.drafters))
    drafted = lengths[:, None].expand(-1, len(arrays.owner), -1)  # [C, N, D]
    return replay_lengths(arrays, drafted, drafted, profile, policies)


def best_of(replays: Sequence[Rounds]) -> Rounds:
    """Return the fastest replay."""
    return max(replays, key=lambda played: played.rate)


def tune_confidence(arrays: TraceArrays, profile: Profile) -> Confidence:
    """Return the confidence rule with the threshold of `THRESHOLDS` that replays fastest."""
    depth = min(arrays.depth, profile.max_depth)
    return max((Confidence(t, depth) for t in THRESHOLDS), key=lambda rule: replay(arrays, rule, profile).rate)


# The derived rule


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


def solve_derived(
    policy: LearnedPolicy,
    arrays: TraceArrays,
    profile: Profile,
    acceptance: Sequence[float],
    firsts: Sequence[int] = FIRST_DEPTHS,
    rates: Rates | None = None,
) -> tuple[LearnedPolicy, float]:
    """Solve rho of the derived rule by Dinkelbach's iteration: assume a rate, replay, assume the result.

    Two further settings are chosen by replayed rate: the depth from which on decisions pay, and how far to look ahead, as a
    share of the mean acceptance (fewer tokens than the mean follow a doubtful one).

    Args:
        policy: provides the head and the calibration.
        arrays: training traces, never the evaluated ones.
        profile: what rounds cost.
        acceptance: a_1..a_K of the training traces.
        firsts: depths of the first decision that are tried.
        rates: of policies; by default on `arrays`.

    Returns:
        The policy under the fastest rule, and its rate in tokens per second.

    Raises:
        PolicyError: `acceptance` ends before the policy does.
    """
    rates = rates or replayed_rates([Part(arrays)], profile)
    if len(acceptance) < policy.max_depth:
        raise PolicyError(
            f"{policy.name}: expected the mean acceptance at {policy.max_depth} depths to solve the derived rule with, got "
            f"{len(acceptance)}; train the policy again"
        )
    context, price = typical_context(arrays), profile.decision(policy.cost_name)
    start = best_of(fixed_grid(arrays, profile)).rate
    best, best_rate = policy, 0.0
    for first in firsts:
        # Mean survival before the first decision, P(A >= first - 1). S_j begins at x_first and lacks these factors, so
        # thresholds are divided by it.
        before = math.prod(acceptance[: max(first - 1, 0)])
        if first >= policy.max_depth or before <= 0.0:
            continue  # after a depth where nothing was ever accepted there is nothing to decide
        costs = profile.chain_costs(context, price, first, policy.max_depth)
        assumed = dict.fromkeys(LOOK_AHEAD, max(start, best_rate))  # rho by look-ahead share
        fastest, rate = policy, 0.0
        for _ in range(_ROUNDS):
            candidates = []
            for share, rho in assumed.items():
                thresholds = derived_thresholds(rho, costs, [share * a for a in acceptance])
                candidates.append(policy.with_rule(Derived([tau / before for tau in thresholds], first)))
            replayed = rates(candidates)
            fastest, rate = max([(fastest, rate), *zip(candidates, replayed, strict=True)], key=lambda one: one[1])
            pairs = zip(assumed.items(), replayed, strict=True)
            assumed = {share: now for (share, rho), now in pairs if abs(now - rho) >= RATE_TOLERANCE * rho}
            if not assumed:
                break
        if rate > (1.0 + MIN_GAIN) * best_rate:  # `FIRST_DEPTHS` begins with 1, which the others have to beat
            best, best_rate = fastest, rate
    return best, best_rate
