"""`evaluate`: what any policy would gain on this pair and this hardware, by exact replay of held-out traces."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..collect.store import Trace, open_trace
from ..decode.profile import add_decisions
from ..policies.baselines import Confidence
from ..policies.contract import StopPolicy
from ..policies.costs import Profile
from ..policies.errors import InputError, SpecstopWarning, TraceError
from ..policies.files import refuse_full
from ..policies.learned import LearnedPolicy
from ..policies.progress import Progress, silent
from .bounds import clairvoyant_seconds
from .data import TraceArrays, trace_arrays
from .records import Line, Ratio, Report
from .replay import Replayed, replay
from .report import write_report
from .tune import best_of, fixed_grid, solve_rate, tune_confidence

REPLICATES = 2000
LEVEL = 0.95
HUGGING_FACE = 0.4


def evaluate(
    traces: Trace,
    profile: Profile,
    policies: Sequence[StopPolicy] = (),
    *,
    train_traces: Trace | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Report:
    """Replay policies on held-out traces and compare them.

    Besides the given policies the report has plain decoding, the best fixed length (the whole grid, chosen on these very
    prompts and again in each bootstrap replicate), Hugging Face's default rule, the tuned confidence threshold, and the
    clairvoyant bound.

    Args:
        traces: held-out prompts.
        profile: latency of any machine.
        policies: to compare.
        train_traces: where thresholds are tuned and the derived rules' rates are solved for `profile`; without them the
            saved rates serve and the tuned confidence threshold is left out.
        out: folder for `report.json`, `report.md` and `report.png`.
        seed: of the bootstrap.
        overwrite: replace what is in `out`.
        progress: see `Progress`.

    Raises:
        TraceError: a policy does not fit the trace, or both traces share prompts.
        InputError: `out` is not empty.
    """
    if out is not None:
        refuse_full(Path(out), overwrite=overwrite)
    for policy in policies:
        check_fit(policy, traces)
    tuning = trace_arrays(train_traces) if train_traces is not None else None
    arrays = trace_arrays(traces)
    if tuning is not None and (shared := set(tuning.prompt_ids) & set(arrays.prompt_ids)):
        raise TraceError(f"--train-traces: {len(shared)} prompts are in the evaluated traces too; split them by prompt")
    profile = add_decisions(profile, [Confidence(HUGGING_FACE), *policies], traces.header.vocabulary)
    jobs = _policies(policies, tuning, profile, min(arrays.depth, profile.max_depth))
    fixed = fixed_grid(arrays, profile)
    replays = []
    for done, (_, _, policy, _) in enumerate(jobs):
        progress("replay", done, len(jobs))
        replays.append(replay(arrays, policy, profile))
    progress("replay", len(jobs), len(jobs))
    bound = clairvoyant_seconds(arrays, profile)
    report = Report(
        tuple(_lines(arrays, jobs, replays, fixed, bound, seed)),
        tuple(r.rate for r in fixed),
        acceptance_by_depth(arrays),
        _facts(traces, arrays, profile),
    )
    if out is not None:
        write_report(report, Path(out), overwrite=overwrite)
    return report


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
        if mine != theirs and mine != {}:
            warnings.warn(
                f"{policy.name} was trained for another {what} ({mine}) than these traces ({theirs})",
                SpecstopWarning,
                stacklevel=3,
            )


_Job = tuple[str, str, StopPolicy, str]


def _policies(policies: Sequence[StopPolicy], tuning: TraceArrays | None, profile: Profile, depth: int) -> list[_Job]:
    """Return (name, kind, policy, note) of everything but the fixed lengths; learned rates are solved for the profile."""
    hugging_face = Confidence(HUGGING_FACE, depth)
    jobs: list[_Job] = [("Hugging Face default", "rule", hugging_face, f"confidence:{HUGGING_FACE}, at most {depth}")]
    if tuning is not None:
        tuned = tune_confidence(tuning, profile)
        note = f"threshold {tuned.threshold:g}, tuned on the training traces"
        jobs.append(("confidence, tuned", "rule", tuned, note))
    for policy in policies:
        note = ""
        is_derived = isinstance(policy, LearnedPolicy) and policy.rule.kind == "derived"
        if isinstance(policy, LearnedPolicy) and is_derived and not profile.same_costs(policy.facts.profile):
            note = "rho as saved, of another profile; give the training traces to solve it for this one"
            if tuning is not None:
                policy, _ = solve_rate(policy, tuning, profile, policy.facts.acceptance)
                note = "rho solved for this profile on the training traces"
        kind = "learned" if isinstance(policy, LearnedPolicy) else "rule"
        jobs.append((policy.name, kind, policy.limited(depth), note))
    names = [job[0] for job in jobs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"--policy: two policies are called {twice!r}; give each once, or rename one")
    return jobs


def _lines(
    arrays: TraceArrays,
    jobs: Sequence[_Job],
    replays: Sequence[Replayed],
    fixed: Sequence[Replayed],
    bound: torch.Tensor,
    seed: int,
) -> list[Line]:
    """Return the report's lines, all intervals from the same replicates, paired over prompts."""
    weights = _replicates(arrays.prompt_ids, seed)  # [R + 1, S]; the first is the sample itself
    tokens = weights @ arrays.text_tokens.double().numpy()
    rates = {r.name: tokens / (weights @ r.seconds.numpy()) for r in fixed}
    grid = np.stack(list(rates.values()), 1)
    best, plain = grid.max(1), grid[:, 0]
    ceiling = tokens / (weights @ bound.numpy())
    winner = best_of(fixed)

    def line(name: str, kind: str, rate: np.ndarray[Any, Any], played: Replayed | None, note: str = "") -> Line:
        with np.errstate(invalid="ignore", divide="ignore"):
            gap = np.where(ceiling > best, (rate - best) / (ceiling - best), 0.0)
        ratios = (_ratio(rate / plain), _ratio(rate / best), _ratio(gap))
        if played is None:
            return Line(name, kind, float(rate[0]), *ratios, note=note)
        rounds = max(1, int(played.rounds.sum()))
        drafted, verified, accepted = (
            float(count.sum()) / rounds for count in (played.drafted, played.verified, played.accepted)
        )
        efficiency = played.block_efficiency
        return Line(name, kind, float(rate[0]), *ratios, efficiency, drafted, verified, accepted, note)

    lines = [line("plain decoding", "fixed", plain, fixed[0], "fixed:0")]
    lines.append(line("best fixed", "fixed", best, winner, f"{winner.name}, chosen on these prompts"))
    for (name, kind, _, note), played in zip(jobs, replays, strict=True):
        lines.append(line(name, kind, tokens / (weights @ played.seconds.numpy()), played, note))
    lines.append(line("clairvoyant bound", "bound", ceiling, None, "knows every accepted length"))
    return lines


def _replicates(prompt_ids: Sequence[str], seed: int) -> np.ndarray[Any, Any]:
    """Return [R + 1, S] weights: ones, then how often each prompt was drawn with replacement."""
    _, prompt = np.unique(np.asarray(prompt_ids), return_inverse=True)
    count = int(prompt.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1.0 / count), size=REPLICATES)
    return np.concatenate([np.ones((1, len(prompt_ids))), drawn[:, prompt].astype(np.float64)])


def _ratio(values: np.ndarray[Any, Any]) -> Ratio:
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(float(values[0]), float(low), float(high))


def _facts(traces: Trace, arrays: TraceArrays, profile: Profile) -> dict[str, Any]:
    header = traces.header
    return {
        "traces": str(traces.folder),
        "prompts": len(set(arrays.prompt_ids)),
        "tokens": int(arrays.text_tokens.sum()),
        "anchors": len(arrays.accepted),
        "temperature": header.temperature,
        "verification": header.verification,
        "depth": arrays.depth,
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
