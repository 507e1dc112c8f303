"""The answer of a report: which policy, how much faster, with what certainty, and why; and warnings about its basis."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...collect.schema import Header, pair_options
from ...decode.benchmark import Ratio
from ...policies.profile import Profile
from ..statistics import FEWEST, LEVEL, REPLICATES, Resamples, Values, clusters_needed
from .clusters import Clusters
from .insight import StopCost
from .records import (
    AGAIN,
    DEPLOY,
    HF_DEFAULT,
    INCONCLUSIVE,
    MOST_OF_TOKENS,
    NOISY,
    REFUSE,
    ROUNDING,
    TOO_FEW,
    TUNED,
    Answer,
    Line,
)  # fmt: skip

LEVEL_TEXT = f"{LEVEL:.0%} interval"

SPREAD = 10.0
"""Slowest over fastest timing of the same call from which on the profile of a noisy machine is not believed."""


def span(ratio: Ratio) -> str:
    """Return `1.021 to 1.063`."""
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


def answer(
    lines: Sequence[Line],
    best_name: str,
    clusters: Clusters,
    stops: Sequence[StopCost] = (),
    doubts: Sequence[str] = (),
    primary: str = "",
    remedy: str = "",
) -> Answer | None:
    """Return what to do; None without a policy.

    The candidate is the fastest rule or learned policy with the verdict "deploy", else the fastest policy that was given:
    the rules that every report compares are not what the report is about. A primary policy is the candidate, whatever the
    others gain.

    Args:
        lines: of the report.
        best_name: of the best fixed length.
        clusters: that intervals resample.
        stops: of the best fixed length and the policies.
        doubts: reasons not to believe the report; the first one is named.
        primary: name of the policy that was chosen before the evaluation.
        remedy: the command that measures the profile again.
    """
    policies = sorted((x for x in lines if x.kind in ("rule", "learned")), key=lambda x: -x.tokens_per_s)
    if not policies:
        return None
    clear = [x for x in policies if x.verdict == DEPLOY]
    given = [x for x in policies if x.name not in (HF_DEFAULT, TUNED)]
    top = next((x for x in policies if x.name == primary), (clear or given or policies)[0])
    against = top.to_rival
    assert against is not None
    static = next((x for x in lines if x.kind == "static"), None)
    best = next(x for x in lines if x.name == "best fixed")
    plain_use = static if static is not None and static.tokens_per_s > best.tokens_per_s else best
    verdict = AGAIN if doubts and top.verdict != TOO_FEW else top.verdict
    use = best_name if plain_use is best else f"{plain_use.name} ({plain_use.note.partition(';')[0]})"
    words = _Words(top, against, policies, best_name, static is not None, clusters, primary)
    needed = None
    if verdict in (INCONCLUSIVE, TOO_FEW):
        # More prompts narrow the part of the interval that is over prompts, and not that of the profile's timings.
        profile_part = top.parts.get("profile")
        if profile_part is None or profile_part.is_above or profile_part.is_below:
            needed = clusters_needed(top.parts.get("prompts", against), clusters.count)
    instead = f"use {use}: {plain_use.to_plain.value:.2f} times as fast as plain decoding"
    dominated = clusters.largest > MOST_OF_TOKENS
    if dominated:
        needed = None  # more prompts of this spread would have such a one among them too
    few = f"{clusters.text}, of which one has {clusters.largest:.0%} of all tokens" if dominated else clusters.text
    more = "" if needed is None else f" About {needed:,} {clusters.unit} of the same spread would decide."
    headline = {
        DEPLOY: f"Deploy {top.name}: {top.to_plain.value:.2f} times as fast as plain decoding, {words.gain}.",
        INCONCLUSIVE: f"Inconclusive: {words.policy} is {words.gain}, which contains 1.{more} Until then {instead}.",
        REFUSE: f"Do not deploy a policy here, {instead}. {words.Policy} is {words.gain}: below 1.",
        TOO_FEW: f"Too few prompts: {few}, and a verdict needs {FEWEST}{' of similar length' * dominated}. {words.Policy} is "
        f"{words.gain}.{more} Until then {instead}.",
        NOISY: f"The profile is too noisy for a verdict: {words.policy} is {words.gain}, and its timings alone could turn "
        f"that. Measure it again: {remedy}. Until then {instead}.",
        AGAIN: f"Measure again, this report contradicts itself: {next(iter(doubts), '')}. {words.Policy} is {words.gain}. "
        f"Run {remedy}, then evaluate again.",
    }[verdict]
    return Answer(
        verdict, top.name if verdict == DEPLOY else plain_use.name if plain_use is static else best_name, top.name,
        headline, words.interval, why(top.name, stops), needed,
    )  # fmt: skip


class _Words:
    """Parts of the sentences of an answer.

    Attributes:
        policy, Policy: the candidate; `gain`: its ratio and interval; `interval`: what that covers.
    """

    def __init__(
        self, top: Line, against: Ratio, policies: Sequence[Line], best_name: str, is_tree: bool, clusters: Clusters,
        primary: str,
    ) -> None:  # fmt: skip
        fastest = "fastest policy" if top is policies[0] else "fastest policy given"
        self.policy = f"the primary policy, {top.name}," if top.name == primary else f"the {fastest}, {top.name},"
        self.Policy = self.policy[0].upper() + self.policy[1:]
        rival = f"the best fixed length ({best_name})" + (" and the best static tree" if is_tree else "")
        where = "no interval from a single one" if against.low is None else f"{LEVEL_TEXT} {span(against)}"
        self.gain = f"{against.value:.3f} times {rival}, {where}"
        over = f"{REPLICATES:,} resamples of {clusters.text}"
        others = len(policies) - 1
        if clusters.count < 2:
            self.interval = f"No interval: {clusters.text} says nothing about others."
        elif top.name == primary:
            self.interval = (
                f"Intervals are over {over}; {top.name} is the primary policy, so that its interval is its own."
            )
        elif others:
            self.interval = f"Intervals are over {over} and hold for all {others + 1} policies at once."
        else:
            self.interval = f"Intervals are over {over}."


def why(name: str, stops: Sequence[StopCost]) -> tuple[str, ...]:
    """Return in words where a policy gains and loses against the best fixed length."""
    known = {stop.name: stop for stop in stops}
    if name not in known or "best fixed" not in known:
        return ()
    mine, fixed = known[name], known["best fixed"]
    early, late, decided, _ = (100 * ms for ms in mine.ms_per_token)
    early_0, late_0, _, _ = (100 * ms for ms in fixed.ms_per_token)
    saved = early_0 + late_0 - early - late
    share = saved / (early_0 + late_0) if early_0 + late_0 > 0 else 0.0
    word = "avoids" if saved >= 0 else "adds"
    wrong = (
        f"It {word} {abs(share):.0%} of what wrong stops cost the best fixed length: in 100 tokens, stopping too early costs "
        f"it {early:.1f} ms (best fixed: {early_0:.1f}) and too late {late:.1f} ms ({late_0:.1f})."
    )
    if decided == 0:
        return (wrong,)
    net = "which leaves a gain" if saved > decided else "which is more than it saves"
    return (wrong, f"Its decisions take {decided:.1f} ms in 100 tokens, against {saved:.1f} ms saved, {net}.")


def contradicted(lines: Sequence[Line], reasons: Sequence[str]) -> list[Line]:
    """Return the lines with the verdict `AGAIN` if the report contradicts itself."""
    if not reasons:
        return list(lines)
    return [replace(line, verdict=AGAIN) if line.verdict not in ("", TOO_FEW) else line for line in lines]


def noise_findings(profile: Profile) -> tuple[str, ...]:
    """Return the warning about a noisy profile, if it is one."""
    noise = profile.noise
    return (f"The latency profile: {noise.text}",) if noise is not None and noise.is_noisy else ()


def remedy(header: Header, profile: Profile) -> str:
    """Return the command that measures a profile of the same rounds again, into a new file."""
    options = [*pair_options(header), "--prompts", "PROMPTS", "--depth", profile.max_depth]
    if not header.tree.is_chain:
        options += ["--tree", header.tree.name]
    if profile.batch is not None:
        options += ["--batch", max(profile.batch.sizes)]
    if profile.temperature:
        options += ["--temperature", profile.temperature]
    if profile.verification:
        options += ["--verification", profile.verification]
    if str(profile.facts.get("engine", "")).startswith("vllm "):
        options += ["--through", "vllm"]
    return shlex.join(map(str, ["specstop", "profile", *options, "--out", "profile-2.json"]))


def doubts(lines: Sequence[Line], below_bound: Sequence[str], profile: Profile) -> tuple[str, ...]:
    """Return the reasons not to believe a report.

    Args:
        lines: of the report.
        below_bound: policies that need less time than the oracle on a text, which is impossible.
        profile: what rounds cost.
    """
    policies = [line for line in lines if line.kind in ("rule", "learned")]
    reasons = [
        f"{line.name} is faster than the oracle bound on a text" for line in policies if line.name in below_bound
    ]
    reasons += [
        f"{line.name} has {line.oracle_share.value:.2f} of the oracle gain, and at most 1 is possible"
        for line in policies
        if line.oracle_share.value > 1.0 + ROUNDING and line.name not in below_bound
    ]
    noise = profile.noise
    if noise is not None and 1.0 + noise.phases > SPREAD:
        reasons.append(
            f"the slowest repetition of the profile took {1.0 + noise.phases:.1f} times as long as the fastest"
        )
    return tuple(reasons)


def findings(
    lines: Sequence[Line],
    boot: Resamples,
    below_bound: Sequence[str],
    to_achievable: Mapping[str, Values],
    to_static: Mapping[str, Values],
) -> tuple[str, ...]:
    """Return warnings about a report.

    Args:
        lines: of the report.
        boot: resamples of the clusters.
        below_bound: policies that need less time than the oracle on a text, which is impossible.
        to_achievable: by policy, its speed against the achievable estimate.
        to_static: the same against the best static tree.
    """
    kinds = {line.name: line.kind for line in lines}
    warnings = [
        f"{name} is faster than the oracle bound on a text: the bound, the profile or the trace is wrong"
        for name in below_bound
    ]
    for name, values in to_achievable.items():
        ratio = boot.interval(values)
        if kinds.get(name) in ("rule", "learned") and ratio.is_above:
            warnings.append(
                f"{name} is above the achievable estimate beyond its interval ({ratio.value:.3f} times, {span(ratio)}): it "
                "knows something that the estimate does not, or has seen these prompts"
            )
    for name, values in to_static.items():
        ratio = boot.interval(values)
        if kinds.get(name) in ("rule", "learned") and ratio.is_below:
            warnings.append(f"{name} is slower than the best static tree ({ratio.value:.3f} times, {span(ratio)})")
    return tuple(warnings)
