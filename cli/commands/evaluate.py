"""`specstop evaluate`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...policies.errors import InputError
from ..options import (
    PROMPTS,
    RESULT,
    ROUNDS,
    Batches,
    Json,
    Overwrite,
    Policies,
    Quiet,
    Seed,
    Wide,
    batch_sizes,
    config_saved,
    option,
)
from ..output import check_failures, output, print_json, progress_bars, table

if TYPE_CHECKING:
    from ...policies.contract import StopPolicy
    from ...policies.profile import Profile
    from ...train.evaluate.records import Report
    from ...train.evaluate.report import Section

TABLES = ("policies", "batch", "importance", "comparison")
WIDE_TABLES = (*TABLES, "fixed", "acceptance")

HeldOut = Annotated[list[Path], option(PROMPTS, "Trace folder of held-out prompts; repeatable for several places.")]
Profiles = Annotated[list[Path], option(PROMPTS, "Latency profile; repeatable for several places.", "--profile")]
Earlier = Annotated[list[Path], option(RESULT, "Earlier report to compare with. Without --traces: two reports.")]
OptionalOut = Annotated[Path | None, option(RESULT, "Folder for the report. Default: it is only printed.")]
TrainTraces = Annotated[
    Path | None, option(PROMPTS, "Training traces to tune thresholds and rates on for this profile.")
]
SweepOption = Annotated[bool, option(ROUNDS, "Add from which cost of a draft step each policy pays.", "--sweep")]
Achievable = Annotated[bool, option(ROUNDS, "Add what a policy with all features reaches (minutes).", "--achievable")]
Arrivals = Annotated[
    str | None,
    option(ROUNDS, "With --batch: requests per second at random times, or a JSON file of times. Default: all at once."),
]
Cluster = Annotated[str, option(RESULT, "Unit of the intervals: prompt, or group if its prompts are similar.")]
Primary = Annotated[
    str, option(RESULT, "Policy chosen before this evaluation: its interval is not widened for the other policies.")
]
Overlap = Annotated[bool, option(PROMPTS, "Warn about training prompts instead of refusing them.", "--allow-overlap")]


def evaluate(
    *,
    traces: HeldOut = [],  # noqa: B006
    profile: Profiles = [],  # noqa: B006
    policy: Policies = [],  # noqa: B006
    compare: Earlier = [],  # noqa: B006
    out: OptionalOut = None,
    train_traces: TrainTraces = None,
    sweep: SweepOption = False,
    achievable: Achievable = False,
    batch: Batches = None,
    arrivals: Arrivals = None,
    cluster: Cluster = "prompt",
    primary: Primary = "",
    allow_overlap: Overlap = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    wide: Wide = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute what each policy gains on held-out prompts, by exact replay with the latency of a machine.

    Several traces or profiles are several places: the result says where to deploy each policy.

    Example: specstop evaluate --traces held-out --profile profile.json --policy policy --out report
    """
    if not traces:
        _print_comparison(compare, json, seed)
        return
    from ...policies.profile import Profile

    sizes, times = batch_sizes(batch), _arrivals(arrivals, batch, seed)
    profiles = [Profile.load(path) for path in profile]  # reports an invalid profile before torch is imported
    if not profiles or len(compare) > 1:
        raise InputError("expected at least one --profile, and with --traces at most one --compare")
    is_table = len(traces) * len(profiles) > 1
    single = {"train-traces": train_traces, "sweep": sweep, "achievable": achievable, "batch": batch, "primary": primary,
              "compare": compare}  # fmt: skip
    if is_table and (name := next((name for name, value in single.items() if value), None)):
        raise InputError(
            f"--{name}: expected one --traces and one --profile; in several, policies are used as they are"
        )
    from ...policies.registry import load_policy
    from ...train.evaluate.evaluate import evaluate as run
    from ...train.replay.traces.checking import load_traces

    policies, saved = [load_policy(spec) for spec in policy], config_saved(out) if out else contextlib.nullcontext()
    with progress_bars(quiet or json) as progress, saved:
        options: dict[str, Any] = {"allow_overlap": allow_overlap, "seed": seed, "progress": progress}
        if is_table:
            _evaluate_places(traces, profiles, policies, out, overwrite, json, options)
            return
        report = run(
            load_traces(traces[0]), profiles[0], policies, out=out, sweep=sweep, achievable=achievable, batch=sizes,
            train_traces=load_traces(train_traces) if train_traces else None, compare=compare[0] if compare else None,
            arrivals=times, cluster=cluster, primary=primary, overwrite=overwrite, **options,
        )  # fmt: skip
    if json:
        print_json(report.to_dict())
    else:
        show_report(report, wide)
        if out is not None:
            output().print(f"The page: {out / 'report.html'} (also report.md, report.json, report.csv)")
    check_failures(report.failed)


