"""`evaluate`: what policies would gain on a pair and a machine, by exact replay of held-out traces."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...collect.store import Trace, replay_text
from ...decode.verify.modes import describe_mode
from ...policies import kernels
from ...policies.arguments import as_list
from ...policies.contract import StopPolicy
from ...policies.display import Progress, shown
from ...policies.errors import InputError, PolicyFailure, TraceError
from ...policies.files import prepare_output_dir
from ...policies.fixed import Confidence
from ...policies.host import is_trusted, validate_policy
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile, load_profile
from ...policies.registry import PolicySpec, as_policies
from ...policies.routing import ValueRoute
from ..fit.adapt import adapt_to_profile
from ..fit.rules import tune_confidence
from ..replay.arrays import TraceArrays, trace_arrays
from ..replay.batch import arrive_at_once
from ..replay.checks import (
    check_fit,
    check_training_traces,
    kept_back,
    load_traces,
    require_disjoint_prompts,
    warn_other_rounds,
)
from ..replay.run import replay
from ..replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from .analysis import acceptance_bands, details, stop_costs
from .batches import Arrivals, by_batch, check_batches
from .comparison import BEST, ComparisonResult, Job, Setting, compare_places, compare_rounds, compare_texts
from .importance import importance_section
from .pricing import ProfileBootstrap, Unpriced, unpriced_warnings, with_prices
from .records import HF_DEFAULT, NOISY, TOO_FEW, TUNED, Report
from .report import write_report
from .report_comparison import compare_reports, read_report
from .serving import serving_section, serving_settings
from .statistics import form_clusters
from .verdict import find_doubts, find_warnings, make_answer

HUGGING_FACE = 0.4

TraceSpec = Trace | str | Path
ProfileSpec = Profile | str | Path


@dataclass(frozen=True)
class _Options:
    """Arguments of `evaluate` that hold for every place."""

    training: Trace | None
    seed: int
    cluster: str
    primary: str
    allow_overlap: bool
    progress: Progress
    achievable: bool = False
    detailed: bool = False
    batch: Sequence[int] = ()
    arrivals: Arrivals = arrive_at_once
    is_single: bool = True
    report_prompts: bool = False


@dataclass(frozen=True)
class _Place:
    """A trace and a profile on which policies are compared.

    Attributes:
        trace: is replayed.
        setting: with prices of all decisions; `unpriced` are those that the profile lacked.
        candidates: policies of the user without those that `failed`.
        jobs: what is compared with the fixed lengths.
    """

    trace: Trace
    setting: Setting
    candidates: list[StopPolicy]
    failed: dict[str, PolicyFailure]
    unpriced: Unpriced
    jobs: list[Job]


def evaluate(
    traces: TraceSpec | Sequence[TraceSpec],
    profile: ProfileSpec | Sequence[ProfileSpec],
    policies: PolicySpec | Sequence[PolicySpec] = (),
    *,
    train_traces: TraceSpec | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    achievable: bool = False,
    compare: str | Path | None = None,
    batch: Sequence[int] = (),
    arrivals: Arrivals = arrive_at_once,
    cluster: str = "prompt",
    primary: str = "",
    allow_overlap: bool = False,
    report_prompts: bool = False,
    overwrite: bool = False,
    progress: Progress = shown,
) -> Report:
    """Replay policies on held-out traces and compare them.

    Besides the given policies the report has plain decoding, the best fixed length (chosen on these very prompts and again
    in each bootstrap replicate), Hugging Face's default rule, the tuned confidence threshold, the oracle bound, and on trees
    the best static tree. On live traces, of which the text depends on the policy, single rounds are compared
    (`compare_rounds`). Every trace with every profile is a place. In several places (`Report.places`) the given policies
    are used as they are, and their intervals hold for all places at once.

    Args:
        traces: held-out prompts, as an object or a folder, or several of them.
        profile: latency of any machine, as an object or a file, or several of them.
        policies: to compare: policies, specs such as `fixed:4`, or policy folders.
        train_traces: on which thresholds are tuned and the derived rules' rates are solved for `profile`. Without them the
            saved rates are used and there is no tuned confidence threshold.
        out: folder for the report's files.
        seed: of the bootstrap.
        achievable: add the achievable estimate (`fit.achievable.achievable_estimate`; it takes minutes).
        compare: folder or report.json of an earlier report: add what has changed.
        batch: also compare the policies with so many texts side by side, at each of these sizes.
        arrivals: returns the arrival times of so many requests in these batches (`replay.batch`).
        cluster: what intervals resample: "prompt" (with all its samples) or "group".
        primary: name of the one policy that was chosen before the evaluation. The answer is about it, and its interval
            needs no correction for the number of policies.
        allow_overlap: warn about prompts of training traces, or that a policy was trained on, instead of raising.
        report_prompts: evaluate only prompts that all trained policies kept back (`TrainOptions.report_share`).
        overwrite: replace a report in `out`.
        progress: see `Progress`.

    Raises:
        TraceError: a policy does not fit the trace, traces were sampled differently, evaluated prompts are training
            prompts, or an achievable estimate or batches are requested for traces that are not dense chains.
        InputError: `out` is not empty; the profile has no batches of a size; a policy or its name is given twice or unknown;
            there are no groups to resample; an option of a single place is used in several.
        PolicyFailure: the primary policy raises an error. Other policies that do are left out (`Report.failed`).
    """
    training = None if train_traces is None else load_traces(train_traces)
    places = _open_places(traces, profile)
    options = _Options(
        training, seed, cluster, primary, allow_overlap, progress, achievable, bool(out or compare), batch, arrivals,
        len(places) == 1, report_prompts,
    )  # fmt: skip
    candidates = _candidates(policies, primary)
    earlier = _check(candidates, options, compare)
    for trace, costs in places.values():
        for policy in candidates:
            check_fit(policy, trace)
        if training is not None:
            check_training_traces(training, trace)
        warn_other_rounds(costs, trace.header)
    if out is not None:
        sources = [path for trace, costs in places.values() for path in (trace.folder, costs.source)]
        inputs = [*sources, training and training.folder, *(policy.source for policy in candidates)]
        prepare_output_dir(out, overwrite=overwrite, inputs=[path for path in inputs if path])
    kernels.load(progress)
    if options.is_single:
        report = _evaluate_place(_prepare(*places.popitem()[1], candidates, options), options, earlier)
    else:
        report = _evaluate_places(places, candidates, options)
    if out is not None:
        write_report(report, Path(out), overwrite=overwrite)
    return report


def _open_places(
    traces: TraceSpec | Sequence[TraceSpec], profile: ProfileSpec | Sequence[ProfileSpec]
) -> dict[str, tuple[Trace, Profile]]:
    """Return every trace with every profile by name."""
    profiles = [load_profile(one) for one in as_list(profile, Profile)]
    opened = [load_traces(one) for one in as_list(traces, Trace)]
    if not opened or not profiles:
        raise InputError("--traces, --profile: expected at least one trace and one profile")
    sources = [costs.source or "" for costs in profiles]
    names = [text if text and sources.count(text) == 1 else f"profile {at}" for at, text in enumerate(sources, 1)]
    if any(one in profiles[:at] for at, one in enumerate(profiles)) or len({x.folder for x in opened}) < len(opened):
        raise InputError("--traces, --profile: expected each trace and each profile once")
    return {
        str(trace.folder) + (f", {name}" if len(profiles) > 1 else ""): (trace, costs)
        for trace in opened
        for name, costs in zip(names, profiles, strict=True)
    }


def _candidates(policies: PolicySpec | Sequence[PolicySpec], primary: str) -> list[StopPolicy]:
    """Return the policies to compare, labelled."""
    candidates = label_policies([validate_policy(policy) for policy in as_policies(policies)])
    names = [policy.shown_name for policy in candidates]
    if primary and primary not in names:
        raise InputError(
            f"--primary: expected the name of one of the policies ({', '.join(names) or 'none was given'}), not {primary!r}"
        )
    return candidates


def _check(candidates: Sequence[StopPolicy], options: _Options, compare: str | Path | None) -> dict[str, Any] | None:
    """Refuse options that do not fit each other, and return the earlier report to compare with."""
    single = {"train-traces": options.training, "achievable": options.achievable,
              "batch": options.batch, "primary": options.primary, "compare": compare}  # fmt: skip
    if not options.is_single and (name := next((name for name, value in single.items() if value), None)):
        raise InputError(
            f"--{name}: expected one --traces and one --profile; in several, policies are used as they are"
        )
    if not options.is_single and not candidates:
        raise InputError("--policy: expected at least one policy")
    return None if compare is None else read_report(compare)


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


def _prepare(trace: Trace, profile: Profile, candidates: Sequence[StopPolicy], options: _Options) -> _Place:
    """Return a place with prices of all decisions, and without policies that fail."""
    is_live = trace.header.collector == "live"
    arrays = trace_arrays(trace, extra=ROUND_COLUMNS if is_live else ())
    is_dense = trace.header.has_every_anchor and all(one.tree.is_chain for one in arrays.each_drafter)
    if options.achievable and (is_live or not is_dense):
        raise TraceError("--achievable: expected dense traces of chains, on which any policy can be replayed")
    if options.report_prompts:
        arrays = kept_back(arrays, candidates)
    tuning = None if options.training is None else trace_arrays(options.training)
    require_disjoint_prompts(arrays, tuning, candidates, allow=options.allow_overlap)
    check_batches(arrays, profile, options.batch, options.arrivals, options.seed)
    clusters = form_clusters(arrays.clusters, arrays.groups, arrays.text_tokens.tolist(), options.cluster)
    failed = {policy.shown_name: error for policy in candidates if (error := _failure(policy, arrays, profile))}
    if options.primary in failed:
        text = failed[options.primary].text
        raise PolicyFailure(f"policy {options.primary} failed ({text}); it is the primary policy")
    working = [policy for policy in candidates if policy.shown_name not in failed]
    has_default = options.is_single and bool(trace.header.features)  # an engine's records have no features
    default_rules = [Confidence(HUGGING_FACE)] if has_default else []
    profile, unpriced = with_prices(profile, [*default_rules, *working], trace.header)
    jobs = _jobs(working, tuning, profile, min(arrays.depth, profile.max_depth), has_default)
    costs = ProfileBootstrap(profile, options.seed)
    setting = Setting(arrays, costs, clusters, options.primary, options.seed, options.progress)
    return _Place(trace, setting, working, failed, unpriced, jobs)


def _failure(policy: StopPolicy, arrays: TraceArrays, profile: Profile) -> PolicyFailure | None:
    """Return the failure of a plugin's policy in a replay, if there is one; policies of specstop are not tried."""
    if is_trusted(policy):
        return None
    shorter = policy.limited(min(arrays.depth, profile.max_depth))
    replay_ = evaluate_rounds if arrays.header.collector == "live" else replay
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
        jobs.append(Job(HF_DEFAULT, "rule", note, Confidence(HUGGING_FACE, depth)))
    replayable = tuning if tuning is not None and tuning.header.has_every_anchor else None
    if replayable is not None:
        tuned = tune_confidence(replayable, profile)
        note = f"threshold {tuned.threshold:g}, tuned on the training traces"
        jobs.append(Job(TUNED, "rule", note, tuned.limited(depth)))
    for policy in policies:
        adapted, note = adapt_to_profile(policy, replayable, profile)
        kind = "learned" if isinstance(adapted, LearnedPolicy | ValueRoute) else "rule"
        jobs.append(Job(policy.shown_name, kind, note, adapted.limited(depth)))
    return jobs


