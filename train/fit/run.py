"""`train`: traces in, a policy folder out.

The prompts are split, heads are fitted, the rule is chosen, and the policy is scored on prompts that influenced nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...collect.store import Trace
from ...decode.profile import add_decisions
from ...policies import kernels
from ...policies.arguments import as_list
from ...policies.batch_rules import BatchStop
from ...policies.display import Progress, shown, silent
from ...policies.errors import InputError, TraceError
from ...policies.features import HISTORY_FEATURES
from ...policies.files import prepare_output_dir
from ...policies.learned import LearnedPolicy, TrainingMetadata
from ...policies.profile import Profile, load_profile
from ...policies.routing import RoutingPolicy
from ...policies.rules import Derived, Rule
from ...policies.storage import save_policy
from ..heads.calibration import auc, calibrate, log_loss
from ..heads.crossfit import FoldHeads, Folds, fit_folds, held_out_outputs, on_policy_rounds, prompt_folds
from ..heads.rows import Visits, conditional_acceptance, label_columns, mixed_arrays, visits
from ..replay.arrays import TraceArrays, joined_arrays, temperatures, trace_arrays, typical_context
from ..replay.checks import check_whole, load_traces, warn_other_rounds
from ..replay.run import replay
from .batch_rules import tune_batch_lengths, tune_batch_rule
from .plan import Plan, TrainOptions, head_of, make_plans, make_rule, split_report, training_prompts
from .rules import (
    THRESHOLDS,
    Part,
    best_of,
    derived_thresholds,
    fixed_grid,
    left_out_parts,
    replayed_rates,
    solve_derived,
)
from .tree_rules import choose_tree

REFERENCE_LENGTHS = 5
"""Fixed lengths near the best one: the first heads are fitted on their rounds."""

ROUTE_HEAD = "xgboost"
"""Default head of routes."""

MIN_ROUNDS = 5000
"""Rounds of the policy below which those of fixed lengths are added."""

THRESHOLD_OFFSETS = (-0.025, -0.0125, 0.0125, 0.025)
"""Offsets that are tried around the best of `THRESHOLDS`."""


@dataclass(frozen=True)
class TrainResult:
    """A trained policy and its figures on report prompts.

    Attributes:
        policy: ready to use.
        path: its folder, or None.
        metrics: rows, log loss and AUC of both outputs, kinds of calibration, replayed rate and best fixed rate, and
            `trials` of a search.
    """

    policy: LearnedPolicy | RoutingPolicy
    path: Path | None
    metrics: dict[str, Any]


def train(
    traces: Trace | str | Path | Sequence[Trace | str | Path],
    profile: Profile | str | Path,
    options: TrainOptions | None = None,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress = shown,
    **changes: Any,
) -> TrainResult:
    """Fit a stop head on traces, calibrate it, and choose its stop rule; or a route among drafters (`TrainOptions.decide`).

    The prompts are split by a hash of their text into three sets. The saved head is fitted on the first. Early stopping,
    calibration, thresholds and rho use the second; with `cross_fit` both sets change places fold by fold, so that all of
    their prompts serve for selection, each with a head that was fitted without it. All figures called held-out are of the
    third, the report prompts, which influence nothing.

    Args:
        traces: one trace or its folder, or several of one pair, such as of several temperatures; the head then reads
            `temperature` unless `features` says otherwise.
        profile: what rounds cost, or its file; the derived rule is solved for it.
        options: of the fit.
        out: the policy folder to write; None keeps the policy in memory.
        overwrite: replace the contents of `out`.
        progress: see `Progress`.
        changes: fields of `TrainOptions`, such as `head="mlp"`.

    Raises:
        InputError: an unknown head or rule, or a folder that is not empty.
        TraceError: the traces lack a feature, do not belong together or have too few prompts.
    """
    options = dataclasses.replace(options or TrainOptions(), **changes)
    kernels.load(progress)
    opened, profile = [load_traces(one) for one in as_list(traces, Trace)], load_profile(profile)
    mixed = None if options.mixed is None else load_traces(options.mixed)
    if not opened:
        raise TraceError("--traces: expected at least one trace")
    warn_other_rounds(profile, opened[0].header)
    routes, folder = options.decide in ("route", "both"), None
    plans = [] if options.decide == "route" else make_plans(_stop_options(options), opened)
    sources = [trace.folder for trace in (*opened, mixed) if trace is not None]
    if out is not None:
        if options.storage is not None and Path(out).resolve() in Path(options.storage).resolve().parents:
            raise InputError(
                f"--storage: {options.storage} is in the folder --out, which is replaced; choose another file"
            )
        folder = prepare_output_dir(out, overwrite=overwrite, inputs=[*sources, profile.source])
    metrics: dict[str, Any] = {}
    policy: LearnedPolicy | RoutingPolicy
    if routes:
        policy = _fit_route(options, plans, opened, profile, progress)
    else:
        policy = _fit_stop(options, plans, opened, profile, mixed, metrics, progress)
    solved, sampled_at = policy.metadata, temperatures(opened)
    provenance = {"traces": ", ".join(map(str, sources)), **solved.provenance, "seed": options.seed}
    policy.metadata = dataclasses.replace(
        solved,
        temperature=sampled_at[0] if len(sampled_at) == 1 else sampled_at,
        metrics={**solved.metrics, **metrics},
        provenance={**provenance, "specstop": version("specstop")},
    )
    path = None if folder is None else save_policy(policy, folder)
    return TrainResult(policy, path, dict(policy.metadata.metrics))


def _fit_stop(
    options: TrainOptions,
    plans: Sequence[Plan],
    opened: Sequence[Trace],
    profile: Profile,
    mixed: Trace | None,
    metrics: dict[str, Any],
    progress: Progress,
) -> LearnedPolicy:
    """Return `fit_policy` of the plan, or of the best one of a search, whose trials are added to `metrics`."""
    arrays, profile = _of_drafter(_read(opened, plans), profile, options.decide.partition("@")[2])
    if not options.features and arrays.only_positions:  # their rounds have no earlier ones
        plans = [
            dataclasses.replace(plan, features=tuple(n for n in plan.features if n not in HISTORY_FEATURES))
            for plan in plans
        ]
    plan = plans[0]
    if options.tune is not None:
        from .tune import search

        check_whole(arrays, "leave out --tune and give --rule survival, step or any with a --threshold")
        training, _ = split_report(arrays, options.report_share, options.seed)
        plan, metrics["trials"] = search(plans, training, profile, fit_policy, progress=progress)
    mixed_rows = None if mixed is None else mixed_arrays(mixed, opened[0], plan.features, plan.hidden)
    return fit_policy(plan, arrays, profile, mixed_rows, progress)


def _of_drafter(arrays: TraceArrays, profile: Profile, name: str) -> tuple[TraceArrays, Profile]:
    """Return trace and costs of one of several drafters: the first one, or the one of this name."""
    known = ", ".join(arrays.drafters)
    if name and name not in arrays.drafters:
        raise InputError(f"--decide: expected one of the drafters {known} after the @, not {name!r}")
    if arrays.tree.drafters == 1:
        return arrays, profile
    index, costs = arrays.drafters.index(name) if name else 0, profile.each_drafter
    if index >= len(costs):
        raise InputError(f"--profile: expected the costs of {known}, got those of {len(costs)}")
    return arrays.each_drafter[index], costs[index]


def _stop_options(options: TrainOptions) -> TrainOptions:
    """Return the options of the stop policies: with `decide` "both", `features` are those of the route."""
    if options.decide not in ("route", "both"):
        return options
    return dataclasses.replace(options, decide="stop", features=None, name=None)


def _fit_route(
    options: TrainOptions, plans: Sequence[Plan], opened: Sequence[Trace], profile: Profile, progress: Progress
) -> RoutingPolicy:
    """Return a route, with learned stop policies if there is a plan for them.

    Raises:
        InputError: there are several traces, or the profile has the costs of other drafters; see also `fit_route`.
        TraceError: the trace is not dense, or has one drafter.
    """
    from .route import fit_route

    if len(opened) > 1:
        raise InputError("--decide route: expected one trace")
    extra = label_columns([trace.header for trace in opened], any(plan.head.soft for plan in plans))
    arrays = trace_arrays(opened[0], None if plans else options.features, extra)
    check_whole(arrays, "collect dense traces")
    drafters = arrays.tree.drafters
    if drafters < 2:
        raise TraceError("--decide route: expected a trace of several drafters; collect with --drafter given for each")
    if len(profile.others) != drafters - 1:
        raise InputError(
            f"--profile: expected the costs of {', '.join(arrays.drafters)}, got {len(profile.others) + 1} drafters"
        )
    kind = options.heads[0] if options.head else ROUTE_HEAD
    head = head_of(options, kind) if isinstance(kind, str) else kind
    stops = []
    for own, costs in zip(arrays.each_drafter, profile.each_drafter, strict=True):
        single = dataclasses.replace(costs, batch=None)  # lengths for batches would be of one drafter
        stops += [fit_policy(plan, own, single, None, progress) for plan in plans]
    return fit_route(arrays, profile, head, options, stops, progress)


def _read(traces: Sequence[Trace], plans: Sequence[Plan]) -> TraceArrays:
    """Return the traces with all features and hidden states that the plans read."""
    names = tuple(dict.fromkeys(name for plan in plans for name in plan.features))
    if plans[0].rule == "gain":
        recorded = [name for name in ("noisy_score", "noisy_margin") if name in traces[0].header.features]
        return trace_arrays(traces[0], tuple(dict.fromkeys((*names, *recorded))))
    hidden = tuple(dict.fromkeys(name for plan in plans for name in plan.hidden))
    extra = label_columns([trace.header for trace in traces], any(plan.head.soft for plan in plans))
    return joined_arrays(traces, names, hidden, extra)


def fit_policy(
    plan: Plan, arrays: TraceArrays, profile: Profile, mixed: TraceArrays | None = None, progress: Progress = silent
) -> LearnedPolicy:
    """Return a policy that was fitted on a trace.

    Args:
        plan: what to fit.
        arrays: all prompts.
        profile: what rounds cost.
        mixed: a trace that heads are fitted on instead.
        progress: see `Progress`.

    Raises:
        TraceError: the profile ends before the trace, or the trace cannot be replayed and the rule needs that.
    """
    options, header = plan.options, arrays.header
    arrays, report = split_report(arrays, options.report_share, options.seed)
    if mixed is not None and report is not None:
        report_prompts = set(report.clusters)
        mixed = mixed.subset([at for at, name in enumerate(mixed.clusters) if name not in report_prompts])
    folds = prompt_folds(arrays, options.folds, options.seed)
    policy: LearnedPolicy
    if plan.rule == "gain":
        policy, metrics = choose_tree(plan, arrays, folds, profile, report, progress)
    else:
        policy, metrics = _fit_chain(plan, arrays, folds, profile, report, progress, mixed)
    prompts = training_prompts(arrays, folds, report, mixed)
    provenance = {"drafter": header.facts.get("drafter"), "tree": metrics.get("tree")}
    policy.metadata = dataclasses.replace(
        policy.metadata, verification=header.verification, label=header.label, sampling=dict(header.sampling),
        pair=dict(header.pair), prompts=prompts, provenance={k: v for k, v in provenance.items() if v is not None},
        metrics={**{f"{name}_prompts": len(names) for name, names in prompts.items()}, **metrics},
    )  # fmt: skip
    return policy


# Chains


def _fit_chain(
    plan: Plan,
    arrays: TraceArrays,
    folds: Folds,
    profile: Profile,
    report: TraceArrays | None,
    progress: Progress,
    mixed: TraceArrays | None,
) -> tuple[LearnedPolicy, dict[str, Any]]:
    """Fit heads, calibrate them, choose the rule, and score the policy on the report prompts."""
    if profile.max_depth < arrays.depth:
        raise TraceError(
            f"the profile ends at depth {profile.max_depth}, the trace at {arrays.depth}; measure it deeper"
        )
    if plan.is_tuned:
        check_whole(arrays, "give --rule survival, step or any with a --threshold")
    fitted, visited, profile = _fit_heads(plan, arrays, folds, profile, progress, mixed)
    policies = _calibrated(plan, arrays, fitted, visited)
    acceptance = conditional_acceptance(arrays, visited)
    # Every prompt is played by a head that was fitted without it. The head of the first fold is saved.
    parts = left_out_parts(arrays, folds, fitted.heads)
    progress("choose the rule", 0, 1)
    policy, rate = choose_rule(plan, policies[0], arrays, profile, acceptance, parts)
    progress("choose the rule", 1, 1)
    profile = policy.profile if isinstance(policy, BatchStop) else profile  # with its decisions
    kinds = {"accept_calibration": policy.accept.kind, "next_calibration": policy.next.kind}
    metrics: dict[str, Any] = {"rows": fitted.rows, **kinds}
    if report is not None:
        metrics |= _held_out_metrics(policy, report, profile)
    policy.metadata = TrainingMetadata(rho=rate, acceptance=acceptance, profile=profile.record(policy.cost_name))
    return policy, metrics


def _fit_heads(
    plan: Plan, arrays: TraceArrays, folds: Folds, profile: Profile, progress: Progress, mixed: TraceArrays | None
) -> tuple[FoldHeads, Visits, Profile]:
    """Return the heads of the last pass, rounds to calibrate them on, and the profile with the price of their decisions.

    Heads are fitted on the rounds that fixed lengths near the best one visit. What follows uses the rounds that a policy with
    these heads visits on prompts left out of their fit, because policies skip easy runs and HISTORY features depend on their
    own rounds.
    """

    def fit(visited: Visits) -> FoldHeads:
        return fit_folds(
            arrays, folds, plan.features, visited, plan.head, seed=plan.options.seed, all_folds=plan.options.cross_fit,
            progress=progress, mixed=mixed,
        )  # fmt: skip

    if arrays.only_positions:
        visited = Visits.without_history((~arrays.cut).nonzero()[:, 0])
        return fit(visited), visited, profile
    grid = fixed_grid(arrays, profile)
    # Length 0 is left out: it visits every anchor, as no policy that drafts does.
    first = max(1, grid.index(best_of(grid)) - 1)
    visited = reference = visits(arrays, grid[first : first + REFERENCE_LENGTHS])
    for _ in range(plan.options.passes or plan.head.passes):
        fitted = fit(visited)
        policies = _calibrated(plan, arrays, fitted, visited)
        profile = add_decisions(profile, policies[:1], arrays.header.vocabulary, arrays.header.hidden)
        acceptance = conditional_acceptance(arrays, visited)
        rule = _rule_without_search(plan, policies[0], arrays, profile, acceptance, best_of(grid).rate)
        on_policy = on_policy_rounds(arrays, folds, [policy.with_rule(rule) for policy in policies], profile)
        visited = on_policy if len(on_policy.row) >= MIN_ROUNDS else on_policy.concatenate(reference)
    return fitted, visited, profile


def _calibrated(plan: Plan, arrays: TraceArrays, fitted: FoldHeads, visited: Visits) -> list[LearnedPolicy]:
    """Return a calibrated policy for each head, under a rule to be replaced."""
    maps = calibrate(held_out_outputs(fitted, arrays, plan.features, visited), not plan.head.calibrated)
    rule = make_rule(plan.rule, 0.5)
    return [
        LearnedPolicy(
            plan.name, plan.features, head, maps.accept, maps.next, rule, arrays.depth, survival=maps.survival
        )
        for head in fitted.heads
    ]


def _rule_without_search(
    plan: Plan, policy: LearnedPolicy, arrays: TraceArrays, profile: Profile, acceptance: Sequence[float], rho: float
) -> Rule:
    """Return a rule near the one that `choose_rule` chooses; `rho` is the best fixed length's rate."""
    if plan.options.threshold is not None and not plan.is_tuned:
        return make_rule(plan.rule, plan.options.threshold)
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
        solved, rate = solve_derived(policy, arrays, profile, acceptance, rates=rates)
        return tune_batch_lengths(solved, parts, profile), rate
    if plan.rule == "batch":
        verification = arrays.header.verification
        # The rule looks ahead with `acceptance`; the verification says whether drawn tokens may be left out.
        policy.metadata = dataclasses.replace(policy.metadata, acceptance=tuple(acceptance), verification=verification)
        return tune_batch_rule(policy, parts, profile), 0.0

    def fastest(thresholds: Sequence[float]) -> float:
        replayed = rates([policy.with_rule(make_rule(plan.rule, threshold)) for threshold in thresholds])
        return thresholds[replayed.index(max(replayed))]

    threshold = plan.options.threshold
    if threshold is None and plan.published_thresholds:
        threshold = fastest(plan.published_thresholds)
    elif threshold is None:
        best = fastest(THRESHOLDS)
        threshold = fastest([t for t in (best, *(best + step for step in THRESHOLD_OFFSETS)) if 0.0 < t < 1.0])
    return policy.with_rule(make_rule(plan.rule, threshold)), 0.0


