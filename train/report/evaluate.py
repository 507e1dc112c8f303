"""`evaluate`: what any policy would gain on this pair and this hardware, by exact replay of held-out traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...collect.store.card import replay_text
from ...collect.store.folder import Trace
from ...decode.verify.modes import MODES, describe
from ...decode.verify.sampling import SamplingParams
from ...policies import kernels
from ...policies.contract import StopPolicy
from ...policies.display import Progress, shown
from ...policies.errors import InputError, PolicyFailure
from ...policies.files import prepare_output_dir
from ...policies.fixed import Confidence, FixedLength
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ...policies.registry import PolicySpec, as_policies
from ..evaluate.report import write_report
from ..fit.tuning.rates import is_priced, tune_confidence
from ..fit.tuning.settled import settle_for
from ..replay.arrivals import at_once
from ..replay.bounds.oracle import oracle_plan
from ..replay.bounds.static_tree import best_static_tree, drafted_alone
from ..replay.log import play
from ..replay.rounds import ROUND_COLUMNS
from ..replay.traces.arrays import TraceArrays, trace_arrays
from ..replay.traces.checking import require_disjoint_prompts, tell_other_rounds
from ..statistics import Resamples
from .answer import answer, contradicted, doubts, findings, noise_findings, remedy
from .batches import Arrivals, by_batch, check_batches
from .checks import check_fit, check_together, failure_of
from .clusters import Clusters, check_cluster, choose_clusters, dominant_cluster
from .decision_costs import FILE as DECISIONS_FILE, copies, lacking_line, with_prices
from .details import Material, details, stop_costs
from .insight import Entry, acceptance_bands, trace_outcomes
from .pricing import Draws
from .records import HF_DEFAULT, TUNED, Report
from .single_rounds import round_report
from .speeds import POLICIES, SpeedTable
from .whatif.records import Transfer
from .whatif.sweep import RATIOS, sweep as run_sweep

if TYPE_CHECKING:
    from ..fit.continuation.values import Achievable

HUGGING_FACE = 0.4
FAST_SWEEP_S = 15.0
"""Seconds of a sweep that is made by default, by the rough costs below of a replay and of an anchor in it."""

_SOLVE_REPLAYS, _REPLAY_S, _ANCHOR_S = 24, 8e-3, 1e-5
_EXACT_S = 1e-9
"""Seconds by which a replay may be below the bound: sums of the same numbers in another order."""


def evaluate(
    traces: Trace,
    profile: Profile,
    policies: PolicySpec | Sequence[PolicySpec] = (),
    *,
    train_traces: Trace | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    achievable: bool = False,
    detailed: bool | None = None,
    sweep: bool | None = None,
    transfer: Transfer | None = None,
    shaping: SamplingParams | None = None,
    batch: Sequence[int] = (),
    arrivals: Arrivals = at_once,
    cluster: str = "auto",
    primary: str = "",
    allow_overlap: bool = False,
    overwrite: bool = False,
    progress: Progress = shown,
) -> Report:
    """Replay policies on held-out traces and compare them.

    Besides the given policies the report has plain decoding, the best fixed length (the whole grid, chosen on these very
    prompts and again in each bootstrap replicate), Hugging Face's default rule, the tuned confidence threshold, the
    oracle bound, and on trees the best static tree. Live traces, whose text depends on the policy, are answered round
    by round (`single_rounds`), with their caveats.

    Args:
        traces: held-out prompts.
        profile: latency of any machine.
        policies: to compare: policies, specs such as `fixed:4`, or policy folders.
        train_traces: where thresholds are tuned and the derived rules' rates are solved for `profile`; without them the
            saved rates serve and the tuned confidence threshold is left out.
        out: folder for `report.html`, `report.json`, `report.md` and `report.csv`.
        seed: of the bootstrap.
        achievable: add the achievable estimate (`continuation.values.achievable_estimate`; it takes minutes); a policy above
            it beyond its interval is a finding.
        detailed: compute the sections behind the table of speeds; by default where there is an `out`.
        sweep: also say from which cost of a draft step each policy pays (`whatif.sweep`); by default where there is an `out`
            and it takes seconds.
        transfer: a table of `whatif.transfer` to put into the report.
        shaping: what the traces must have been sampled from; None = whatever they were.
        batch: also say what policies gain with so many texts side by side, of each of these sizes.
        arrivals: when the requests of these batches arrive, by their number (`replay.arrivals`).
        cluster: what intervals resample: "prompt" (with all its samples), "group", or "auto" (`clusters.choose_clusters`).
        primary: name of the one policy that was chosen before the evaluation. The answer is about it, and its interval
            needs no correction for the number of policies.
        allow_overlap: warn about prompts that are in training traces too, or that a policy was trained on, instead of
            refusing them.
        overwrite: replace what is in `out`.
        progress: see `Progress`.

    Raises:
        TraceError: a policy does not fit the trace, traces were sampled otherwise, evaluated prompts are training prompts,
            or an achievable estimate or batches are requested for traces that are not dense chains.
        InputError: `out` is not empty, or as `prepare_output_dir`; the profile has no batches as large, or there are too few
            `arrivals`; no policy is called `primary`; there are no groups to resample.
        PolicyFailure: the primary policy raises an error; another one that does is left out (`Report.failed`).
    """
    check_cluster(cluster)
    candidates = as_policies(policies)
    primary = _primary(primary, candidates)
    check_together(traces, train_traces, candidates, shaping, bool(batch))
    for policy in candidates:
        check_fit(policy, traces)  # here, so that its warning names who called `evaluate`
    tell_other_rounds(profile, traces.header)
    if out is not None:
        read = [trace.folder for trace in (traces, train_traces) if trace is not None]
        sources = [profile.source, *(policy.source for policy in candidates)]
        prepare_output_dir(out, overwrite=overwrite, inputs=[*read, *sources])
    kernels.load(progress)
    live = traces.header.collector == "live"
    tuning = trace_arrays(train_traces) if train_traces is not None else None
    arrays = trace_arrays(traces, extra=ROUND_COLUMNS if live else ())
    require_disjoint_prompts(arrays, tuning, candidates, allow=allow_overlap)
    check_batches(arrays, profile, batch, arrivals, seed)  # before what takes minutes
    failed = {policy.shown_name: failure for policy in candidates if (failure := failure_of(policy, arrays, profile))}
    if primary in failed:
        raise PolicyFailure(f"policy {primary} failed ({failed[primary].text}); it is the primary policy")
    candidates = [policy for policy in candidates if policy.shown_name not in failed]
    folder = Path(out) if out is not None else None
    usual = [Confidence(HUGGING_FACE)] if traces.header.features else []  # an engine's records hold none
    profile, lacking = with_prices(profile, [*usual, *candidates], traces.header, folder)
    jobs = _policies(candidates, tuning, profile, min(arrays.depth, profile.max_depth), bool(usual))
    draws = Draws(profile, seed)
    facts = _facts(traces, arrays, draws)
    limit = _estimate(arrays, profile, seed, progress) if achievable else None
    if live:
        report = round_report(
            arrays, jobs, draws, facts, cluster=cluster, primary=primary, seed=seed, progress=progress
        )
    else:
        wants = out is not None if detailed is None else detailed
        report, clusters = _replayed(arrays, jobs, draws, facts, limit, wants, cluster, primary, seed, progress)
        if sweep or (sweep is None and wants and _sweeps_fast(candidates, arrays, tuning)):
            swept = run_sweep(
                traces, profile, candidates, train_traces=train_traces, seed=seed, progress=progress, draws=draws,
                clusters=clusters, allow_overlap=True, primary=primary,
            )  # fmt: skip
            report.details["sweep"] = swept.to_dict()
        if batch:
            estimate = _batch_estimate(arrays, profile, seed, progress) if achievable else None
            report.details["batch"] = by_batch(
                arrays, [(name, policy) for name, _, policy, _ in jobs], profile, batch, arrivals=arrivals,
                estimate=estimate, clusters=clusters, primary=primary, seed=seed, progress=progress,
            )  # fmt: skip
    if transfer is not None:
        report.details["transfer"] = transfer.to_dict()
    found = (*report.findings, *lacking_line(lacking, profile, traces.header))
    found = (*(f"policy {name} FAILED ({one.text}); it is left out" for name, one in failed.items()), *found)
    report = dataclasses.replace(report, findings=found, failed=tuple(failed.values()))
    if folder is not None:
        timed = copies(lacking)
        more = None if timed is None else {DECISIONS_FILE: timed}
        write_report(report, folder, overwrite=overwrite, more=more)
    return report


def _primary(primary: str, policies: Sequence[StopPolicy]) -> str:
    """Return the name by which reports show the primary policy; "" = none."""
    if not primary:
        return ""
    names = [policy.shown_name for policy in policies]
    matches = [primary] if primary in names else [policy.shown_name for policy in policies if policy.name == primary]
    if len(matches) != 1:
        known = ", ".join(names) or "none was given"
        raise InputError(f"--primary: expected the name of one of the policies ({known}), not {primary!r}")
    return matches[0]


def _sweeps_fast(policies: Sequence[StopPolicy], arrays: TraceArrays, tuning: TraceArrays | None) -> bool:
    """Whether a sweep takes so little time that it is made without being asked for; the same on every machine."""
    derived = [policy for policy in policies if is_priced(policy)]
    work = [(arrays.depth + 1 + len(policies), arrays)]
    work += [(_SOLVE_REPLAYS * len(derived), tuning)] if tuning is not None else []
    seconds = sum(times * (_REPLAY_S + _ANCHOR_S * len(of.accepted)) for times, of in work)
    return bool(policies) and len(RATIOS) * seconds <= FAST_SWEEP_S


def acceptance_by_depth(arrays: TraceArrays) -> tuple[float, ...]:
    """Return P(A >= k), k = 1, 2, ... as far as it was observed, over the anchors that the end of a text did not cut."""
    return tuple(float(share) for share in trace_outcomes(arrays).survival if share == share)  # NaN: not observed


Job = tuple[str, str, StopPolicy, str]


def _policies(
    policies: Sequence[StopPolicy], tuning: TraceArrays | None, profile: Profile, depth: int, usual: bool
) -> list[Job]:
    """Return (name, kind, policy, note) of everything but the fixed lengths; learned rates are solved for the profile."""
    jobs: list[Job] = []
    if usual:
        at_most = f"confidence:{HUGGING_FACE}, at most {depth}"
        jobs.append((HF_DEFAULT, "rule", Confidence(HUGGING_FACE, depth), at_most))
    replayable = tuning is not None and tuning.header.has_every_anchor
    if tuning is not None and replayable:
        tuned = tune_confidence(tuning, profile)
        note = f"threshold {tuned.threshold:g}, tuned on the training traces"
        jobs.append((TUNED, "rule", tuned.limited(depth), note))
    for policy in policies:
        called = policy.shown_name
        policy, note = settle_for(policy, tuning if replayable else None, profile)
        kind = "learned" if isinstance(policy, LearnedPolicy) else "rule"
        jobs.append((called, kind, policy.limited(depth), note))
    return jobs


def _estimate(arrays: TraceArrays, profile: Profile, seed: int, progress: Progress) -> Achievable:
    """Return the achievable estimate of one text."""
    from ..fit.continuation.values import achievable_estimate  # brings xgboost, which nothing else here needs

    progress("achievable estimate", 0, 1)
    found = achievable_estimate(arrays, profile, seed=seed)
    progress("achievable estimate", 1, 1)
    return found


def _batch_estimate(
    arrays: TraceArrays, profile: Profile, seed: int, progress: Progress
) -> tuple[TraceArrays, StopPolicy] | None:
    """Return the achievable estimate of batches, and the trace that it reads."""
    from ..fit.achievable_batch import achievable_in_batches  # brings xgboost, which nothing else here needs

    progress("achievable estimate of batches", 0, 1)
    found = achievable_in_batches(arrays, profile, seed)
    progress("achievable estimate of batches", 1, 1)
    return found


def _replayed(
    arrays: TraceArrays,
    jobs: Sequence[Job],
    draws: Draws,
    facts: dict[str, Any],
    achievable: Achievable | None,
    detailed: bool,
    cluster: str,
    primary: str,
    seed: int,
    progress: Progress,
) -> tuple[Report, Clusters]:
    """Return the report on dense traces, and the clusters that its intervals resample."""
    profile = draws.profile
    depth = min(arrays.depth, profile.max_depth)
    total = len(jobs) + depth + 1
    fixed = []
    for k in range(depth + 1):
        progress("replay", k, total)
        fixed.append(play(arrays, FixedLength(k), profile))
    entries = []
    for done, (name, kind, policy, note) in enumerate(jobs):
        progress("replay", depth + 1 + done, total)
        entries.append(Entry(name, kind, note, play(arrays, policy, profile)))
    progress("replay", total, total)
    if not arrays.tree.is_chain:
        policy, _ = best_static_tree(arrays, profile)
        shape = f"--tree {policy.shape.name}, of {len(policy.nodes)} nodes" if policy.nodes else "no nodes"
        note = f"{shape}; chosen on these prompts"
        entries.append(Entry("best static tree", "static", note, play(*drafted_alone(arrays, policy.nodes), profile)))
    tokens = arrays.text_tokens.double().numpy()
    seconds = torch.stack([one.result.seconds for one in (*fixed, *(e.played for e in entries))], 1).double().numpy()
    policy_columns = [len(fixed) + at for at, entry in enumerate(entries) if entry.kind in POLICIES]
    clusters = choose_clusters(
        arrays.clusters, arrays.groups, tokens, seconds, policy_columns, range(len(fixed)), cluster
    )  # fmt: skip
    boot = Resamples(clusters.of, seed)
    best = max(fixed, key=lambda one: one.result.rate)
    plan = oracle_plan(arrays, profile)
    table = SpeedTable(arrays, boot, draws, fixed, entries, plan, achievable, primary, clusters.largest)
    lines = table.lines(best)
    compared = [line for line in lines if line.kind in POLICIES]
    subject = max(compared, key=lambda line: line.tokens_per_s).name if compared else ""
    material = Material(arrays, draws, entries, fixed, best, plan, subject)
    below = [e.name for e in entries if bool((e.played.result.seconds < plan.seconds - _EXACT_S).any())]
    reasons = doubts(lines, below, profile)
    lines = contradicted(lines, reasons)
    found = answer(
        lines, best.result.name, clusters, stop_costs(material) if detailed else (), reasons,
        primary, remedy(arrays.header, profile),
    )  # fmt: skip
    if found is not None:
        material = dataclasses.replace(material, candidate=found.candidate)
    warnings = (
        *noise_findings(profile),
        *dominant_cluster(arrays, clusters),
        *findings(lines, boot, below, table.to_achievable, table.to_static),
    )
    report = Report(
        tuple(lines),
        table.speeds.fixed,
        acceptance_by_depth(arrays),
        {**facts, **clusters.facts, "intervals": draws.text_over(clusters.unit)},
        acceptance_bands(arrays, boot),
        found,
        warnings,
        (),
        details(material, boot, seed, progress) if detailed else {},
    )
    return report, clusters


def _facts(traces: Trace, arrays: TraceArrays, draws: Draws) -> dict[str, Any]:
    header = traces.header
    return {
        "traces": str(traces.folder),
        "prompts": len(set(arrays.clusters)),
        "tokens": int(arrays.text_tokens.sum()) // header.draws,
        "anchors": len(arrays.accepted),
        "temperature": header.shown_temperature,
        "shaping": dict(header.shaping),
        "verification": header.verification,
        "mode": describe(header.verification) if header.verification in MODES else header.verification,
        "exactness": replay_text(header),
        "depth": arrays.depth,
        "topology": arrays.tree.name,
        "pair": dict(header.pair),
        "models": {"target": header.target, "draft": header.draft},
        "profile file": str(draws.profile.source or ""),
        "profile": dict(draws.profile.facts),
        "intervals": draws.text,
    }