def _compare(place: _Place, achievable: bool = False) -> ComparisonResult:
    if place.trace.header.collector == "live":
        return compare_rounds(place.setting, place.jobs)
    return compare_texts(place.setting, place.jobs, achievable)


def _evaluate_place(place: _Place, options: _Options, earlier: dict[str, Any] | None) -> Report:
    """Return the report on one place, with the sections that were requested."""
    setting, profile = place.setting, place.setting.costs.profile
    compared = _compare(place, options.achievable)
    report = _report(place, compared, options.detailed)
    sections = report.details
    if len(compared.of_fixed) > 1:
        rounds = compared.of_fixed
        sections["serving"] = serving_section(serving_settings(rounds, rounds, setting.costs, compared.boot))
    if options.batch:
        estimate = None
        if options.achievable:
            from ..fit.achievable import achievable_in_batches  # imports xgboost

            options.progress("achievable estimate of batches", 0, 1)
            estimate = achievable_in_batches(setting.arrays, profile, options.seed)
        policies = [(job.name, job.policy) for job in place.jobs]
        sections["batch"] = by_batch(
            setting.arrays, policies, profile, options.batch, arrivals=options.arrivals, estimate=estimate,
            clusters=setting.clusters, primary=options.primary, seed=options.seed, progress=options.progress,
        )  # fmt: skip
    if (estimates := importance_section(place.trace, place.candidates, profile, options.seed)) is not None:
        sections["importance"] = estimates
    if earlier is not None:
        sections["comparison"] = compare_reports(earlier, report.to_dict(), seed=options.seed)
    return report


