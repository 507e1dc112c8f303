"""`train`: traces in, a policy folder out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...collect.schema import Header
from ...collect.store import Trace
from ...decode.profile import add_decisions
from ...policies import kernels
from ...policies.arguments import as_list
from ...policies.batch_rules import BatchStop
from ...policies.display import Progress, shown, silent
from ...policies.errors import InputError, TraceError
from ...policies.features import HISTORY_FEATURES
from ...policies.files import prepare_output_dir
from ...policies.heads.base import Head
from ...policies.learned import LearnedPolicy, TrainingMetadata
from ...policies.profile import Profile, as_profile
from ...policies.storage import save_policy
from ..heads import NO_PARAMS, head_class, make_head
from ..heads.base import HeadEstimator, engine_features
from ..heads.calibration import Scored, auc, log_loss, survival, survival_scores
from ..heads.crossfit import (
    FOLDS,
    FoldHeads,
    Folds,
    calibrate,
    fit_folds,
    held_out_outputs,
    labelled_rows,
    own_visits,
    prompt_folds,
)
from ..heads.rows import Visits, conditional_acceptance, label_columns, mixed_arrays, visits
from ..replay.run import replay
from ..replay.traces.arrays import TraceArrays, trace_arrays
from ..replay.traces.checking import check_whole, load_traces, tell_other_rounds
from ..replay.traces.concatenate import joined_arrays, temperatures
from .plan import (
    REPORT_SHARE,
    Plan,
    default_features,
    make_rule,
    split_report,
    training_prompts,
    tree_features,
    without_noise,
)
from .rules import best_of, fixed_grid, left_out_parts
from .settle import choose_rule, provisional_rule
from .tree_rules import choose_tree

TUNED_HEADS = ("logistic", "tokens", "mlp", "xgboost")
TUNED_RULES = ("derived", "survival", "step")

REFERENCES = 5
"""Fixed lengths near the best one, on whose rounds heads are fitted first."""

MIN_ROUNDS = 5000
"""Rounds of the policy's own below which those of fixed lengths are added."""


@dataclass(frozen=True)
class Trained:
    """A trained policy and its figures on report prompts.

    Attributes:
        policy: ready to use.
        path: its folder, or None.
        metrics: rows, log loss and AUC of both outputs, kinds of calibration, replayed rate and best fixed rate,
            `reliability`, a row for each depth and temperature (`survival_scores`), and `trials` of a search.
    """

    policy: LearnedPolicy
    path: Path | None
    metrics: dict[str, Any]


