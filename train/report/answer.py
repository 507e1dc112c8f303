"""The answer of a report: which policy, how much faster, how sure, why; and what a reader must look into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...decode.compare.intervals import FEWEST, LEVEL, Ratio, Resamples, Values
from ...policies.latency.profile import Profile
from .insight import StopCost
from .records import DEPLOY, HF_DEFAULT, NO_VERDICT, REFUSE, TUNED, Answer, Line

LEVEL_TEXT = f"{LEVEL:.0%} interval"


def span(ratio: Ratio) -> str:
    """Return `1.021 to 1.063`."""
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


def answer(
    lines: Sequence[Line],
    best_name: str,
    boot: Resamples,
    to_best: Mapping[str, Values],
    stops: Sequence[StopCost] = (),
    by_profile: Mapping[str, Ratio] | None = None,
) -> Answer | None:
    """Return what to do.

    The candidate is the fastest rule or learned policy that is clear of what needs no policy, or else the fastest one of
    those given: what every report compares besides is not what was asked about.

    Args:
        lines: of the report.
        best_name: of the best fixed length.
        boot: resamples of the prompts.
        to_best: totals of `boot` by policy, its speed in every resample against the best of what needs no policy: the
            best fixed length, and on trees the best static tree.
        stops: of the best fixed length and the policies.
        by_profile: `to_best` by policy with the interval over the profile's timings alone; None where it has kept none.
    """
    asked = sorted((x for x in lines if x.kind in ("rule", "learned")), key=lambda x: -x.tokens_per_s)
    if not asked:
        return None
    alone = by_profile or {}
    above_1 = [x for x in asked if boot.interval(to_best[x.name]).is_above]
    clear = [x for x in above_1 if x.name not in alone or alone[x.name].is_above]
    given = [x for x in asked if x.name not in (HF_DEFAULT, TUNED)]
    top = (clear or above_1 or given or asked)[0]
    fastest = "fastest policy" if top is asked[0] else "fastest policy given"
    against = boot.interval(to_best[top.name])
    above = float((to_best[top.name][1 : 1 + boot.replicates] > 1.0).mean())
    static = next((x for x in lines if x.kind == "static"), None)
    rival = f"the best fixed length ({best_name})" + (" and the best static tree" if static else "")
    best = next(x for x in lines if x.name == "best fixed")
    plain_use = static if static is not None and static.tokens_per_s > best.tokens_per_s else best
    if boot.prompts < FEWEST:
        clear = []
    use, how = top.name, ""
    if not clear:
        use, how = (best_name, "") if plain_use is best else (plain_use.name, f" ({plain_use.note.partition(';')[0]})")
    told = NO_VERDICT if boot.prompts < 2 else DEPLOY if clear else REFUSE
    if told == NO_VERDICT:
        headline = (
            f"No verdict: a single prompt says nothing about others, so there are no intervals; give {FEWEST} or more. On it "
            f"the {fastest}, {top.name}, is {against.value:.3f} times {rival}."
        )
    elif clear:
        headline = (
            f"Deploy {top.name}: {top.to_plain.value:.2f} times as fast as plain decoding, {against.value:.3f} times "
            f"{rival}, {LEVEL_TEXT} {span(against)}."
        )
    else:
        where = _where(against, boot.prompts)
        headline = (
            f"Do not deploy a policy here, use {use}{how}: {plain_use.to_plain.value:.2f} times as fast as plain decoding. "
            f"The {fastest}, {top.name}, is {against.value:.3f} times {rival}, {LEVEL_TEXT} {span(against)}: {where}."
        )
    return Answer(
        bool(clear),
        use,
        top.name,
        headline,
        _sure(top.name, rival, above, boot, len(asked)),
        why(top.name, stops),
        above,
        told,
    )


def _where(against: Ratio, prompts: int) -> str:
    """Return in words why a ratio is no reason to deploy."""
    if not against.is_above:
        return "below 1" if against.is_below else "not clear of 1"
    return "from too few prompts" if prompts < FEWEST else "but timings of the profile alone could turn it"


def _sure(name: str, rival: str, above: float, boot: Resamples, compared: int) -> str:
    """Return in words how far the answer can be trusted."""
    if boot.prompts < 2:
        return f"one prompt; {FEWEST} are the fewest that give a verdict."
    share = "all" if above == 1.0 else "none" if above == 0.0 else f"{above:.1%}"
    text = f"{name} is ahead of {rival} in {share} of {boot.replicates:,} resamples of the {boot.prompts} prompts"
    if boot.prompts < FEWEST:
        return f"{text}; fewer than {FEWEST} are too few to say."
    if compared > 1 and above > 0.5:
        return f"{text}; it is the fastest of {compared} compared on these very prompts, which flatters it."
    return f"{text}."


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


def noise_findings(profile: Profile) -> tuple[str, ...]:
    """Return the warning that a profile was measured with, if it was noisy."""
    noise = profile.noise
    return (f"The latency profile: {noise.text}",) if noise is not None and noise.is_noisy else ()


def findings(
    lines: Sequence[Line],
    boot: Resamples,
    below_bound: Sequence[str],
    to_achievable: Mapping[str, Values],
    to_static: Mapping[str, Values],
) -> tuple[str, ...]:
    """Return what must be looked into.

    Args:
        lines: of the report.
        boot: resamples of the prompts.
        below_bound: policies that need less time than the oracle on some text, which cannot be.
        to_achievable: by policy, its speed against the achievable estimate.
        to_static: the same against the best static tree.
    """
    kinds = {line.name: line.kind for line in lines}
    found = [
        f"{name} is faster than the oracle bound on some text: the bound, the profile or the trace is wrong"
        for name in below_bound
    ]
    for name, values in to_achievable.items():
        ratio = boot.interval(values)
        if kinds.get(name) in ("rule", "learned") and ratio.is_above:
            found.append(
                f"{name} is above the achievable estimate beyond its interval ({ratio.value:.3f} times, {span(ratio)}): it "
                "knows something that the estimate does not, or has seen these prompts"
            )
    for name, values in to_static.items():
        ratio = boot.interval(values)
        if kinds.get(name) in ("rule", "learned") and ratio.is_below:
            found.append(f"{name} is slower than the best static tree ({ratio.value:.3f} times, {span(ratio)})")
    return tuple(found)