def _evaluate_places(
    places: dict[str, tuple[Trace, Profile]], candidates: Sequence[StopPolicy], options: _Options
) -> Report:
    """Return the report on several places. Their prompts are resampled together."""
    prepared = [_prepare(*place, candidates, options) for place in places.values()]
    among = tuple(sorted({cluster for place in prepared for cluster in place.setting.clusters.of}))
    compared = []
    for done, (name, place) in enumerate(zip(places, prepared, strict=True)):
        options.progress("places", done, len(places))
        for error in place.failed.values():
            raise error
        if place.setting.clusters.count < 2:
            raise InputError(f"{name}: expected two prompts or more, got {place.setting.clusters.count}")
        setting = dataclasses.replace(place.setting, among=among)
        compared.append(_compare(dataclasses.replace(place, setting=setting)))
    options.progress("places", len(places), len(places))
    reports = [
        _report(place, one, False, len(places)) for place, one in zip(prepared, compare_places(compared), strict=True)
    ]
    facts = {
        "traces": ", ".join(dict.fromkeys(str(trace.folder) for trace, _ in places.values())),
        "places": len(places),
    }
    findings = tuple(
        f"{name}: {text}" for name, report in zip(places, reports, strict=True) for text in report.findings
    )
    return Report(facts=facts, findings=findings, places=dict(zip(places, reports, strict=True)))