def train(
    traces: Trace | str | Path | Sequence[Trace | str | Path],
    profile: Profile | str | Path,
    *,
    head: str | HeadEstimator | Sequence[str | HeadEstimator] | None = None,
    out: str | Path | None = None,
    rule: str | Sequence[str] | None = None,
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
    mixed: Trace | str | Path | None = None,
    host: str | None = None,
    nodes: Sequence[int] = (),
    tune: int | None = None,
    policies: Sequence[str] = (),
    storage: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress = shown,
) -> Trained:
    """Fit a stop head on traces, calibrate it, and choose its stop rule.

    The prompts are split by a hash of their text into three sets. The saved head is fitted on the first. Early stopping,
    calibration, thresholds and rho use the second; with `cross_fit` both sets change places fold by fold, so that all of
    their prompts serve for selection, each with a head that was fitted without it. All figures called held-out are of the
    third, the report prompts, which influence nothing.

    Args:
        traces: one trace or its folder, or several of one pair, such as of several temperatures; the head then reads
            `temperature` unless `features` says otherwise.
        profile: what rounds cost, or its file; the derived rule is solved for it.
        head: an estimator, or the name of one (`heads.HEADS`); with `tune` several. Default: logistic, or `TUNED_HEADS`.
        out: the policy folder to write; None keeps the policy in memory.
        rule: "derived" (look-ahead, no threshold), "survival", "step", "any", "batch" for batches (`policies.batch_rules`) or
            "gain" for trees (`tree_rules`); with `tune` several. Default: the one that the head was published with
            (`HeadEstimator.rule`), or the derived one, or `TUNED_RULES`.
        threshold: of survival, step and any; None = the one that replays fastest, of the published ones if there are any.
        features: scalar features; by default those that every trace of chains holds, or those that the head was
            published with.
        hidden: hidden states; by default those of the published head, or for a head that takes any all that are recorded.
        name: of the policy; by default the head's.
        seed: of split, fit and search.
        folds: parts that the training prompts are split into; the saved head is fitted on all but the first.
        report_share: share of the prompts that all held-out figures come from; 0 = none, without such figures.
        cross_fit: fit a head for each fold, so that calibration rests on all prompts; else on the first fold alone.
        passes: times that heads are fitted; from the second on, on the rounds that the policy before visits. None = the
            head's default.
        params, trainer: of heads that are given by name (`heads.make_head`).
        mixed: a trace of `collect --mix` that the head is fitted on instead, as SpecDec++'s is. `traces` then serve for
            calibration and the rule.
        host: the engine that the policy will run in (`heads.base.ENGINES`): it then reads only what that engine has.
        nodes: with rule "gain", sizes of the sub-trees that are tried, of which the fastest is kept; none = as recorded.
        tune: number of trials of a search over heads, hyper-parameters and rules (`tune.search`).
        policies: specs with ranges that the search tries too: `name?x=0.1..0.9` or `name?x=1|2|4`.
        storage: journal file of optuna that keeps the trials; a search continues from it.
        overwrite: replace the contents of `out`.
        progress: see `Progress`.

    Raises:
        InputError: an unknown head or rule, or a folder that is not empty.
        TraceError: the traces lack a feature, do not belong together or have too few prompts.
    """
    kernels.load(progress)
    opened, profile = [load_traces(one) for one in as_list(traces, Trace)], as_profile(profile)
    mixed = None if mixed is None else load_traces(mixed)
    if not opened:
        raise TraceError("--traces: expected at least one trace")
    heads = as_list(head, HeadEstimator) if head else [*TUNED_HEADS] if tune is not None else ["logistic"]
    rules: list[str | None] = as_list(rule) if rule else [*TUNED_RULES] if tune is not None else [None]
    features, hidden = (None if names is None else as_list(names) for names in (features, hidden))
    if nodes and (rules != ["gain"] or min(nodes) < 1):
        raise InputError("--nodes: expected numbers of 1 or more, of the trees to try with --rule gain")
    is_gain = "gain" in rules
    if is_gain and (len(opened) != 1 or mixed is not None or host is not None or tune is not None):
        raise InputError("--rule gain: expected one trace of trees; leave out --mixed, --for and --tune")
    if tune is None and (policies or len(heads) > 1 or len(rules) > 1):
        raise InputError("--policy: several heads, rules or policies are compared with --tune N")
    if tune is not None and (threshold is not None or hidden or mixed is not None):
        raise InputError("--tune: leave out --threshold, --hidden and --mixed; a search chooses thresholds itself")
    tell_other_rounds(profile, opened[0].header)
    plans = []
    for kind, wanted in ((kind, wanted) for wanted in rules for kind in heads):
        estimator = _estimator(kind, params, trainer, shared=len(heads) > 1) if isinstance(kind, str) else kind
        usual = default_features(opened)
        if is_gain:
            names, states = tuple(features or tree_features(estimator)), tuple(hidden or ())
        elif host is not None:
            names = engine_features(host, opened, type(estimator), features, usual, hidden or ())
            states = ()
        else:
            names = tuple(features or without_noise(estimator.default_features(usual), opened[0].header))
            states = estimator.hidden_states(opened, hidden)
        label = name or ("" if is_gain else kind if isinstance(kind, str) else estimator.form)
        plans.append(
            Plan(estimator, wanted or estimator.rule or "derived", threshold, names, label, seed, folds, cross_fit, passes,
                 states, report_share)
        )  # fmt: skip
    sources = [trace.folder for trace in (*opened, mixed) if trace is not None]
    folder = None
    if out is not None:
        if storage is not None and Path(out).resolve() in Path(storage).resolve().parents:
            raise InputError(f"--storage: {storage} is in the folder --out, which is replaced; choose another file")
        folder = prepare_output_dir(out, overwrite=overwrite, inputs=[*sources, profile.source])
    arrays = _read(opened, plans)
    if not features and arrays.only_positions:  # their rounds have no earlier ones
        plans = [
            dataclasses.replace(plan, features=tuple(n for n in plan.features if n not in HISTORY_FEATURES))
            for plan in plans
        ]
    plan, more = plans[0], {}
    if tune is not None:
        from .tune import search

        check_whole(arrays, "leave out --tune and give --rule survival, step or any with a --threshold")
        training = split_report(arrays, report_share, seed)[0]
        sampled_at = temperatures(opened)
        plan, trials = search(
            plans, training, profile, tune, lambda plan, part: train_arrays(plan, part, profile, sampled_at).policy,
            policies, storage, progress=progress,
        )  # fmt: skip
        more = {"trials": trials}
    return train_arrays(
        plan, arrays, profile, temperatures(opened), [str(path) for path in sources], folder, progress,
        None if mixed is None else mixed_arrays(mixed, opened[0], plan.features, plan.hidden), more, nodes,
    )  # fmt: skip


def _estimator(kind: str, params: Mapping[str, Any], trainer: Mapping[str, Any], shared: bool) -> HeadEstimator:
    """Return a head; `shared` parameters of several heads apply to those that have them."""
    if shared:
        known = head_class(kind).param_names()
        params = {key: value for key, value in params.items() if key in known}
        trainer = trainer if "trainer" in known else NO_PARAMS
    return make_head(kind, params, trainer)


