"""`train`: traces in, a policy folder out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...collect.store.folder import Trace
from ...decode.profile import add_decisions
from ...policies import kernels
from ...policies.arguments import as_list, check_limits
from ...policies.batch_rules import BatchStop
from ...policies.display import Progress, shown, silent
from ...policies.errors import InputError, TraceError
from ...policies.features import HISTORY_FEATURES
from ...policies.heads.base import Head
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ...policies.storage import save_policy
from ..heads import NO_PARAMS, make_head
from ..heads.base import HeadEstimator, engine_features
from ..heads.crossfit import (
    FOLDS,
    Calibrated,
    FoldHeads,
    Folds,
    calibrate,
    fit_folds,
    held_out_outputs,
    own_visits,
    prompt_folds,
)
from ..heads.rows import Visits, conditional_acceptance, label_columns, mixed_arrays, visits
from ..replay.run import Replayed, replay
from ..replay.traces.arrays import TraceArrays
from ..replay.traces.checking import check_whole, tell_other_rounds
from ..replay.traces.concatenate import joined_arrays, temperatures
from .continuation.fit import MARGINS, fit_continuation
from .continuation.values import FOLDS as VALUE_FOLDS
from .fit_rule import RULES, is_tuned, passing_rule, ruled
from .held_out import REPORT_SHARE, counts, head_scores, held_out_speed, split_report, training_prompts
from .plan import Plan, check_plan, check_used, default_features, without_noise
from .policy_iteration import MOST_ROUNDS
from .rates import left_out_parts
from .trained import Trained, claimed, facts_of
from .tuning.rates import best_of, fixed_grid

PATH_FEATURES = ("path_logprob",)
"""What a continuation policy reads besides: it keeps no product of probabilities that would tell of the path."""

REFERENCES = 5
FEW = 5000
"""Rounds of the policy's own below which those of fixed lengths count too."""


