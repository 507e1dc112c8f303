"""A trained policy for the costs of another profile, as `evaluate` replays it and `deploy` writes it, or saved anew."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

from ....collect.store import Trace
from ....policies.batch_rules import BatchStop, for_batches
from ....policies.contract import StopPolicy
from ....policies.host import with_costs
from ....policies.learned import LearnedPolicy, TrainingMetadata
from ....policies.profile import Profile
from ....policies.storage import load_policy_folder, save_policy
from ...replay.traces.arrays import TraceArrays, trace_arrays
from ..rates import Part
from ..trees.solve import FIRST
from .batches import settle_batch, settle_lengths
from .rates import PRICED, is_priced, solve_rate

KNOWN = 0.01
"""Share of a fixed length's rate that decisions must gain in batches of prompts that the head was fitted on."""

BY_COSTS = "decides by the costs of this profile"
"""What is said of a policy that was given other costs, or none."""


def settle_for(policy: StopPolicy, arrays: TraceArrays | None, profile: Profile) -> tuple[StopPolicy, str]:
    """Return a policy as it decides under a profile, and what is to be said of it; "" where nothing had to be done.

    A rate holds for the costs that it was solved under: under others a rule would stop too early or too late.

    Args:
        policy: any; one whose rule knows no costs comes back as it is, no deeper than traces of chains and the profile.
        arrays: dense training traces, never the evaluated ones, to solve rates on; None = there are none.
        profile: what rounds cost, this policy's decisions included.
    """
    priced = with_costs(policy, profile)
    if priced is not policy:
        return priced, BY_COSTS
    if arrays is not None and arrays.tree.is_chain:  # of trees no depth is out of a profile's range
        policy = policy.limited(min(arrays.depth, profile.max_depth))
    if is_priced(policy) and not profile.same_costs(policy.metadata.profile):
        if arrays is None:
            return policy, "rho as saved, of another profile; give dense training traces to solve it for this one"
        arrays = unfitted_prompts(policy, arrays)
        if arrays is None:
            return policy, "rho as saved, of another profile: the head was fitted on all prompts of the training traces"
        # Another first decision has to be clearly faster: training chose this one on prompts that its heads had not seen.
        firsts = (policy.rule.first, *(first for first in FIRST if first != policy.rule.first))
        solved, rate = solve_rate(policy, arrays, profile, policy.metadata.acceptance, firsts)
        # Where no rule was faster it is the policy itself.
        settled = copy.copy(settle_lengths(solved, [Part(arrays)], profile, KNOWN))
        settled.metadata = _facts_for(policy, rate, profile)
        prompts = len(set(arrays.clusters))
        return settled, f"rho solved for this profile on {prompts} training prompts that the head was not fitted on"
    return _batch_policy(policy, arrays, profile) if isinstance(policy, BatchStop) else (policy, "")


def _facts_for(policy: LearnedPolicy, rate: float, profile: Profile) -> TrainingMetadata:
    """Return the facts of a policy with another rho; speeds that training measured were those of the other rule."""
    metrics = {name: value for name, value in policy.metadata.metrics.items() if not name.startswith("held_out_")}
    return dataclasses.replace(policy.metadata, rho=rate, profile=profile.record(policy.cost_name), metrics=metrics)


def _batch_policy(policy: BatchStop, arrays: TraceArrays | None, profile: Profile) -> tuple[LearnedPolicy, str]:
    """Return a policy of batches for the costs of a profile, its own decisions among them, and what is to be said of it."""
    name, known = policy.cost_name, profile.same_costs(policy.metadata.profile)
    if known and policy.profile.decision(name) == profile.decision(name):
        return policy, ""
    unfitted = None if arrays is None else unfitted_prompts(policy, arrays)
    if unfitted is not None and profile.batch is not None:
        settled = settle_batch(policy, [Part(unfitted)], profile, KNOWN)
        return settled, f"{BY_COSTS}, its rates solved for it on the training traces"
    # Where decisions alone have another price, sizes at which nothing is decided stay as they were settled.
    return for_batches(policy, profile=profile, rule=policy.rule if known else None), "" if known else BY_COSTS


def unfitted_prompts(policy: LearnedPolicy, arrays: TraceArrays) -> TraceArrays | None:
    """Return the prompts that the head of a policy was not fitted on, without report prompts; None if there are none."""
    used = {name for group in ("fit", "report") for name in policy.metadata.prompts.get(group, ())}
    keep = [at for at, name in enumerate(arrays.clusters) if name not in used]
    return arrays.subset(keep) if keep else None


def settle(path: str | Path, traces: Trace, profile: Profile) -> LearnedPolicy:
    """Solve the derived rule of a saved policy again, for a profile that is a little different, and save it in place.

    `train` estimates what a decision costs where the profile does not say; a policy that has run in the loop is settled
    for what its decisions cost there. It plays the prompts that its head was not fitted on. The depth of its first decision
    stays: `train` chose it on more of them.

    Args:
        path: the policy folder.
        traces: training traces.
        profile: what rounds cost, this policy's decisions included.
    """
    policy = load_policy_folder(path)
    if policy.rule.kind not in PRICED:
        return policy
    arrays = unfitted_prompts(policy, trace_arrays(traces, policy.features))
    if arrays is None:
        return policy
    settled, rate = solve_rate(policy, arrays, profile, policy.metadata.acceptance, firsts=(policy.rule.first,))
    settled = settle_lengths(settled, [Part(arrays)], profile, KNOWN)
    settled.metadata = _facts_for(policy, rate, profile)
    # The folder is written anew: files for retraining have to be handed over again.
    save_policy(settled, path, {file.name: file.read_bytes() for file in Path(path).glob("*.ubj")})
    return settled
