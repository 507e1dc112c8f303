"""The rule of a new policy, and of a trained one under the costs of another profile (`evaluate`, `deploy`, `demo`)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from ...collect.store import Trace
from ...policies.batch_rules import BatchStop, for_batches
from ...policies.contract import StopPolicy
from ...policies.host import with_costs
from ...policies.learned import LearnedPolicy, TrainingMetadata, TreeGain
from ...policies.profile import Profile
from ...policies.rules import Derived, Rule
from ...policies.storage import load_policy_folder, save_policy
from ..replay.arrays import TraceArrays, trace_arrays, typical_context
from .batch_rules import settle_batch, settle_lengths
from .plan import Plan, make_rule
from .rules import FIRST, THRESHOLDS, Part, Rates, derived_thresholds, replayed_rates, solve_derived
from .tree_rules import solve_tree

FINER = (-0.025, -0.0125, 0.0125, 0.025)
"""Offsets that are tried around the best of `THRESHOLDS`."""

MIN_GAIN_IN_SAMPLE = 0.01
"""Relative gain over a fixed length that decisions in batches must have on prompts that the head was fitted on."""

PRICED = ("derived", "gain")
"""Rules that hold for the costs of one profile, for which `solve_rate` solves rho."""

BY_COSTS = "decides by the costs of this profile"


def solve_rate(
    policy: LearnedPolicy,
    arrays: TraceArrays,
    profile: Profile,
    acceptance: Sequence[float],
    firsts: Sequence[int] = FIRST,
    rates: Rates | None = None,
) -> tuple[LearnedPolicy, float]:
    """Return a policy under the derived rule or the rule `gain` solved for a profile, and its tokens per second.

    See `solve_derived` for the arguments.
    """
    if isinstance(policy, TreeGain):
        return solve_tree(policy, arrays, profile, firsts, rates)
    return solve_derived(policy, arrays, profile, acceptance, firsts, rates)


def provisional_rule(
    plan: Plan, policy: LearnedPolicy, arrays: TraceArrays, profile: Profile, acceptance: Sequence[float], rho: float
) -> Rule:
    """Return a rule near the one that `choose_rule` chooses, without a search; `rho` is the best fixed length's rate."""
    if plan.threshold is not None and not plan.is_tuned:
        return make_rule(plan.rule, plan.threshold)
    costs = profile.chain_costs(typical_context(arrays), profile.decision(policy.cost_name), 1, policy.max_depth)
    return Derived(derived_thresholds(rho, costs, acceptance), 1)


def choose_rule(
    plan: Plan,
    policy: LearnedPolicy,
    arrays: TraceArrays,
    profile: Profile,
    acceptance: Sequence[float],
    parts: Sequence[Part],
) -> tuple[LearnedPolicy, float]:
    """Return the policy under the rule of a plan, and rho if that is the derived rule (else 0).

    Args:
        plan: its rule and threshold; None = the one that replays fastest, of a grid of 19 and then 4 around the best.
        policy: head and calibration.
        arrays: training traces, never the evaluated ones.
        profile: what rounds cost.
        acceptance: a_1..a_K of the training traces.
        parts: of these traces, on which rates are replayed.
    """
    rates = replayed_rates(parts, profile)
    if plan.rule == "derived":
        solved, rate = solve_rate(policy, arrays, profile, acceptance, rates=rates)
        return settle_lengths(solved, parts, profile), rate
    if plan.rule == "batch":
        verification = arrays.header.verification
        # The rule looks ahead with `acceptance`; the verification says whether drawn tokens may be left out.
        policy.metadata = dataclasses.replace(policy.metadata, acceptance=tuple(acceptance), verification=verification)
        return settle_batch(policy, parts, profile), 0.0

    def fastest(thresholds: Sequence[float]) -> float:
        found = rates([policy.with_rule(make_rule(plan.rule, t)) for t in thresholds])
        return thresholds[found.index(max(found))]

    threshold = plan.threshold
    if threshold is None and plan.published_thresholds:
        threshold = fastest(plan.published_thresholds)
    elif threshold is None:
        best = fastest(THRESHOLDS)
        threshold = fastest([t for t in (best, *(best + step for step in FINER)) if 0.0 < t < 1.0])
    return policy.with_rule(make_rule(plan.rule, threshold)), 0.0


def is_priced(policy: StopPolicy) -> TypeGuard[LearnedPolicy]:
    """Whether the rule of a policy holds for the costs of one profile."""
    return isinstance(policy, LearnedPolicy) and policy.rule.kind in PRICED


