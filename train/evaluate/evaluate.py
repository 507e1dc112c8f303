"""`evaluate`: what policies would gain on a pair and a machine, by exact replay of held-out traces."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...collect.store import Trace, replay_text
from ...decode.verify.modes import MODES, describe
from ...policies import kernels
from ...policies.contract import StopPolicy
from ...policies.display import Progress, shown
from ...policies.errors import InputError, PolicyFailure
from ...policies.files import prepare_output_dir
from ...policies.fixed import Confidence
from ...policies.host import is_trusted, validate_policy
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile, as_profile
from ...policies.registry import PolicySpec, as_policies
from ..fit.rules import tune_confidence
from ..fit.settle import settle_for
from ..replay.arrivals import at_once
from ..replay.log import play
from ..replay.rounds import ROUND_COLUMNS, evaluate_rounds
from ..replay.traces.arrays import TraceArrays, trace_arrays
from ..replay.traces.checking import (
    check_fit,
    check_training_traces,
    load_traces,
    require_disjoint_prompts,
    tell_other_rounds,
)
from .analysis import acceptance_bands, details, stop_costs
from .batches import Arrivals, by_batch, check_batches
from .comparison import Compared, Job, Setting, compare_rounds, compare_texts
from .importance import importance_section
from .pricing import ProfileBootstrap, unpriced_finding, with_prices
from .records import HF_DEFAULT, NOISY, TOO_FEW, TUNED, Report
from .report import write_report
from .report_comparison import compare_reports, read_report
from .statistics import Resamples, form_clusters
from .sweep import sweep as run_sweep
from .verdict import answer, doubts, findings, remedy

HUGGING_FACE = 0.4


def evaluate(
    traces: Trace | str | Path,
    profile: Profile | str | Path,
    policies: PolicySpec | Sequence[PolicySpec] = (),
    *,
    train_traces: Trace | str | Path | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    achievable: bool = False,
    detailed: bool | None = None,
    sweep: bool = False,
    compare: str | Path | None = None,
    batch: Sequence[int] = (),
    arrivals: Arrivals = at_once,
    cluster: str = "prompt",
    primary: str = "",
    allow_overlap: bool = False,
    overwrite: bool = False,
    progress: Progress = shown,
) -> Report:
    """Replay policies on held-out traces and compare them.

    Besides the given policies the report has plain decoding, the best fixed length (the whole grid, chosen on these very
    prompts and again in each bootstrap replicate), Hugging Face's default rule, the tuned confidence threshold, the
    oracle bound, and on trees the best static tree. On live traces, of which the text depends on the policy, single rounds
    are compared (`compare_rounds`), with their caveats.

    Args:
        traces: held-out prompts, as an object or a folder.
        profile: latency of any machine, as an object or a file.
        policies: to compare: policies, specs such as `fixed:4`, or policy folders.
        train_traces: on which thresholds are tuned and the derived rules' rates are solved for `profile`. Without them the
            saved rates are used and there is no tuned confidence threshold.
        out: folder for the report's files.
        seed: of the bootstrap.
        achievable: add the achievable estimate (`fit.achievable.achievable_estimate`; it takes minutes). A policy
            above it beyond its interval is a finding.
        detailed: compute `Report.details`; by default if there is an `out`.
        sweep: add from which cost of a draft step each policy pays.
        compare: folder or report.json of an earlier report: add what has changed.
        batch: also compare the policies with so many texts side by side, at each of these sizes.
        arrivals: returns the arrival times of so many requests in these batches (`replay.arrivals`).
        cluster: what intervals resample: "prompt" (with all its samples) or "group".
        primary: name of the one policy that was chosen before the evaluation. The answer is about it, and its interval
            needs no correction for the number of policies.
        allow_overlap: warn about prompts that are also in training traces, or that a policy was trained on, instead of
            raising.
        overwrite: replace a report in `out`.
        progress: see `Progress`.

    Raises:
        TraceError: a policy does not fit the trace, traces were sampled differently, evaluated prompts are training
            prompts, or an achievable estimate or batches are requested for traces that are not dense chains.
        InputError: `out` is not empty, or as `prepare_output_dir`; the profile has no batches of a size, or there are too
            few `arrivals`; no policy is called `primary`; there are no groups to resample.
        PolicyFailure: the primary policy raises an error. Other policies that do are left out (`Report.failed`).
    """
    trace, profile = load_traces(traces), as_profile(profile)
    training = None if train_traces is None else load_traces(train_traces)
    candidates = label_policies([validate_policy(policy) for policy in as_policies(policies)])
    names = [policy.shown_name for policy in candidates]
    if primary and primary not in names:
        raise InputError(
            f"--primary: expected the name of one of the policies ({', '.join(names) or 'none was given'}), not {primary!r}"
        )
    for policy in candidates:
        check_fit(policy, trace)
    if training is not None:
        check_training_traces(training, trace)
    tell_other_rounds(profile, trace.header)
    earlier = None if compare is None else read_report(compare)
    if out is not None:
        inputs = [trace.folder, training and training.folder, profile.source, *(policy.source for policy in candidates)]
        prepare_output_dir(out, overwrite=overwrite, inputs=[path for path in inputs if path])
    kernels.load(progress)
    is_live = trace.header.collector == "live"
    tuning = None if training is None else trace_arrays(training)
    arrays = trace_arrays(trace, extra=ROUND_COLUMNS if is_live else ())
    require_disjoint_prompts(arrays, tuning, candidates, allow=allow_overlap)
    check_batches(arrays, profile, batch, arrivals, seed)
    clusters = form_clusters(arrays.clusters, arrays.groups, arrays.text_tokens.tolist(), cluster)
    failed = {policy.shown_name: error for policy in candidates if (error := _failure(policy, arrays, profile))}
    if primary in failed:
        raise PolicyFailure(f"policy {primary} failed ({failed[primary].text}); it is the primary policy")
    candidates = [policy for policy in candidates if policy.shown_name not in failed]
    usual = [Confidence(HUGGING_FACE)] if trace.header.features else []  # an engine's records have no features
    profile, unpriced = with_prices(profile, [*usual, *candidates], trace.header)
    jobs = _jobs(candidates, tuning, profile, min(arrays.depth, profile.max_depth), bool(usual))
    costs = ProfileBootstrap(profile, seed)
    setting = Setting(arrays, costs, clusters, primary, seed, progress)
    compared = compare_rounds(setting, jobs) if is_live else compare_texts(setting, jobs, achievable)
    detailed = out is not None or earlier is not None if detailed is None else detailed
    report = _report(trace, setting, compared, detailed)
    if sweep and not is_live:
        report.details["sweep"] = run_sweep(
            arrays, candidates, costs, clusters, tuning=tuning, primary=primary, seed=seed, progress=progress
        )
    if batch:
        estimate = None
        if achievable:
            from ..fit.achievable import achievable_in_batches  # imports xgboost

            progress("achievable estimate of batches", 0, 1)
            estimate = achievable_in_batches(arrays, profile, seed)
        report.details["batch"] = by_batch(
            arrays, [(job.name, job.policy) for job in jobs], profile, batch, arrivals=arrivals, estimate=estimate,
            clusters=clusters, primary=primary, seed=seed, progress=progress,
        )  # fmt: skip
    if (estimates := importance_section(trace, candidates, profile, seed)) is not None:
        report.details["importance"] = estimates
    if earlier is not None:
        report.details["comparison"] = compare_reports(earlier, report.to_dict(), seed=seed).section()
    failures = [f"policy {name} FAILED ({error.text}); it is left out" for name, error in failed.items()]
    warnings = (*failures, *report.findings, *unpriced_finding(unpriced, profile, trace.header))
    report = dataclasses.replace(report, findings=warnings, failed=tuple(failed.values()))
    if out is not None:
        write_report(report, Path(out), overwrite=overwrite)
    return report


def label_policies(policies: Sequence[StopPolicy]) -> list[StopPolicy]:
    """Return copies of the policies, labelled with their spec, or with the name of a policy that has a folder.

    A name that several policies have is followed by the folder.

    Raises:
        InputError: two policies are the same.
    """
    names = [HF_DEFAULT, TUNED, *(policy.name if policy.source else policy.shown_name for policy in policies)]
    named: list[StopPolicy] = []
    for policy, name in zip(policies, names[2:], strict=True):
        label = f"{name} ({policy.source})" if policy.source and names.count(name) > 1 else name
        if label in (HF_DEFAULT, TUNED, *(other.shown_name for other in named)):
            raise InputError(f"--policy: two policies are called {label!r}; give each once, or rename one")
        named.append(copy.copy(policy))
        object.__setattr__(named[-1], "label", label)  # a plugin may be a frozen dataclass
    return named


def _failure(policy: StopPolicy, arrays: TraceArrays, profile: Profile) -> PolicyFailure | None:
    """Return the failure of a plugin's policy in a replay, if there is one; policies of specstop are not tried."""
    if is_trusted(policy):
        return None
    shorter = policy.limited(min(arrays.depth, profile.max_depth))
    replay_ = evaluate_rounds if arrays.header.collector == "live" else play
    try:
        replay_(arrays, shorter, profile)
    except PolicyFailure as error:
        return error
    return None