def show_report(report: Report, wide: bool = False) -> None:
    """Print the tables of a report, its notes and the answer; `wide` prints all columns and more tables."""
    from ...policies.learned import sampling_text
    from ...train.evaluate.report import sections

    facts = report.facts
    sampled = sampling_text(facts["temperature"], facts["sampling"])
    output().print(f"{facts['prompts']} held-out prompts, {sampled}, {facts['intervals']}")
    for section in sections(report.to_dict()):
        if section.id in (WIDE_TABLES if wide else TABLES):
            _print_section(section, wide)
    for note in (*report.caveats, *report.findings):
        output().print(f"Note: {note}")
    answer = report.answer
    for text in ["no policy was compared"] if answer is None else [answer.headline, answer.interval, *answer.why]:
        output().print(text)


def _print_section(section: Section, wide: bool = False) -> None:
    """Print the first four columns, or all."""
    end = None if wide else 4
    table(section.title, section.columns[:end], [[cell.text for cell in row[:end]] for row in section.cells], wide)
    if section.id in ("importance", "comparison", "batch"):
        output().print(section.text)


def _print_comparison(paths: list[Path], json: bool, seed: int) -> None:
    """Compare two finished reports."""
    if len(paths) != 2:
        raise InputError("--traces: expected traces, or two reports to compare (--compare BEFORE --compare AFTER)")
    from ...train.evaluate.report import Section
    from ...train.evaluate.report_comparison import compare_reports, read_report

    section = compare_reports(*map(read_report, paths), seed=seed).section()
    if json:
        print_json(section)
    else:
        _print_section(Section("comparison", **section))


def _evaluate_places(
    traces: list[Path], profiles: list[Profile], policies: list[StopPolicy], out: Path | None, overwrite: bool,
    json: bool, options: dict[str, Any],
) -> None:  # fmt: skip
    """Evaluate every trace with every profile, write places.json and places.md, and print them."""
    from ...policies.files import prepare_output_dir, staged_folder, write_atomic, write_json
    from ...train.evaluate.places import COLUMNS, evaluate_places
    from ...train.replay.traces.checking import load_traces

    if out is not None:
        prepare_output_dir(out, overwrite=overwrite)
    opened = {str(path): load_traces(path) for path in traces}
    costs = {f", {profile.source}" if len(profiles) > 1 else "": profile for profile in profiles}
    if len(opened) < len(traces) or len(costs) < len(profiles):
        raise InputError("--traces, --profile: expected each trace and each profile once")
    places = {a + b: (trace, profile) for (a, trace), (b, profile) in itertools.product(opened.items(), costs.items())}
    result = evaluate_places(policies, places, **options)
    if out is not None:
        with staged_folder(out) as stage:
            write_json(stage / "places.json", result.to_dict())
            write_atomic(stage / "places.md", result.to_markdown())
    if json:
        print_json(result.to_dict())
        return
    for place in result.places:
        table(place.title, COLUMNS, place.rows())
    for text in result.summary():
        output().print(text)


def _arrivals(text: str | None, batch: str | None, seed: int) -> Callable[[int], Any]:
    """Return the function from the number of requests to their times of arrival."""
    from ...policies.files import read_json
    from ...train.replay.arrivals import at_once, poisson, recorded

    if text is None:
        return at_once
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
        return lambda count: recorded(times, count)
    poisson(1, rate)
    return lambda count: poisson(count, rate, seed)
