"""The results of the demo in words: one line per stage, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..evaluate.records import DEPLOY, NOISY, TOO_FEW
from ..evaluate.statistics import FEWEST

if TYPE_CHECKING:
    from ...policies.learned import LearnedPolicy
    from ...policies.profile import Profile
    from ..evaluate.records import Line, Report
    from ..replay.arrays import TraceArrays
    from .live import LiveLine

SMALL_HEADROOM = 1.05
"""Oracle bound over best fixed length below which there is little to gain."""


def explain(report: Report) -> list[str]:
    """Return the headline of the report and, if no policy is to be deployed, one sentence that explains why."""
    answer = report.answer
    if answer is None:
        return ["No policy was compared."]
    if answer.verdict in (DEPLOY, NOISY):  # the headline has the reason
        return [answer.headline]
    return [answer.headline, _reason(report)]


def _reason(report: Report) -> str:
    """Return the main reason against deploying: little head-room, the price of decisions, or noise."""
    assert report.answer is not None
    line = report[report.answer.candidate]
    bound = next(line for line in report.lines if line.kind == "bound").to_best_fixed.value
    if bound < SMALL_HEADROOM:
        return f"Why: little head-room. The oracle bound is only {bound:.3f} times the best fixed length."
    saved, decided = _savings(report, line)
    avoided = f"avoid {saved:.1f} ms of wrong stops" if saved > 0 else f"add {-saved:.1f} ms of wrong stops"
    per_tokens = f"in 100 tokens, decisions take {decided:.1f} ms and {avoided}"
    if report.answer.verdict == TOO_FEW:
        clusters = f"{report.facts['clusters']} {report.facts['cluster unit']}"
        return f"Why: only {clusters}, of which {FEWEST} are needed; {per_tokens}."
    if decided > saved:
        return f"Why: the price of decisions: {per_tokens}."
    return (
        f"Why: noise. The gain is {line.to_best_fixed.text()} on {report.facts['prompts']} prompts; {per_tokens}; "
        f"the oracle bound is {bound:.2f} times the best fixed length."
    )


def _savings(report: Report, line: Line) -> tuple[float, float]:
    """Return the milliseconds of wrong stops that a policy avoids in 100 tokens, and those that its decisions take."""
    lost = {stop["name"]: [100 * ms for ms in stop["ms_per_token"]] for stop in report.details["stops"]}
    early, late, decided, _ = lost[line.name]
    early_fixed, late_fixed, _, _ = lost["best fixed"]
    return early_fixed + late_fixed - early - late, decided


def trace_text(arrays: Mapping[str, TraceArrays]) -> str:
    """Return the number of recorded rounds and how many drafted tokens are accepted in the held-out ones."""
    anchors = sum(len(side.accepted) for side in arrays.values())
    whole = arrays["test"].accepted[~arrays["test"].cut]
    shares = [float((whole >= k).float().mean()) for k in (1, min(6, arrays["test"].depth))]
    return (
        f"{anchors:,} rounds; the first drafted token is accepted in {shares[0]:.0%} of them, "
        f"{min(6, arrays['test'].depth)} or more in {shares[1]:.0%}"
    )


def profile_text(profile: Profile) -> str:
    """Return the costs of a target call and a draft step."""
    costs = profile.low
    target, draft = costs.verify_s[0], costs.later_draft_s or costs.draft_s[0]
    noise = "" if profile.noise is None or not profile.noise.is_noisy else "; the machine was not quiet"
    return (
        f"a target call takes {1e3 * target:.2f} ms, a draft step {1e3 * draft:.2f} ms (1/{target / draft:.0f}){noise}"
    )


def heads_text(learned: Sequence[LearnedPolicy], profile: Profile) -> str:
    """Return the costs of the decisions of trained policies."""
    prices = [f"{p.name} {1e6 * profile.decision(p.cost_name):.0f}" for p in learned]
    return f"{len(learned)} policies; one decision costs (µs): {', '.join(prices)}"


def report_text(report: Report) -> str:
    """Return the speeds of the best fixed length, the fastest learned policy and the oracle bound."""
    best, oracle = report["best fixed"], next(line for line in report.lines if line.kind == "bound")
    top = max((line for line in report.lines if line.kind == "learned"), key=lambda line: line.tokens_per_s)
    return (
        f"best fixed length ({best.note.partition(',')[0]}) {best.to_plain.value:.2f} times plain decoding; {top.name} "
        f"{top.to_best_fixed.text()} times that, oracle bound {oracle.to_best_fixed.value:.2f} times"
    )


def live_text(live: Sequence[LiveLine]) -> str:
    """Return the measured speed of the learned policy next to the predicted one; `live` is plain, best fixed, learned."""
    _, fixed, top = live
    measured, predicted = top.measured / fixed.measured, top.predicted / fixed.predicted
    same_text = (
        ""
        if top.same_text is None
        else f"; {sum(line.same_text == top.tally.texts for line in live)} of {len(live)} give plain decoding's text"
    )
    return f"{top.name} {measured:.3f} times {fixed.name} live, {predicted:.3f} predicted{same_text}"