def _jobs(
    policies: Sequence[StopPolicy], tuning: TraceArrays | None, profile: Profile, depth: int, with_default: bool
) -> list[Job]:
    """Return everything to compare but the fixed lengths; rates of derived rules are solved for the profile."""
    jobs: list[Job] = []
    if with_default:
        note = f"confidence:{HUGGING_FACE}, at most {depth}"
        jobs.append(Job(HF_DEFAULT, "rule", Confidence(HUGGING_FACE, depth), note))
    replayable = tuning if tuning is not None and tuning.header.has_every_anchor else None
    if replayable is not None:
        tuned = tune_confidence(replayable, profile)
        note = f"threshold {tuned.threshold:g}, tuned on the training traces"
        jobs.append(Job(TUNED, "rule", tuned.limited(depth), note))
    for policy in policies:
        settled, note = settle_for(policy, replayable, profile)
        kind = "learned" if isinstance(settled, LearnedPolicy) else "rule"
        jobs.append(Job(policy.shown_name, kind, settled.limited(depth), note))
    return jobs


def _report(trace: Trace, setting: Setting, compared: Compared, detailed: bool) -> Report:
    """Return the report on compared policies."""
    arrays, costs, clusters, boot = setting.arrays, setting.costs, compared.clusters, compared.boot
    lines, profile, replays = compared.lines, costs.profile, compared.replays if detailed else None
    reasons = doubts(lines, compared.below_bound, profile)
    if reasons:
        lines = [dataclasses.replace(x, verdict=NOISY) if x.verdict not in ("", TOO_FEW) else x for x in lines]
    result = answer(
        lines, compared.best_name, clusters, stops=stop_costs(replays) if replays else (), doubts=reasons,
        primary=setting.primary, remedy=remedy(trace.header, profile),
    )  # fmt: skip
    facts = {**_facts(trace, arrays, costs), **clusters.facts, "intervals": costs.describe(clusters.unit)}
    if compared.replays is None:
        facts["rounds"] = compared.rounds
    sections = details(replays, result.candidate, boot, setting.seed, setting.progress) if replays and result else {}
    warnings = findings(profile, setting.clusters, arrays.prompt_ids, reasons, compared.to_achievable)
    bands = acceptance_bands(arrays, Resamples(setting.clusters.of, setting.seed))
    return Report(tuple(lines), compared.fixed, facts, bands, result, warnings, compared.caveats, sections)


def _facts(trace: Trace, arrays: TraceArrays, costs: ProfileBootstrap) -> dict[str, Any]:
    header = trace.header
    return {
        "traces": str(trace.folder),
        "prompts": len(set(arrays.clusters)),
        "tokens": int(arrays.text_tokens.sum()) // header.draws,
        "anchors": len(arrays.accepted),
        "temperature": header.shown_temperature,
        "sampling": dict(header.sampling),
        "verification": header.verification,
        "mode": describe(header.verification) if header.verification in MODES else header.verification,
        "exactness": replay_text(header),
        "depth": arrays.depth,
        "topology": arrays.tree.name,
        "pair": dict(header.pair),
        "models": {"target": header.target, "draft": header.draft},
        "profile": dict(costs.profile.facts),
        "profile file": str(costs.profile.source or ""),
    }
