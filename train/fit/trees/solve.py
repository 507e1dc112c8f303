"""Prices of the learned tree policy: seconds from a profile, and the rate that turns them into tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from ....policies.learned import TreeGain
from ....policies.profile import Profile
from ....policies.tree_rules import PRICED_NODES
from ...replay.traces.arrays import TraceArrays, typical_context
from ..rates import Part, Rates, replayed_rates

AHEAD = (0.0, 0.5, 0.8, 1.0)
"""Shares of the mean acceptance that are tried."""

FIRST = (1, 0, 2, 3)
"""Depths of the first decision that are tried."""

FLOORS, UNHARMED = (0.1, 0.05, 0.03, 0.02, 0.01), 1e-3
"""Floors that are tried, and what share of the rate one may cost: the time that fewer branches take is not in that rate."""

SETTLED = 3e-3
ROUNDS = 4


def tree_seconds(arrays: TraceArrays, profile: Profile, price: float) -> dict[str, Any]:
    """Return `opening_s`, `draft_s` and `verify_s` of a `TreeRule`, for a typical context of these texts.

    Args:
        arrays: a trace of trees, or of chains, whose rounds cost less.
        profile: what rounds cost.
        price: seconds of a decision.
    """
    tree = arrays.tree
    outside = None if tree.is_chain else profile.tree_outside_s
    _, per_step, per_token = outside or (profile.round_s, profile.step_s, 0.0)
    branches = sum(bool(below) for below in tree.children)
    # A branch that is fed draws this many tokens on average, each of which takes time outside the models.
    below = tree.nodes / max(branches, 1)
    between = partial(profile.between, typical_context(arrays))
    opening = float(between(lambda table: table.draft_s[:1])[0])
    if tree.is_chain:
        # Chains are filled up to a size that is clearly cheaper, and cost what that does.
        padded = profile.padded()[: tree.nodes + 1]
        drafts = between(lambda table: [table.later_s]).tolist()
        verify = between(lambda table: [table.verify_s[n] for n in padded]).tolist()
    else:
        drafts = between(lambda table: table.tree_draft(max(tree.width, 1))[1:]).tolist()
        verify = between(lambda table: table.tree_verify(min(tree.nodes, PRICED_NODES))).tolist()
    # What a round costs whatever it does is left out: the rule compares going on with stopping.
    return {
        "opening_s": opening + per_step + per_token * len(tree.children[0]) + price,
        "draft_s": [s + per_step + per_token * below * rows + price for rows, s in enumerate(drafts, 1)],
        "verify_s": verify,
    }


def solve_tree(
    policy: TreeGain,
    arrays: TraceArrays,
    profile: Profile,
    firsts: Sequence[int] = FIRST,
    rates: Rates | None = None,
) -> tuple[TreeGain, float]:
    """Solve rho of a tree policy by Dinkelbach's iteration: assume a rate, replay, assume the rate that came out.

    How far to look ahead, and at which depth decisions begin to pay for themselves, are settled on the way, by replayed rate;
    last, which branches need not be read at all.

    Args:
        policy: whose head and calibration are used.
        arrays: training traces, never the evaluated ones.
        profile: what rounds cost.
        firsts: depths of the first decision that are tried.
        rates: of policies; by default on `arrays`.

    Returns:
        The policy under the fastest rule met, and its rate in tokens per second.
    """
    seconds = tree_seconds(arrays, profile, profile.decision(policy.cost_name))
    rates = rates or replayed_rates([Part(arrays)], profile)
    best, best_rate = policy, 0.0

    def settled(**changes: Any) -> None:
        nonlocal best, best_rate
        # A saved policy comes with a floor; the rate is solved without, and a floor is chosen last.
        rule = dataclasses.replace(best.rule, floor=0.0)
        rho = best_rate or rule.rate
        for _ in range(ROUNDS):
            candidate = policy.with_rule(dataclasses.replace(rule, rate=rho, **seconds, **changes))
            (rate,) = rates([candidate])
            if rate > best_rate:
                best, best_rate = candidate, rate
            if abs(rate - rho) < SETTLED * rho:
                break
            rho = rate

    for share in AHEAD:
        settled(ahead=share)
    for first in firsts:
        # After the deepest depth that was ever reached there is nothing to decide.
        if first != best.rule.first and first < policy.max_depth and first <= len(best.rule.acceptance):
            settled(first=first, ahead=best.rule.ahead)
    # From the highest on, which reads the fewest branches: the first one that does no harm is taken.
    for floor in FLOORS:
        candidate = policy.with_rule(dataclasses.replace(best.rule, floor=floor))
        (rate,) = rates([candidate])
        if rate >= (1.0 - UNHARMED) * best_rate:
            return candidate, rate
    return best, best_rate