def train(
    traces: Trace | Sequence[Trace],
    profile: Profile,
    *,
    head: str | HeadEstimator = "logistic",
    out: str | Path | None = None,
    rule: str | None = None,
    threshold: float | None = None,
    features: Sequence[str] | None = None,
    hidden: Sequence[str] | None = None,
    name: str | None = None,
    seed: int = 0,
    folds: int = FOLDS,
    report_share: float = REPORT_SHARE,
    cross_fit: bool = True,
    passes: int | None = None,
    params: Mapping[str, Any] = NO_PARAMS,
    trainer: Mapping[str, Any] = NO_PARAMS,
    mixed: Trace | None = None,
    host: str | None = None,
    nodes: Sequence[int] = (),
    overwrite: bool = False,
    progress: Progress = shown,
) -> Trained:
    """Fit a stop head on traces, calibrate it, and give it a stop rule.

    The prompts are split by a hash of their text into three sets. The saved head is fitted on one. Early stopping,
    calibration, thresholds and rho use the second; with `cross_fit` both sets change places fold by fold, so that all of
    their prompts serve for selection, each with a head that was fitted without it. All figures called held-out are of the
    third, the report prompts, which influence nothing.

    Args:
        traces: from `collect`: one trace, or several of one pair, such as of several temperatures; the head then reads
            `temperature` unless `features` says otherwise.
        profile: what rounds cost; the derived rule is solved for it.
        head: an estimator, or the name of one (`heads.HEADS`).
        out: the policy folder to write; None keeps the policy in memory.
        rule: "gain" for trees (`trees.run.train_tree`), "batch" for batches (`policies.batch_rules`); else "derived"
            (look-ahead, no threshold), "survival", "step" or "any"; by default the one that the head was published with
            (`HeadEstimator.rule`), or the derived one.
        threshold: of the latter three; None = the one that replays fastest, of the published ones where there are some.
        features: scalar features; by default those that every trace of chains holds, or those that the head was
            published with.
        hidden: hidden states; by default those of the published head, or for a head that takes any all that are recorded.
        name: of the policy; by default the head's.
        seed: of split and fit.
        folds: parts that the training prompts are split into; the saved head is fitted on all but the first.
        report_share: share of the prompts that all held-out figures come from; 0 = none, without such figures.
        cross_fit: fit a head for each fold, so that calibration rests on all prompts; else on the first fold alone.
        passes: times that heads are fitted; from the second on, on the rounds that the policy before visits. None = what
            is usual for the head, or until the visits settle (rule "continuation").
        params, trainer: of a head that is given by its name (`heads.make_head`).
        mixed: a trace of `collect --mix` that the head is fitted on in the place of `traces`, as SpecDec++'s is; on `traces`
            it is calibrated and settled.
        host: the engine that the policy is to run in (`heads.base.ENGINES`): it then reads only what that engine hands over.
        nodes: with rule "gain", sizes of the sub-trees that are tried, of which the fastest is kept; none = as recorded.
        overwrite: replace what is in `out`.
        progress: see `Progress`.

    Raises:
        InputError: an unknown head or rule, or a folder that is not empty.
        TraceError: the traces lack a feature, do not belong together or have too few prompts.
    """
    kernels.load(progress)
    check_limits(report_share=report_share)
    opened = as_list(traces, Trace)
    features, hidden = (None if names is None else as_list(names) for names in (features, hidden))
    if not opened:
        raise TraceError("--traces: expected at least one trace")
    tell_other_rounds(profile, opened[0].header)
    if nodes and (rule != "gain" or min(nodes) < 1):
        raise InputError("--nodes: expected numbers of 1 or more, of the trees to try with --rule gain")
    check_used(rule, cross_fit, params, trainer)
    named, name = name, name or (head if isinstance(head, str) else head.form)
    wanted = make_head(head, params, trainer) if isinstance(head, str) else head
    if rule == "continuation" and mixed is not None:
        raise InputError("--mixed: the rule continuation is fitted on the rounds of --traces; leave it out")
    usual = not features
    if host is not None:
        if rule == "gain":
            raise InputError(f"--for {host}: expected a rule for chains, not gain: no trees are drafted there")
        features = engine_features(host, opened, type(wanted), features, default_features(opened), hidden or ())
    if rule == "gain":
        if len(opened) != 1 or threshold is not None or hidden or mixed is not None:
            raise InputError("--rule gain: expected one trace of trees, and no threshold, hidden states or mixed trace")
        tree_plan = _tree_plan(wanted, features, named, seed, folds, passes, report_share)
        folder = None if out is None else claimed(out, opened, profile, overwrite=overwrite)
        from .trees.run import train_tree

        return train_tree(tree_plan, opened[0], profile, nodes, folder, progress)
    names = (
        tuple(features)
        if features
        else without_noise(wanted.default_features(default_features(opened)), opened[0].header)
    )
    if not features and rule == "continuation":
        names = tuple(dict.fromkeys((*names, *PATH_FEATURES)))
    plan = Plan(
        wanted, rule or wanted.rule or "derived", threshold, names, name, seed, folds, cross_fit, passes,
        () if host is not None else wanted.hidden_states(opened, hidden), report_share,
    )  # fmt: skip
    check_plan(plan)
    folder = None if out is None else claimed(out, [*opened, mixed], profile, overwrite=overwrite)
    extra = label_columns([trace.header for trace in opened], wanted.soft)
    arrays = joined_arrays(opened, names, plan.hidden, extra)
    if usual and arrays.only_positions:  # whose rounds have none before them
        plan = dataclasses.replace(plan, features=tuple(name for name in names if name not in HISTORY_FEATURES))
    sources = [str(trace.folder) for trace in (*opened, mixed) if trace is not None]
    return train_arrays(
        plan, arrays, profile, temperatures(opened), sources, folder, progress,
        None if mixed is None else mixed_arrays(mixed, opened[0], names, plan.hidden),
    )  # fmt: skip


