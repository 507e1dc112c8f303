"""The verdict on each policy, the answer of a report in sentences, and warnings about its basis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...decode.benchmark import Ratio
from ...policies.profile import Profile
from .records import DEPLOY, HF_DEFAULT, INCONCLUSIVE, NOISY, POLICIES, REFUSE, TOO_FEW, TUNED, Answer, Line
from .statistics import LEVEL, MAX_TOKEN_SHARE, MIN_CLUSTERS, REPLICATES, SPEED_TOLERANCE, Clusters, clusters_needed

MAX_SPREAD = 10.0
"""Slowest over fastest timing of the same call above which a profile supports no verdict."""

DOMINANT = 0.2
"""Share of the tokens above which a warning names the cluster."""


def verdict(ratio: Ratio, clusters: int, parts: Mapping[str, Ratio] | None = None, largest: float = 0.0) -> str:
    """Return whether to deploy a policy.

    Args:
        ratio: of its speed to the best of what needs no policy, with the simultaneous interval.
        clusters: independent prompts or groups behind the interval.
        parts: the same ratio by source of error, see `Line.parts`; empty if the profile kept no timings.
        largest: share of all tokens in the largest cluster.
    """
    prompts, profile = (parts or {}).get("prompts"), (parts or {}).get("profile")
    if clusters < MIN_CLUSTERS or largest > MAX_TOKEN_SHARE:
        return TOO_FEW
    if ratio.is_below:
        return REFUSE
    if ratio.is_above:
        # Timings of model calls that could turn the result are too noisy, however many prompts there are.
        return NOISY if profile is not None and profile.low is not None and not profile.is_above else DEPLOY
    return NOISY if prompts is not None and prompts.is_above else INCONCLUSIVE


def make_answer(
    lines: Sequence[Line],
    best_name: str,
    clusters: Clusters,
    *,
    stops: Sequence[Mapping[str, Any]] = (),
    doubts: Sequence[str] = (),
    primary: str = "",
    places: int = 1,
) -> Answer | None:
    """Return what to do; None without a policy.

    Args:
        lines: of the report.
        best_name: of the best fixed length.
        clusters: that intervals resample.
        stops: `analysis.stop_cost` of the best fixed length and the policies.
        doubts: reasons not to believe the report; with one the verdict is `NOISY`, and the first one is stated.
        primary: name of the policy that was chosen before the evaluation.
        places: number of places for which the intervals hold at once.
    """
    policies = sorted((line for line in lines if line.kind in POLICIES), key=lambda line: -line.tokens_per_s)
    if not policies:
        return None
    top = _candidate(policies, primary)
    result = NOISY if doubts and top.verdict != TOO_FEW else top.verdict
    fallback_name, instead = _fallback(lines, best_name)
    ratio, has_static = top.speedup, any(line.kind == "static" for line in lines)
    interval = "no interval from a single one" if ratio.low is None else f"{LEVEL:.0%} interval {_span(ratio)}"
    rival = f"the best fixed length ({best_name})" + (" and the best static tree" if has_static else "")
    gain = f"{ratio.value:.3f} times {rival}, {interval}"
    role = (
        "primary policy" if top.name == primary else "fastest policy" if top is policies[0] else "fastest policy given"
    )
    subject, dominated = f"the {role}, {top.name}, is {gain}", clusters.largest > MAX_TOKEN_SHARE
    # With a dominant cluster more prompts of this spread would include another one.
    needed = _clusters_needed(top, clusters) if not dominated else None
    needed_text = "" if needed is None else f" About {needed:,} {clusters.unit} of the same spread would decide."
    count_text = (
        f"{clusters.text}, of which one has {clusters.largest:.0%} of all tokens" if dominated else clusters.text
    )
    reason = f"{doubts[0]}. T{subject[1:]}" if doubts else f"{subject}, and its timings alone could turn that"
    headline = {
        DEPLOY: f"Deploy {top.name}: {top.to_plain.value:.2f} times as fast as plain decoding, {gain}.",
        INCONCLUSIVE: f"Inconclusive: {subject}, which contains 1.{needed_text} Until then {instead}.",
        REFUSE: f"Do not deploy a policy here, {instead}. T{subject[1:]}: below 1.",
        TOO_FEW: f"Too few prompts: {count_text}, and a verdict needs {MIN_CLUSTERS}{' of similar length' * dominated}. "
        f"T{subject[1:]}.{needed_text} Until then {instead}.",
        NOISY: f"{'No' if doubts else 'The profile is too noisy for a'} verdict: {reason}. Measure the profile again. Until "
        f"then {instead}.",
    }[result]
    use = top.name if result == DEPLOY else fallback_name
    coverage = _coverage(top, len(policies), clusters, primary, places)
    return Answer(result, use, top.name, headline, coverage, explain_gain(top.name, stops))


def _fallback(lines: Sequence[Line], best_name: str) -> tuple[str, str]:
    """Return the name and the recommendation of the fastest alternative that needs no policy."""
    best = next(line for line in lines if line.name == "best fixed")
    static = next((line for line in lines if line.kind == "static"), None)
    fallback, name, text = best, best_name, best_name
    if static is not None and static.tokens_per_s > best.tokens_per_s:
        fallback, name, text = static, static.name, f"{static.name} ({static.note.partition(';')[0]})"
    return name, f"use {text}: {fallback.to_plain.value:.2f} times as fast as plain decoding"


def _candidate(policies: Sequence[Line], primary: str) -> Line:
    """Return the policy that the answer is about.

    That is the primary policy, else the fastest one with the verdict "deploy", else the fastest one that the user gave: the
    rules that every report compares are not its subject.
    """
    deployed = [line for line in policies if line.verdict == DEPLOY]
    requested = [line for line in policies if line.name not in (HF_DEFAULT, TUNED)]
    return next((line for line in policies if line.name == primary), (deployed or requested or policies)[0])


def _clusters_needed(line: Line, clusters: Clusters) -> int | None:
    """Return how many clusters would decide; None if the profile's timings are too uncertain for any number."""
    profile = line.parts.get("profile")
    if profile is not None and not profile.is_above and not profile.is_below:
        return None
    return clusters_needed(line.parts.get("prompts", line.speedup), clusters.count)