def settle_for(policy: StopPolicy, arrays: TraceArrays | None, profile: Profile) -> tuple[StopPolicy, str]:
    """Return a policy as it decides under a profile, and a note for the reader; "" if nothing had to be done.

    A rate holds for the costs that it was solved for: under others a rule would stop too early or too late.

    Args:
        policy: any; if its rule does not depend on costs it is only limited to the depth of traces and profile.
        arrays: dense training traces to solve rates on, never the evaluated ones; None if there are none.
        profile: what rounds cost, decisions of this policy included.
    """
    priced = with_costs(policy, profile)
    if priced is not policy:
        return priced, BY_COSTS
    if arrays is not None and arrays.tree.is_chain:  # the depth of a tree is always within the range of a profile
        policy = policy.limited(min(arrays.depth, profile.max_depth))
    if isinstance(policy, BatchStop):
        return _settle_batch_policy(policy, arrays, profile)
    if not is_priced(policy) or profile.same_costs(policy.metadata.profile):
        return policy, ""
    if arrays is None:
        return policy, "rho as saved, of another profile; give dense training traces to solve it for this one"
    arrays = unfitted_prompts(policy, arrays)
    if arrays is None:
        return policy, "rho as saved, of another profile: the head was fitted on all prompts of the training traces"
    # Another first decision must be clearly faster: training chose this one on prompts that its heads had not seen.
    firsts = (policy.rule.first, *(first for first in FIRST if first != policy.rule.first))
    prompts = len(set(arrays.clusters))
    note = f"rho solved for this profile on {prompts} training prompts that the head was not fitted on"
    return _resolve(policy, arrays, profile, firsts), note


def settle(path: str | Path, traces: Trace, profile: Profile) -> LearnedPolicy:
    """Solve rho of a saved policy for a slightly different profile, and save the policy in place.

    `train` estimates what a decision costs if the profile does not say it; after a run in the loop the price is known. The
    policy plays the prompts that its head was not fitted on. The depth of its first decision stays: `train` chose it on more
    of them.

    Args:
        path: the policy folder.
        traces: training traces.
        profile: what rounds cost, decisions of this policy included.
    """
    policy = load_policy_folder(path)
    arrays = unfitted_prompts(policy, trace_arrays(traces, policy.features)) if is_priced(policy) else None
    if arrays is None:
        return policy
    settled = _resolve(policy, arrays, profile, (policy.rule.first,))
    # The folder is written again, so the files for later training have to be passed on.
    save_policy(settled, path, {file.name: file.read_bytes() for file in Path(path).glob("*.ubj")})
    return settled


def unfitted_prompts(policy: LearnedPolicy, arrays: TraceArrays) -> TraceArrays | None:
    """Return the prompts that the head was not fitted on, without report prompts; None if there are none."""
    used = {name for group in ("fit", "report") for name in policy.metadata.prompts.get(group, ())}
    keep = [at for at, name in enumerate(arrays.clusters) if name not in used]
    return arrays.subset(keep) if keep else None


def _resolve(policy: LearnedPolicy, arrays: TraceArrays, profile: Profile, firsts: Sequence[int]) -> LearnedPolicy:
    """Return a policy with rho and batch lengths for a profile; speeds that training measured are dropped."""
    solved, rate = solve_rate(policy, arrays, profile, policy.metadata.acceptance, firsts)
    settled = copy.copy(settle_lengths(solved, [Part(arrays)], profile, MIN_GAIN_IN_SAMPLE))
    settled.metadata = _metadata_for(policy, rate, profile)
    return settled


def _metadata_for(policy: LearnedPolicy, rate: float, profile: Profile) -> TrainingMetadata:
    metrics = {name: value for name, value in policy.metadata.metrics.items() if not name.startswith("held_out_")}
    return dataclasses.replace(policy.metadata, rho=rate, profile=profile.record(policy.cost_name), metrics=metrics)


def _settle_batch_policy(policy: BatchStop, arrays: TraceArrays | None, profile: Profile) -> tuple[LearnedPolicy, str]:
    name, is_known = policy.cost_name, profile.same_costs(policy.metadata.profile)
    if is_known and policy.profile.decision(name) == profile.decision(name):
        return policy, ""
    unfitted = None if arrays is None else unfitted_prompts(policy, arrays)
    if unfitted is not None and profile.batch is not None:
        settled = settle_batch(policy, [Part(unfitted)], profile, MIN_GAIN_IN_SAMPLE)
        return settled, f"{BY_COSTS}, its rates solved for it on the training traces"
    # If only decisions have another price, the sizes without decisions stay as they were chosen.
    return for_batches(policy, profile=profile, rule=policy.rule if is_known else None), "" if is_known else BY_COSTS