def _tree_plan(
    head: HeadEstimator,
    features: Sequence[str] | None,
    name: str | None,
    seed: int,
    folds: int,
    passes: int | None,
    report_share: float,
) -> Plan:
    """Return what is to be fitted on trees, checked; arguments as of `train`."""
    from .trees.fit import tree_features

    names = tuple(features or tree_features(head))
    plan = Plan(
        head, "gain", None, names, name or "tree", seed, folds, passes=passes, report_share=report_share,
    )  # fmt: skip
    check_plan(plan)
    return plan


def train_arrays(
    plan: Plan,
    arrays: TraceArrays,
    profile: Profile,
    sampled_at: Sequence[float],
    sources: Sequence[str] = (),
    folder: Path | None = None,
    progress: Progress = silent,
    mixed: TraceArrays | None = None,
    more: Mapping[str, Any] | None = None,
) -> Trained:
    """Train on a trace that has been read: split, fit, calibrate, settle the rule, measure, save.

    Args:
        plan: checked.
        arrays: all prompts.
        profile: what rounds cost.
        sampled_at: temperatures of the traces.
        sources: folders of the traces.
        folder: the policy folder to write; None keeps the policy in memory.
        progress: see `Progress`.
        mixed: a trace that heads are fitted on instead.
        more: further metrics.

    Raises:
        TraceError: the profile ends before the trace, or the trace cannot be replayed and the rule needs that.
    """
    if profile.max_depth < arrays.depth:
        raise TraceError(
            f"the profile ends at depth {profile.max_depth}, the trace at {arrays.depth}; measure it deeper"
        )
    if is_tuned(plan.rule, plan.threshold):
        check_whole(arrays, "give --rule survival, step or any with a --threshold")
    arrays, report = split_report(arrays, plan.report_share, plan.seed)
    if mixed is not None and report is not None:
        held = set(report.clusters)
        mixed = mixed.subset([at for at, name in enumerate(mixed.clusters) if name not in held])
    if plan.rule == "continuation":
        return _train_continuation(plan, arrays, report, profile, sampled_at, sources, folder, progress)
    folds = prompt_folds(arrays, plan.folds, plan.seed)
    fitted, visited, profile = _fitted(plan, arrays, folds, profile, progress, mixed)
    calibrated = calibrate(held_out_outputs(fitted, arrays, plan.features, visited), not plan.head.calibrated)
    acceptance = conditional_acceptance(arrays, visited)
    drafts = [_policy(plan, head, calibrated, arrays.depth) for head in fitted.heads]
    # Every prompt is played by a head that was fitted without it. The head of the first fold is saved.
    parts = left_out_parts(arrays, folds, fitted.heads)
    progress("settle the rule", 0, 1)
    policy, rate = ruled(drafts[0], plan.rule, plan.threshold, arrays, profile, acceptance, plan.grid, parts)
    progress("settle the rule", 1, 1)
    profile = policy.profile if isinstance(policy, BatchStop) else profile  # with its decisions
    prompts = training_prompts(arrays, folds, report, mixed)
    metrics = {**counts(prompts), "rows": fitted.rows, **calibrated.kinds}
    if report is not None:
        metrics |= {} if report.only_positions else held_out_speed(policy, report, profile)
        metrics |= head_scores(policy, policy.head, report, profile, plan.seed)
    metrics |= more or {}
    policy.metadata = dataclasses.replace(
        facts_of(arrays.header, sampled_at, sources, plan.seed), rho=rate, acceptance=acceptance, metrics=metrics,
        profile=profile.record(policy.cost_name), prompts=prompts,
    )  # fmt: skip
    return Trained(policy, save_policy(policy, folder, fitted.files) if folder is not None else None, metrics)