def _read(traces: Sequence[Trace], plans: Sequence[Plan]) -> TraceArrays:
    """Return the traces with all features and hidden states that the plans read."""
    names = tuple(dict.fromkeys(name for plan in plans for name in plan.features))
    if plans[0].rule == "gain":
        recorded = [name for name in ("noisy_score", "noisy_margin") if name in traces[0].header.features]
        return trace_arrays(traces[0], tuple(dict.fromkeys((*names, *recorded))))
    hidden = tuple(dict.fromkeys(name for plan in plans for name in plan.hidden))
    extra = label_columns([trace.header for trace in traces], any(plan.head.soft for plan in plans))
    return joined_arrays(traces, names, hidden, extra)


def train_arrays(
    plan: Plan,
    arrays: TraceArrays,
    profile: Profile,
    sampled_at: Sequence[float],
    sources: Sequence[str] = (),
    folder: Path | None = None,
    progress: Progress = silent,
    mixed: TraceArrays | None = None,
    more: Mapping[str, Any] = NO_PARAMS,
    nodes: Sequence[int] = (),
) -> Trained:
    """Train on a trace that has been read: split, fit, calibrate, choose the rule, measure, save.

    Args:
        plan: what to fit.
        arrays: all prompts.
        profile: what rounds cost.
        sampled_at: temperatures of the traces.
        sources: folders of the traces.
        folder: the policy folder to write; None keeps the policy in memory.
        progress: see `Progress`.
        mixed: a trace that heads are fitted on instead.
        more: further metrics.
        nodes: see `train`.

    Raises:
        TraceError: the profile ends before the trace, or the trace cannot be replayed and the rule needs that.
    """
    arrays, report = split_report(arrays, plan.report_share, plan.seed)
    if mixed is not None and report is not None:
        held = set(report.clusters)
        mixed = mixed.subset([at for at, name in enumerate(mixed.clusters) if name not in held])
    folds = prompt_folds(arrays, plan.folds, plan.seed)
    provenance: dict[str, Any] = {}
    if plan.rule == "gain":
        sizes = nodes or (arrays.tree.nodes,)
        choice = choose_tree(plan, arrays, folds, profile, sizes, report=report, progress=progress)
        policy: LearnedPolicy = choice.policy
        files, metrics = choice.files, {"tree": choice.arrays.tree.name, **choice.metrics}
        provenance["tree"] = choice.arrays.tree.name
    else:
        policy, files, metrics = _fit_chain(plan, arrays, folds, profile, report, progress, mixed)
    prompts = training_prompts(arrays, folds, report, mixed)
    metrics = {**{f"{name}_prompts": len(names) for name, names in prompts.items()}, **metrics, **more}
    solved = policy.metadata
    policy.metadata = dataclasses.replace(
        training_metadata(arrays.header, sampled_at, sources, plan.seed, **provenance),
        rho=solved.rho, acceptance=solved.acceptance, profile=solved.profile, metrics=metrics, prompts=prompts,
    )  # fmt: skip
    return Trained(policy, save_policy(policy, folder, files) if folder is not None else None, metrics)


def training_metadata(
    header: Header, sampled_at: Sequence[float], sources: Sequence[str], seed: int, **provenance: Any
) -> TrainingMetadata:
    """Return the part of a policy's metadata that depends on its traces alone."""
    if (drafter := header.facts.get("drafter")) is not None:
        provenance["drafter"] = drafter  # exported with the policy (`train.export.hf`)
    return TrainingMetadata(
        temperature=sampled_at[0] if len(sampled_at) == 1 else tuple(sampled_at),
        verification=header.verification,
        label=header.label,
        sampling=dict(header.sampling),
        pair=dict(header.pair),
        provenance={"traces": ", ".join(sources), **provenance, "seed": seed, "specstop": version("specstop")},
    )