def _coverage(top: Line, policies: int, clusters: Clusters, primary: str, places: int) -> str:
    """Return in one sentence what the interval of the candidate covers."""
    if clusters.count < 2:
        return f"No interval: {clusters.text} says nothing about others."
    text = f"Intervals are over {REPLICATES:,} resamples of {clusters.text}"
    if top.name == primary:
        return f"{text}; {top.name} is the primary policy, so that its interval is not widened for the other policies."
    if places > 1:
        return f"{text} and hold for all policies in all {places} places at once."
    return f"{text} and hold for all {policies} policies at once." if policies > 1 else f"{text}."


def _span(ratio: Ratio) -> str:
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


def explain_gain(name: str, stops: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return in sentences where a policy gains and loses against the best fixed length."""
    by_name = {stop["name"]: stop["ms_per_token"] for stop in stops}
    if name not in by_name or "best fixed" not in by_name:
        return ()
    early, late, decided, _ = (100 * ms for ms in by_name[name])
    fixed_early, fixed_late, _, _ = (100 * ms for ms in by_name["best fixed"])
    saved = fixed_early + fixed_late - early - late
    share = saved / (fixed_early + fixed_late) if fixed_early + fixed_late > 0 else 0.0
    wrong = (
        f"It {'avoids' if saved >= 0 else 'adds'} {abs(share):.0%} of what wrong stops cost the best fixed length: in 100 "
        f"tokens, stopping too early costs it {early:.1f} ms (best fixed: {fixed_early:.1f}) and too late {late:.1f} ms "
        f"({fixed_late:.1f})."
    )
    if decided == 0:
        return (wrong,)
    net = "which leaves a gain" if saved > decided else "which is more than it saves"
    return (wrong, f"Its decisions take {decided:.1f} ms in 100 tokens, against {saved:.1f} ms saved, {net}.")


def find_doubts(lines: Sequence[Line], below_bound: Sequence[str], profile: Profile) -> tuple[str, ...]:
    """Return the reasons not to believe a report.

    Args:
        lines: of the report.
        below_bound: policies that need less time than the oracle on a text, which is impossible.
        profile: latency of rounds.
    """
    reasons = []
    for line in (line for line in lines if line.kind in POLICIES):
        if line.name in below_bound:
            reasons.append(f"{line.name} is faster than the oracle bound on a text")
        elif line.oracle_share.value > 1.0 + SPEED_TOLERANCE:
            share = line.oracle_share.value
            reasons.append(f"{line.name} has {share:.2f} of the oracle gain, and at most 1 is possible")
    if profile.noise is not None and 1.0 + profile.noise.phases > MAX_SPREAD:
        times = 1.0 + profile.noise.phases
        reasons.append(f"the slowest repetition of the profile took {times:.1f} times as long as the fastest")
    return tuple(reasons)


def find_warnings(
    profile: Profile,
    clusters: Clusters,
    prompt_ids: Sequence[str],
    doubts: Sequence[str] = (),
    to_achievable: Mapping[str, Ratio] | None = None,
) -> tuple[str, ...]:
    """Return warnings about a report.

    Args:
        profile: latency of rounds.
        clusters: that intervals resample; one that dominates is named.
        prompt_ids: [S] of the sequences.
        doubts: reasons not to believe the report.
        to_achievable: speed of each policy over the achievable estimate.
    """
    warnings = []
    if profile.noise is not None and profile.noise.is_noisy:
        warnings.append(f"The latency profile: {profile.noise.text}")
    if clusters.largest > DOMINANT:
        name = f"group {clusters.name!r}"
        if clusters.unit == "prompts":
            name = f"prompt {prompt_ids[clusters.of.index(clusters.name)]!r}"
        warnings.append(
            f"{name} has {clusters.largest:.0%} of all tokens: intervals depend on it, and other prompts may differ"
        )
    warnings += [f"{doubt}: the bound, the profile or the trace is wrong" for doubt in doubts]
    for name, ratio in (to_achievable or {}).items():
        if ratio.is_above:
            warnings.append(
                f"{name} is above the achievable estimate beyond its interval ({ratio.value:.3f} times, {_span(ratio)}): it "
                "knows something that the estimate does not, or has seen these prompts"
            )
    return tuple(warnings)