def _train_continuation(
    plan: Plan,
    arrays: TraceArrays,
    report: TraceArrays | None,
    profile: Profile,
    sampled_at: Sequence[float],
    sources: Sequence[str],
    folder: Path | None,
    progress: Progress,
) -> Trained:
    """Train a head that predicts the value of drafting on: there is no calibration and no rate to solve."""
    margins = MARGINS if plan.threshold is None else (plan.threshold,)
    how: dict[str, Any] = {"name": plan.name, "seed": plan.seed, "margins": margins, "progress": progress}
    rounds = plan.passes or MOST_ROUNDS
    if plan.name.partition(":")[0] not in profile.decision_s:  # its decisions are measured on a first policy
        first = fit_continuation(arrays, profile, plan.features, plan.head.form, rounds=1, **how).made
        profile = add_decisions(profile, [first], arrays.header.vocabulary, arrays.header.hidden)
    settled = fit_continuation(arrays, profile, plan.features, plan.head.form, rounds=rounds, **how)
    policy, prompts = settled.made, training_prompts(arrays, prompt_folds(arrays, VALUE_FOLDS, plan.seed), report)
    metrics = {
        **counts(prompts),
        "policy_iterations": len(settled.rates),
        "best_iteration": settled.best,
        "visits_moved": settled.moved[-1],
    } | ({} if report is None else held_out_speed(policy, report, profile))
    # The rate of prompts that the head was not fitted on.
    select = arrays.subset(prompt_folds(arrays, VALUE_FOLDS, plan.seed).sequences(0))
    played = replay(select, policy, profile)
    policy.metadata = dataclasses.replace(
        facts_of(arrays.header, sampled_at, sources, plan.seed), rho=played.rate, metrics=metrics, prompts=prompts,
        profile=profile.record(policy.cost_name), acceptance=conditional_acceptance(select, visits(select, [played])),
    )  # fmt: skip
    return Trained(policy, save_policy(policy, folder, {}) if folder is not None else None, metrics)


def _fitted(
    plan: Plan,
    arrays: TraceArrays,
    folds: Folds,
    profile: Profile,
    progress: Progress,
    mixed: TraceArrays | None = None,
) -> tuple[FoldHeads, Visits, Profile]:
    """Return the heads of all folds, the rounds to calibrate on, and the profile with the policy's decisions.

    Heads are fitted on the rounds that fixed lengths near the best one visit; what comes after rests on the rounds that a
    policy with these heads visits on prompts left out of their fit, because policies skip easy runs and HISTORY features tell
    of their own play.
    """
    grid = [] if arrays.only_positions else fixed_grid(arrays, profile)
    visited = reference = _reference(arrays, grid)
    for _ in range(plan.passes or plan.head.passes):
        fitted = fit_folds(
            arrays, folds, plan.features, visited, plan.head, seed=plan.seed,
            every=plan.cross_fit, progress=progress, mixed=mixed,
        )  # fmt: skip
        if arrays.only_positions:
            break
        outputs = held_out_outputs(fitted, arrays, plan.features, visited)
        calibrated = calibrate(outputs, not plan.head.calibrated)
        drafts = [_policy(plan, head, calibrated, arrays.depth) for head in fitted.heads]
        profile = add_decisions(profile, drafts[:1], arrays.header.vocabulary, arrays.header.hidden)
        mean = conditional_acceptance(arrays, visited)
        rule = passing_rule(drafts[0], plan.rule, plan.threshold, arrays, profile, mean, best_of(grid).rate)
        own = own_visits(arrays, folds, [draft.with_rule(rule) for draft in drafts], profile)
        visited = own if len(own.row) >= FEW else own.with_more(reference)
    return fitted, visited, profile


def _reference(arrays: TraceArrays, grid: list[Replayed]) -> Visits:
    """Return the rounds of fixed lengths from just below the best one upwards; of texts not replayed every anchor once."""
    if not grid:
        return Visits.once((~arrays.cut).nonzero()[:, 0])
    best = grid.index(best_of(grid))
    # Length 0 is left out: it visits every anchor, as no policy that drafts does.
    return visits(arrays, grid[max(1, best - 1) : max(1, best - 1) + REFERENCES])


def _policy(plan: Plan, head: Head, calibrated: Calibrated, depth: int) -> LearnedPolicy:
    """Return the policy of a head, under a rule that is to be replaced."""
    return LearnedPolicy(
        plan.name, plan.features, head, calibrated.accept, calibrated.next, RULES[plan.rule](0.5), depth,
        survival=calibrated.survival,
    )  # fmt: skip
