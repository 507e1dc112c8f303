"""The verdict of the demo in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...decode.compare.intervals import FEWEST

if TYPE_CHECKING:
    from ..report.records import Line, Report
    from .demo import Demo

SMALL_HEADROOM = 1.05
"""Oracle bound over best fixed length below which there is little to gain."""


def explain(result: Demo) -> list[str]:
    """Return the headline of the report and, if no policy is to be deployed, one sentence that explains why."""
    answer = result.report.answer
    if answer is None:
        return ["No policy was compared."]
    return [answer.headline] if answer.deploy else [answer.headline, _reason(result.report)]


def _reason(report: Report) -> str:
    """Return the main reason against deploying: little head-room, the price of decisions, or noise."""
    assert report.answer is not None
    line = report.line(report.answer.candidate)
    bound = next(line for line in report.lines if line.kind == "bound").to_best_fixed.value
    if bound < SMALL_HEADROOM:
        return f"Why: little head-room. The oracle bound is only {bound:.3f} times the best fixed length."
    saved, decided = _savings(report, line)
    avoided = f"avoid {saved:.1f} ms of wrong stops" if saved > 0 else f"add {-saved:.1f} ms of wrong stops"
    per_tokens = f"in 100 tokens, decisions take {decided:.1f} ms and {avoided}"
    if report.facts["prompts"] < FEWEST:
        return f"Why: only {report.facts['prompts']} prompts, of which {FEWEST} are needed; {per_tokens}."
    if decided > saved:
        return f"Why: the price of decisions: {per_tokens}."
    return (
        f"Why: noise. The gain is {line.to_best_fixed.text()} on {report.facts['prompts']} prompts; {per_tokens}; "
        f"the oracle bound is {bound:.2f} times the best fixed length."
    )


def _savings(report: Report, line: Line) -> tuple[float, float]:
    """Return the milliseconds of wrong stops that a policy avoids in 100 tokens, and those that its decisions take."""
    lost = {stop.name: [100 * ms for ms in stop.ms_per_token] for stop in report.details["stops"]}
    early, late, decided, _ = lost[line.name]
    early_fixed, late_fixed, _, _ = lost["best fixed"]
    return early_fixed + late_fixed - early - late, decided
