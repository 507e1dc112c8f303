"""`specstop evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...policies.errors import InputError
from .. import options
from ..output import print_json, progress_bars, table, write

if TYPE_CHECKING:
    from ...train.evaluate.records import Report
    from ...train.evaluate.report import Section

TABLES = ("policies", "serving", "batch", "importance", "comparison")
WIDE_TABLES = (*TABLES, "fixed", "acceptance", "routes", "groups")


def evaluate(
    *,
    traces: list[Path] | None = None,
    profile: list[Path] | None = None,
    policy: list[str] | None = None,
    compare: list[Path] | None = None,
    out: Path | None = None,
    train_traces: Path | None = None,
    achievable: bool = False,
    batch: str | None = None,
    arrivals: str | None = None,
    cluster: str = "prompt",
    primary: str = "",
    allow_overlap: bool = False,
    report_prompts: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    wide: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Compute what each policy gains on held-out prompts, by exact replay with the latency of a machine.

    Several traces or profiles are several places: the result says where to deploy each policy.

    Example: specstop evaluate --traces held-out --profile profile.json --policy policy --out report
    """
    earlier = compare or []
    if not traces:
        _compare(earlier, json, seed)
        return
    from ...policies.profile import Profile

    sizes, times = options.batch_sizes(batch), _arrivals(arrivals, batch, seed)
    profiles = [Profile.load(path) for path in profile or ()]  # reports an invalid profile before torch is imported
    if not profiles or len(earlier) > 1:
        raise InputError("expected at least one --profile, and with --traces at most one --compare")
    from ...policies.registry import load_policy
    from ...train.evaluate.evaluate import evaluate as run

    policies = [load_policy(spec) for spec in policy or ()]
    with progress_bars(quiet or json) as progress:
        report = run(
            traces, profiles, policies, out=out, achievable=achievable, batch=sizes, arrivals=times,
            train_traces=train_traces, compare=earlier[0] if earlier else None, cluster=cluster, primary=primary,
            overwrite=overwrite, allow_overlap=allow_overlap, report_prompts=report_prompts, seed=seed, progress=progress,
        )  # fmt: skip
    if json:
        print_json(report.to_dict())
    else:
        show_report(report, wide)
        if out is not None:
            write(f"The page: {out / 'report.html'} (also report.md, report.json, report.csv)")
    if report.failed:
        raise report.failed[0]


def show_report(report: Report, wide: bool = False) -> None:
    """Print the tables of a report, its notes and the answer; `wide` prints all columns and more tables."""
    from ...policies.learned import sampling_text
    from ...train.evaluate.report import sections

    facts = report.facts
    if not report.places:
        sampled = sampling_text(facts["temperature"], facts["sampling"])
        write(f"{facts['prompts']} held-out prompts, {sampled}, {facts['intervals']}")
    for section in sections(report.to_dict()):
        if report.places or section.id in (WIDE_TABLES if wide else TABLES):
            _print_section(section, wide)
    for note in (*report.caveats, *report.findings):
        write(f"Note: {note}")
    for text in report.summary or ["no policy was compared"]:
        write(text)


def _print_section(section: Section, wide: bool = False) -> None:
    """Print the first columns, or all."""
    end = None if wide else 5 if section.id == "serving" else 4
    table(section.title, section.columns[:end], [[cell.text for cell in row[:end]] for row in section.cells], wide)
    if section.id in ("serving", "importance", "comparison", "batch"):
        write(section.text)


def _compare(paths: list[Path], json: bool, seed: int) -> None:
    """Compare two finished reports."""
    if len(paths) != 2:
        raise InputError("--traces: expected traces, or two reports to compare (--compare BEFORE --compare AFTER)")
    from ...train.evaluate.report import Section
    from ...train.evaluate.report_comparison import compare_reports, read_report

    section = compare_reports(*map(read_report, paths), seed=seed)
    if json:
        print_json(section)
    else:
        _print_section(Section("comparison", **section))


def _arrivals(text: str | None, batch: str | None, seed: int) -> Callable[[int], Any]:
    """Return the function from the number of requests to their times of arrival."""
    from ...policies.files import read_json
    from ...train.replay.batch import arrive_at_once, poisson_arrivals, recorded_arrivals

    if text is None:
        return arrive_at_once
    if batch is None:
        raise InputError("--arrivals: only requests of a batch wait for each other; give --batch too")
    try:
        rate = float(text)
    except ValueError:
        times = read_json(Path(text), "--arrivals")
        if not isinstance(times, list) or not all(type(time) in (int, float) for time in times):
            raise InputError(
                f"--arrivals: expected a rate, or a JSON file with a list of seconds, got {text}"
            ) from None
        return lambda count: recorded_arrivals(times, count)
    poisson_arrivals(1, rate)
    return lambda count: poisson_arrivals(count, rate, seed)
