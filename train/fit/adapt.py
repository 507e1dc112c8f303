"""A trained policy under the costs of another profile (`evaluate`, `deploy`, `demo`)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TypeGuard

from ...policies.batch_rules import BatchStop, for_batches
from ...policies.contract import StopPolicy
from ...policies.host import with_costs
from ...policies.learned import LearnedPolicy, TreeGain
from ...policies.profile import Profile
from ...policies.routing import RoutingPolicy
from ..replay.arrays import TraceArrays
from .batch_rules import tune_batch_lengths, tune_batch_rule
from .route import tune_lengths, with_stops
from .rules import FIRST_DEPTHS, Part, Rates, solve_derived
from .tree_rules import solve_tree

MIN_GAIN_IN_SAMPLE = 0.01
"""Relative gain over a fixed length that decisions in batches must have on prompts that the head was fitted on."""

PRICED = ("derived", "gain")
"""Rules that hold for the costs of one profile, for which `solve_rate` solves rho."""

BY_COSTS = "decides by the costs of this profile"


def is_priced(policy: StopPolicy) -> TypeGuard[LearnedPolicy]:
    """Whether the rule of a policy holds for the costs of one profile."""
    return isinstance(policy, LearnedPolicy) and policy.rule.kind in PRICED


def solve_rate(
    policy: LearnedPolicy,
    arrays: TraceArrays,
    profile: Profile,
    acceptance: Sequence[float],
    firsts: Sequence[int] = FIRST_DEPTHS,
    rates: Rates | None = None,
) -> tuple[LearnedPolicy, float]:
    """Return a policy with its priced rule solved for a profile, and its tokens per second; see `solve_derived`."""
    if isinstance(policy, TreeGain):
        return solve_tree(policy, arrays, profile, firsts, rates)
    return solve_derived(policy, arrays, profile, acceptance, firsts, rates)


def adapt_to_profile(policy: StopPolicy, arrays: TraceArrays | None, profile: Profile) -> tuple[StopPolicy, str]:
    """Adapt a policy to the costs of a profile; return it with a note for the reader, "" if nothing changed.

    A rate holds for the costs that it was solved for. Under other costs the rule would stop too early or too late.

    Args:
        policy: any; if its rule does not depend on costs it is only limited to the depth of traces and profile.
        arrays: dense training traces to solve rates on, never the evaluated ones; None if there are none.
        profile: what rounds cost, decisions of this policy included.
    """
    if arrays is not None and arrays.tree.drafters > 1 and not policy.routes:
        profile, arrays = profile.of_policy(policy, arrays.drafters), arrays.of_policy(policy)
    priced = with_costs(policy, profile)
    if priced is not policy:
        return priced, BY_COSTS
    if arrays is not None and arrays.tree.is_chain:  # the depth of a tree is always within the range of a profile
        policy = policy.limited(min(arrays.depth, profile.max_depth))
    if isinstance(policy, BatchStop):
        return _adapt_batch_policy(policy, arrays, profile)
    if isinstance(policy, RoutingPolicy):
        return _adapt_route(policy, arrays, profile)
    if not is_priced(policy) or profile.same_costs(policy.metadata.profile):
        return policy, ""
    if arrays is None:
        return policy, "rho as saved, of another profile; give dense training traces to solve it for this one"
    arrays = unfitted_prompts(policy, arrays)
    if arrays is None:
        return policy, "rho as saved, of another profile: the head was fitted on all prompts of the training traces"
    # Another first decision must be clearly faster: training chose this one on prompts that its heads were not fitted on.
    firsts = (policy.rule.first, *(first for first in FIRST_DEPTHS if first != policy.rule.first))
    prompts = len(set(arrays.clusters))
    note = f"rho solved for this profile on {prompts} training prompts that the head was not fitted on"
    return retune(policy, arrays, profile, firsts), note


def retune(policy: LearnedPolicy, arrays: TraceArrays, profile: Profile, firsts: Sequence[int]) -> LearnedPolicy:
    """Return a policy with its priced rule solved for a profile; speeds that training measured are dropped.

    Args:
        policy: with a priced rule.
        arrays: training traces of prompts that its head was not fitted on (`unfitted_prompts`).
        profile: what rounds cost, decisions of this policy included.
        firsts: depths of the first decision that are tried.
    """
    solved, rate = solve_rate(policy, arrays, profile, policy.metadata.acceptance, firsts)
    retuned = copy.copy(tune_batch_lengths(solved, [Part(arrays)], profile, MIN_GAIN_IN_SAMPLE))
    metrics = {name: value for name, value in policy.metadata.metrics.items() if not name.startswith("held_out_")}
    retuned.metadata = dataclasses.replace(
        policy.metadata, rho=rate, profile=profile.record(policy.cost_name), metrics=metrics
    )
    return retuned


def unfitted_prompts(policy: LearnedPolicy | RoutingPolicy, arrays: TraceArrays) -> TraceArrays | None:
    """Return the prompts that the head was not fitted on, without the report prompts; None if there are none."""
    used = {name for group in ("fit", "report") for name in policy.metadata.prompts.get(group, ())}
    keep = [at for at, name in enumerate(arrays.clusters) if name not in used]
    return arrays.subset(keep) if keep else None


def _adapt_route(route: RoutingPolicy, arrays: TraceArrays | None, profile: Profile) -> tuple[StopPolicy, str]:
    """Return a trained route with the stop policies of its drafters adapted: the choice of drafters stays as learned."""
    trained = route.metadata
    if not trained.profile or profile.same_costs(trained.profile):
        return route, ""
    arrays = None if arrays is None else unfitted_prompts(route, arrays)
    if arrays is None:
        return route, "lengths as saved, of another profile; give dense training traces to solve them for this one"
    if route.lengths is not None:
        adapted = copy.copy(tune_lengths(route, arrays, profile))  # may be the route itself
    else:
        costs = [dataclasses.replace(one, batch=None) for one in profile.each_drafter]
        parts = zip(route.stops, arrays.each_drafter, costs, strict=True)
        adapted = with_stops(route, [adapt_to_profile(stop, part, cost)[0] for stop, part, cost in parts])
    adapted.name = route.name
    adapted.metadata = dataclasses.replace(trained, profile=profile.record(route.cost_name))
    prompts = len(set(arrays.clusters))
    return (
        adapted,
        f"draft lengths solved for this profile on {prompts} training prompts that the heads were not fitted on",
    )


def _adapt_batch_policy(policy: BatchStop, arrays: TraceArrays | None, profile: Profile) -> tuple[LearnedPolicy, str]:
    name, is_same = policy.cost_name, profile.same_costs(policy.metadata.profile)
    if is_same and policy.profile.decision(name) == profile.decision(name):
        return policy, ""
    unfitted = None if arrays is None else unfitted_prompts(policy, arrays)
    if unfitted is not None and profile.batch is not None:
        tuned = tune_batch_rule(policy, [Part(unfitted)], profile, MIN_GAIN_IN_SAMPLE)
        return tuned, f"{BY_COSTS}, its rates solved for it on the training traces"
    # If only the price of decisions differs, the sizes without decisions stay as they were chosen.
    return for_batches(policy, profile=profile, rule=policy.rule if is_same else None), "" if is_same else BY_COSTS