def _held_out_metrics(policy: LearnedPolicy, report: TraceArrays, profile: Profile) -> dict[str, Any]:
    """Return the figures of a policy on report prompts.

    They are the replayed rate and that of the best fixed length there, and AUC and log loss of both outputs on the rounds
    that the policy plays.
    """
    metrics: dict[str, Any] = {}
    if report.only_positions:
        visited = Visits.without_history((~report.cut).nonzero()[:, 0])
    else:
        rounds, fixed_rate = replay(report, policy, profile), best_of(fixed_grid(report, profile)).rate
        visited = visits(report, [rounds])
        metrics = {
            "held_out_tokens_per_s": rounds.rate,
            "held_out_best_fixed_tokens_per_s": fixed_rate,
            "held_out_ratio_to_best_fixed": rounds.rate / fixed_rate,
        }
    single = FoldHeads((policy.head,), Folds(torch.zeros(report.sequences, dtype=torch.int64), 1), 0)
    outputs = held_out_outputs(single, report, policy.features, visited)
    if not len(outputs.length):
        return metrics
    metrics["held_out_rounds"] = len(outputs.length)
    for output, (name, calibrator) in enumerate((("accept", policy.accept), ("next", policy.next))):
        logits, labels, _ = outputs.labelled(output)
        if len(labels):
            constant = np.full(len(labels), labels.mean(dtype=np.float64))
            metrics |= {
                f"{name}_auc": auc(logits, labels),
                f"{name}_log_loss": log_loss(calibrator(logits), labels),
                f"{name}_log_loss_constant": log_loss(constant, labels),
            }
    return metrics