def _report(place: _Place, compared: ComparisonResult, detailed: bool, places: int = 1) -> Report:
    """Return the report on compared policies."""
    setting, clusters, boot = place.setting, compared.clusters, compared.boot
    lines, profile, replays = compared.lines, setting.costs.profile, compared.replays if detailed else None
    reasons = find_doubts(lines, compared.below_bound, profile)
    if reasons:
        lines = [dataclasses.replace(x, verdict=NOISY) if x.verdict not in ("", TOO_FEW) else x for x in lines]
    stops = stop_costs(replays) if replays else []
    best_name = next(line for line in lines if line.name == BEST).note.partition(",")[0]
    result = make_answer(
        lines, best_name, clusters, stops=stops, doubts=reasons, primary=setting.primary,
        places=places,
    )  # fmt: skip
    facts = _facts(place, compared)
    sections: dict[str, Any] = {}
    if replays and result:
        sections = details(replays, result.candidate, stops, boot, setting.seed, setting.progress)
    warnings = [f"policy {name} FAILED ({error.text}); it is left out" for name, error in place.failed.items()]
    warnings += find_warnings(profile, setting.clusters, setting.arrays.prompt_ids, reasons, compared.to_achievable)
    warnings += unpriced_warnings(place.unpriced, profile, place.trace.header)
    bands = acceptance_bands(setting.arrays, setting.resamples(setting.clusters))
    return Report(
        tuple(lines), compared.fixed, facts, bands, result, tuple(warnings), compared.caveats, sections,
        tuple(place.failed.values()),
    )  # fmt: skip


def _facts(place: _Place, compared: ComparisonResult) -> dict[str, Any]:
    header, arrays, costs, clusters = place.trace.header, place.setting.arrays, place.setting.costs, compared.clusters
    return {
        "traces": str(place.trace.folder),
        "prompts": len(set(arrays.clusters)),
        "tokens": int(arrays.text_tokens.sum()) // header.draws,
        "anchors": len(arrays.accepted),
        "temperature": header.shown_temperature,
        "sampling": dict(header.sampling),
        "verification": header.verification,
        "mode": describe_mode(header.verification),
        "exactness": replay_text(header),
        "depth": arrays.depth,
        "topology": arrays.tree.name,
        "pair": dict(header.pair),
        "models": {"target": header.target, "draft": header.draft},
        "profile": dict(costs.profile.facts),
        "profile file": str(costs.profile.source or ""),
        "clusters": clusters.count,
        "cluster unit": clusters.unit,
        "intervals": costs.describe(clusters.unit),
        **({} if compared.replays is not None else {"rounds": compared.rounds}),
    }
