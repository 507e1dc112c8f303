"""`evaluate`: what any policy would gain on this pair and this hardware, by exact replay of held-out traces."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...collect.store import Trace, open_trace
from ...decode.modes import MODES, describe
from ...decode.profile import add_decisions
from ...policies.baselines import Confidence, FixedLength
from ...policies.contract import StopPolicy
from ...policies.costs import Profile
from ...policies.errors import InputError, SpecstopWarning, TraceError
from ...policies.files import refuse_full
from ...policies.learned import LearnedPolicy
from ...policies.progress import Progress, silent
from ..fit.tune import PRICED, solve_rate, tune_confidence
from ..traces.bounds import clairvoyant_plan
from ..traces.data import TraceArrays, trace_arrays
from ..traces.metered import Played, play
from ..traces.replay import Replayed
from ..traces.rounds import ROUND_COLUMNS
from ..traces.static_tree import best_static_tree
from .answer import answer, findings
from .details import Material, details, stop_costs
from .files import write_report
from .insight import Entry, acceptance_bands
from .intervals import LEVEL, REPLICATES, Resamples, Values
from .records import Line, Report, verdict
from .single_rounds import round_report
from .whatif import RATIOS
from .whatif import sweep as run_sweep
from .whatif_records import Transfer

if TYPE_CHECKING:
    from ..fit.continuation import Informed

HUGGING_FACE = 0.4
FAST_SWEEP_S = 15.0
"""Seconds of a sweep that is made by default, by the rough costs below of a replay and of an anchor in it."""

_SOLVE_REPLAYS, _REPLAY_S, _ANCHOR_S = 24, 8e-3, 1e-5
_EXACT_S = 1e-9
"""Seconds by which a replay may be below the bound: sums of the same numbers in another order."""


def evaluate(
    traces: Trace,
    profile: Profile,
    policies: Sequence[StopPolicy] = (),
    *,
    train_traces: Trace | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    informed: bool = False,
    detailed: bool | None = None,
    sweep: bool | None = None,
    transfer: Transfer | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Report:
    """Replay policies on held-out traces and compare them.

    Besides the given policies the report has plain decoding, the best fixed length (the whole grid, chosen on these very
    prompts and again in each bootstrap replicate), Hugging Face's default rule, the tuned confidence threshold, the
    clairvoyant bound, and on trees the best static tree. Live traces, whose text depends on the policy, are answered round
    by round (`single_rounds`), with their caveats.

    Args:
        traces: held-out prompts.
        profile: latency of any machine.
        policies: to compare.
        train_traces: where thresholds are tuned and the derived rules' rates are solved for `profile`; without them the
            saved rates serve and the tuned confidence threshold is left out.
        out: folder for `report.html`, `report.json`, `report.md`, `report.csv` and `report.png`.
        seed: of the bootstrap.
        informed: add the informed estimate (`continuation.informed_estimate`; it takes minutes); a policy above it beyond its
            interval is a finding.
        detailed: compute the sections behind the table of speeds; by default where there is an `out`.
        sweep: also say from which cost of a draft step each of `policies` pays (`whatif.sweep`); by default where there is
            an `out` and it takes seconds.
        transfer: a table of `whatif.transfer` to put into the report.
        overwrite: replace what is in `out`.
        progress: see `Progress`.

    Raises:
        TraceError: a policy does not fit the trace, both traces share prompts, or an informed estimate is asked of traces
            that are not dense chains.
        InputError: `out` is not empty.
    """
    if out is not None:
        refuse_full(Path(out), overwrite=overwrite)
    for policy in policies:
        check_fit(policy, traces)
    live = traces.header.collector == "live"
    tuning = trace_arrays(train_traces) if train_traces is not None else None
    arrays = trace_arrays(traces, extra=ROUND_COLUMNS if live else ())
    if tuning is not None and (shared := set(tuning.prompt_ids) & set(arrays.prompt_ids)):
        raise TraceError(f"--train-traces: {len(shared)} prompts are in the evaluated traces too; split them by prompt")
    header = traces.header
    profile = add_decisions(profile, [Confidence(HUGGING_FACE), *policies], header.vocabulary, header.vectors)
    jobs = _policies(policies, tuning, profile, min(arrays.depth, profile.max_depth))
    facts = _facts(traces, arrays, profile)
    limit = None
    if informed:
        progress("informed estimate", 0, 1)
        from ..fit.continuation import informed_estimate  # brings xgboost, which nothing else here needs

        limit = informed_estimate(arrays, profile, seed=seed)
        progress("informed estimate", 1, 1)
    if live:
        report = round_report(arrays, jobs, profile, facts, seed, progress)
    else:
        wants = out is not None if detailed is None else detailed
        report = _replayed(arrays, jobs, profile, facts, limit, wants, seed, progress)
        if sweep or (sweep is None and wants and _sweeps_fast(policies, arrays, tuning)):
            swept = run_sweep(traces, profile, policies, train_traces=train_traces, seed=seed, progress=progress)
            report.details["sweep"] = swept.to_dict()
    if transfer is not None:
        report.details["transfer"] = transfer.to_dict()
    if out is not None:
        write_report(report, Path(out), overwrite=overwrite)
    return report


def _sweeps_fast(policies: Sequence[StopPolicy], arrays: TraceArrays, tuning: TraceArrays | None) -> bool:
    """Whether a sweep takes so little time that it is made without being asked for; the same on every machine."""
    derived = [p for p in policies if isinstance(p, LearnedPolicy) and p.rule.kind in PRICED]
    work = [(arrays.depth + 1 + len(policies), arrays)]
    work += [(_SOLVE_REPLAYS * len(derived), tuning)] if tuning is not None else []
    seconds = sum(times * (_REPLAY_S + _ANCHOR_S * len(of.accepted)) for times, of in work)
    return bool(policies) and len(RATIOS) * seconds <= FAST_SWEEP_S


def acceptance_by_depth(arrays: TraceArrays) -> tuple[float, ...]:
    """Return P(A >= k), k = 1..K, over the anchors that the end of a text did not cut; empty where all were cut."""
    lengths = arrays.accepted[~arrays.cut]
    if not len(lengths):
        return ()
    return tuple(float((lengths >= k).float().mean()) for k in range(1, arrays.depth + 1))


def check_fit(policy: StopPolicy, traces: Trace) -> None:
    """Warn once where a learned policy was trained for another temperature, verification or pair."""
    if not isinstance(policy, LearnedPolicy):
        return
    header = traces.header
    for what, mine, theirs in (
        ("temperature", policy.facts.temperature, header.temperature),
        ("verification", policy.facts.verification, header.verification),
        ("pair", policy.facts.pair, dict(header.pair)),
    ):
        covered = what == "temperature" and policy.facts.covers(header.temperature)
        if mine != theirs and mine != {} and not covered:
            warnings.warn(
                f"{policy.name} was trained for another {what} ({mine}) than these traces ({theirs})",
                SpecstopWarning,
                stacklevel=3,
            )


Job = tuple[str, str, StopPolicy, str]


def _policies(policies: Sequence[StopPolicy], tuning: TraceArrays | None, profile: Profile, depth: int) -> list[Job]:
    """Return (name, kind, policy, note) of everything but the fixed lengths; learned rates are solved for the profile."""
    hugging_face = Confidence(HUGGING_FACE, depth)
    jobs: list[Job] = [("Hugging Face default", "rule", hugging_face, f"confidence:{HUGGING_FACE}, at most {depth}")]
    replayable = tuning is not None and tuning.header.has_every_anchor
    if tuning is not None and replayable:
        tuned = tune_confidence(tuning, profile)
        note = f"threshold {tuned.threshold:g}, tuned on the training traces"
        jobs.append(("confidence, tuned", "rule", tuned, note))
    for policy in policies:
        note = ""
        is_derived = isinstance(policy, LearnedPolicy) and policy.rule.kind in PRICED
        if isinstance(policy, LearnedPolicy) and is_derived and not profile.same_costs(policy.facts.profile):
            note = "rho as saved, of another profile; give dense training traces to solve it for this one"
            if tuning is not None and replayable:
                policy, _ = solve_rate(policy, tuning, profile, policy.facts.acceptance)
                note = "rho solved for this profile on the training traces"
        kind = "learned" if isinstance(policy, LearnedPolicy) else "rule"
        jobs.append((policy.name, kind, policy.limited(depth), note))
    names = [job[0] for job in jobs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"--policy: two policies are called {twice!r}; give each once, or rename one")
    return jobs


def _replayed(
    arrays: TraceArrays,
    jobs: Sequence[Job],
    profile: Profile,
    facts: dict[str, Any],
    informed: Informed | None,
    detailed: bool,
    seed: int,
    progress: Progress,
) -> Report:
    """Return the report on dense traces."""
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
        name = f"{policy.name}, of {len(policy.nodes)} nodes; chosen on these prompts"
        entries.append(Entry("best static tree", "static", name, play(arrays, policy, profile)))
    boot = Resamples(arrays.prompt_ids, seed)
    best = max(fixed, key=lambda one: one.result.rate)
    plan = clairvoyant_plan(arrays, profile)
    table = _Table(arrays, boot, fixed, best, plan.seconds)
    lines = table.lines(entries, informed)
    asked = [line for line in lines if line.kind in ("rule", "learned")]
    material = Material(
        arrays, profile, entries, fixed, best, plan, max(asked, key=lambda line: line.tokens_per_s).name
    )
    to_rival = {e.name: table.to_rival(e, entries) for e in entries}
    found = answer(lines, best.result.name, boot, to_rival, stop_costs(material) if detailed else ())
    below = [e.name for e in entries if bool((e.played.result.seconds < plan.seconds - _EXACT_S).any())]
    spent = {e.name: table.total(e.played.result) for e in entries}
    static = {e.name: spent[e.name] for e in entries if e.kind == "static"}
    to_static = {n: s / mine for s in static.values() for n, mine in spent.items()}
    to_informed = {} if informed is None else {n: table.total(informed) / mine for n, mine in spent.items()}
    if found is not None:
        material = Material(arrays, profile, entries, fixed, best, plan, found.candidate)
    return Report(
        tuple(lines),
        tuple(one.result.rate for one in fixed),
        acceptance_by_depth(arrays),
        facts,
        acceptance_bands(arrays, boot),
        found,
        findings(lines, boot, below, to_informed, to_static),
        (),
        details(material, boot, seed, progress) if detailed else {},
    )


class _Table:
    """Lines with intervals, all from the same resamples of the prompts."""

    def __init__(
        self, arrays: TraceArrays, boot: Resamples, fixed: Sequence[Played], best: Played, bound: torch.Tensor
    ) -> None:
        self.boot, self.fixed, self.winner = boot, fixed, best
        self.tokens = boot.total(arrays.text_tokens)
        grid = np.stack([self.tokens / self.total(one.result) for one in fixed], 1)
        self.best, self.plain = grid.max(1), grid[:, 0]
        self.ceiling: Values = self.tokens / boot.total(bound)

    def total(self, result: Replayed | Informed) -> Values:
        """Return [R + 1] seconds."""
        return self.boot.total(result.seconds)

    def to_rival(self, entry: Entry, entries: Sequence[Entry]) -> Values:
        """Return [R + 1], an entry's speed against the best of what reads nothing: fixed lengths, static trees."""
        rates = [self.tokens / self.total(e.played.result) for e in entries if e.kind == "static" and e is not entry]
        rival = np.max([self.best, *rates], axis=0)
        ratio: Values = self.tokens / self.total(entry.played.result) / rival
        return ratio

    def line(self, name: str, kind: str, rate: Values, played: Replayed | None, note: str) -> Line:
        """Return a line of the report."""
        with np.errstate(invalid="ignore", divide="ignore"):
            gap = np.where(self.ceiling > self.best, (rate - self.best) / (self.ceiling - self.best), 0.0)
        ratios = (self.boot.interval(rate / self.plain), self.boot.interval(rate / self.best), self.boot.interval(gap))
        if played is None:
            return Line(name, kind, float(rate[0]), *ratios, note=note)
        rounds = max(1, int(played.rounds.sum()))
        drafted, verified, accepted = (
            float(count.sum()) / rounds for count in (played.drafted, played.verified, played.accepted)
        )
        return Line(name, kind, float(rate[0]), *ratios, played.block_efficiency, drafted, verified, accepted, note)

    def lines(self, entries: Sequence[Entry], informed: Informed | None) -> list[Line]:
        """Return all lines."""
        winner = self.winner.result
        out = [self.line("plain decoding", "fixed", self.plain, self.fixed[0].result, "fixed:0")]
        out.append(self.line("best fixed", "fixed", self.best, winner, f"{winner.name}, chosen on these prompts"))
        for e in entries:
            result = e.played.result
            made = self.line(e.name, e.kind, self.tokens / self.total(result), result, e.note)
            if e.kind in ("rule", "learned"):
                rival = self.boot.interval(self.to_rival(e, entries))
                made = dataclasses.replace(made, verdict=verdict(rival, self.boot.prompts))
            out.append(made)
        if informed is not None:
            note = "best cross-fitted continuation value on all scalars, decisions for nothing"
            out.append(self.line("informed estimate", "informed", self.tokens / self.total(informed), None, note))
        out.append(self.line("clairvoyant bound", "bound", self.ceiling, None, "knows every accepted length"))
        return out


def _facts(traces: Trace, arrays: TraceArrays, profile: Profile) -> dict[str, Any]:
    header = traces.header
    return {
        "traces": str(traces.folder),
        "prompts": len(set(arrays.prompt_ids)),
        "tokens": int(arrays.text_tokens.sum()),
        "anchors": len(arrays.accepted),
        "temperature": header.temperature,
        "verification": header.verification,
        "mode": describe(header.verification) if header.verification in MODES else header.verification,
        "depth": arrays.depth,
        "topology": arrays.tree.name,
        "pair": dict(header.pair),
        "profile": dict(profile.facts),
        "intervals": f"{LEVEL:.0%} bootstrap over prompts, {REPLICATES} replicates",
    }


def load_traces(path: str | Path) -> Trace:
    """Open traces for evaluation; an incomplete run is refused."""
    trace = open_trace(path)
    if not trace.complete:
        raise TraceError(f"--traces: {path} is not complete; run collect with --resume first")
    return trace