def _fit_chain(
    plan: Plan,
    arrays: TraceArrays,
    folds: Folds,
    profile: Profile,
    report: TraceArrays | None,
    progress: Progress,
    mixed: TraceArrays | None,
) -> tuple[LearnedPolicy, dict[str, bytes], dict[str, Any]]:
    """Return the policy, files for later training, and metrics.

    Heads are fitted on the rounds that fixed lengths near the best one visit. What follows uses the rounds that a policy with
    these heads visits on prompts left out of their fit, because policies skip easy runs and HISTORY features depend on their
    own rounds.
    """
    if profile.max_depth < arrays.depth:
        raise TraceError(
            f"the profile ends at depth {profile.max_depth}, the trace at {arrays.depth}; measure it deeper"
        )
    if plan.is_tuned:
        check_whole(arrays, "give --rule survival, step or any with a --threshold")

    def drafted(fitted: FoldHeads, visited: Visits) -> tuple[list[LearnedPolicy], dict[str, str]]:
        """Return a calibrated policy for each head, under a rule to be replaced, and the kinds of calibration."""
        outputs = held_out_outputs(fitted, arrays, plan.features, visited)
        calibrated = calibrate(outputs, not plan.head.calibrated)
        maps, rule = (calibrated.accept, calibrated.next), make_rule(plan.rule, 0.5)
        return [
            LearnedPolicy(plan.name, plan.features, head, *maps, rule, arrays.depth, survival=calibrated.survival)
            for head in fitted.heads
        ], calibrated.kinds

    grid = [] if arrays.only_positions else fixed_grid(arrays, profile)
    if grid:
        best = grid.index(best_of(grid))
        # Length 0 is left out: it visits every anchor, as no policy that drafts does.
        visited = visits(arrays, grid[max(1, best - 1) : max(1, best - 1) + REFERENCES])
    else:
        visited = Visits.once((~arrays.cut).nonzero()[:, 0])
    reference = visited
    for _ in range(plan.passes or plan.head.passes):
        fitted = fit_folds(
            arrays, folds, plan.features, visited, plan.head, seed=plan.seed, every=plan.cross_fit, progress=progress,
            mixed=mixed,
        )  # fmt: skip
        if arrays.only_positions:
            break
        drafts, _ = drafted(fitted, visited)
        profile = add_decisions(profile, drafts[:1], arrays.header.vocabulary, arrays.header.hidden)
        acceptance = conditional_acceptance(arrays, visited)
        rule = provisional_rule(plan, drafts[0], arrays, profile, acceptance, best_of(grid).rate)
        own = own_visits(arrays, folds, [draft.with_rule(rule) for draft in drafts], profile)
        visited = own if len(own.row) >= MIN_ROUNDS else own.with_more(reference)
    drafts, kinds = drafted(fitted, visited)
    acceptance = conditional_acceptance(arrays, visited)
    # Every prompt is played by a head that was fitted without it. The head of the first fold is saved.
    parts = left_out_parts(arrays, folds, fitted.heads)
    progress("choose the rule", 0, 1)
    policy, rate = choose_rule(plan, drafts[0], arrays, profile, acceptance, parts)
    progress("choose the rule", 1, 1)
    profile = policy.profile if isinstance(policy, BatchStop) else profile  # with its decisions
    metrics = {"rows": fitted.rows, **kinds}
    if report is not None:
        metrics |= _held_out_metrics(policy, report, profile, plan.seed)
    policy.metadata = TrainingMetadata(rho=rate, acceptance=acceptance, profile=profile.record(policy.cost_name))
    return policy, fitted.files, metrics


def _held_out_metrics(policy: LearnedPolicy, report: TraceArrays, profile: Profile, seed: int) -> dict[str, Any]:
    """Return the figures of a policy on report prompts.

    They are the replayed rate and that of the best fixed length there, AUC and log loss of both outputs on the rounds that
    the policy plays, and the calibration of survival by depth.
    """
    metrics: dict[str, Any] = {}
    if report.only_positions:
        visited = Visits.once((~report.cut).nonzero()[:, 0])
    else:
        played, fixed = replay(report, policy, profile), best_of(fixed_grid(report, profile)).rate
        visited = visits(report, [played])
        metrics = {
            "held_out_tokens_per_s": played.rate,
            "held_out_best_fixed_tokens_per_s": fixed,
            "held_out_ratio_to_best_fixed": played.rate / fixed,
        }
    heads: tuple[Head, ...] = (policy.head,)
    single = FoldHeads(heads, Folds(torch.zeros(report.sequences, dtype=torch.int64), 1), {}, 0)
    outputs = held_out_outputs(single, report, policy.features, visited)
    if not len(outputs.length):
        return metrics
    metrics["held_out_rounds"] = len(outputs.length)
    for rows, calibrator in zip(labelled_rows(outputs), (policy.accept, policy.next), strict=True):
        if len(rows.labels):
            constant = np.full(len(rows.labels), rows.labels.mean())
            metrics |= {
                f"{rows.name}_auc": auc(rows.logits, rows.labels),
                f"{rows.name}_log_loss": log_loss(calibrator(rows.logits), rows.labels),
                f"{rows.name}_log_loss_constant": log_loss(constant, rows.labels),
            }
    accept = policy.accept(outputs.logits[:, 1:, 0])
    accept[:, : outputs.lag] = 1.0  # nothing is scored there: `kernels.heads.decide`
    predicted = survival(accept, policy.survival)
    scored = Scored(predicted, outputs.length, outputs.temperature, outputs.drawn)
    return {**metrics, "reliability": survival_scores(scored, seed=seed)}
