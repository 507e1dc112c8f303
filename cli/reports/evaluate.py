"""`specstop evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.errors import InputError
from ..common import batch_sizes, check_failures
from ..console.output import output, print_json, progress_bars, table
from ..options.config import config_saved
from ..options.sampling import Filters
from ..options.shared import Json, Out, Overwrite, Policies, ProfileFile, Quiet, Seed, Traces

if TYPE_CHECKING:
    from ...train.report.records import Report


def evaluate(
    *,
    traces: Traces,
    profile: ProfileFile,
    out: Out,
    policy: Policies = [],  # noqa: B006
    train_traces: Annotated[
        Path | None,
        typer.Option(help="Training traces, on which thresholds and rates are tuned for this profile."),
    ] = None,
    sweep: Annotated[
        bool | None,
        typer.Option(help="Show from which cost of a draft step each policy pays. Default: where it takes seconds."),
    ] = None,
    achievable: Annotated[
        bool, typer.Option("--achievable", help="Add what a policy could reach that knows all features. Takes minutes.")
    ] = False,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Also compare with so many texts side by side: 1,2,4,8; the profile needs batches as large as the largest."
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="With --batch: requests a second, at random, or a JSON list of the seconds at which they arrive: all "
            "held-out texts, and all again until they are four times the largest batch. Default: all at once."
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="What intervals resample: prompt (with all its samples), group, or auto: groups if the prompts of a group "
            "resemble each other."
        ),
    ] = "auto",
    primary: Annotated[
        str,
        typer.Option(
            help="Name of the one policy that was chosen before this evaluation: the verdict is about it, and its interval "
            "is not widened for the number of policies."
        ),
    ] = "",
    allow_overlap: Annotated[
        bool,
        typer.Option(
            "--allow-overlap", help="Warn about prompts that policies were trained on instead of refusing them."
        ),
    ] = False,
    filters: Filters,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say offline, exactly, what each policy would gain on held-out prompts with this latency.

    Filters are those that the traces were sampled with; traces sampled otherwise than --top-p and the like say are refused.
    """
    from ...policies.profile import Profile

    sizes, coming = batch_sizes(batch), _arrivals(arrivals, batch, seed)
    costs = Profile.load(profile)  # report an invalid profile before torch is imported
    from ...policies.registry import load_policy
    from ...train.report.checks import load_traces
    from ...train.report.evaluate import evaluate as run

    with progress_bars(quiet or json) as progress, config_saved(out):
        report = run(
            load_traces(traces),
            costs,
            [load_policy(spec) for spec in policy],
            train_traces=load_traces(train_traces) if train_traces else None,
            out=out,
            sweep=sweep,
            achievable=achievable,
            shaping=shaping if (shaping := filters.shaping()).to_dict() else None,
            batch=sizes,
            arrivals=coming,
            cluster=cluster,
            primary=primary,
            allow_overlap=allow_overlap,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )
    if json:
        print_json(report.to_dict())
        check_failures(report.failed)
        return
    show_report(report)
    page = out / "report.html"
    output().print(f"The page: {page} (the same as report.md, report.json and report.csv beside it)")
    check_failures(report.failed)


def _arrivals(told: str | None, batch: str | None, seed: int) -> Callable[[int], Any]:
    """Return when requests arrive, by their number."""
    from ...policies.files import read_json
    from ...train.replay.arrivals import at_once, poisson, recorded

    if told is None:
        return at_once
    if batch is None:
        raise InputError("--arrivals: only batches have requests that wait for each other; give --batch too")
    try:
        rate = float(told)
    except ValueError:
        times = read_json(Path(told), "--arrivals")
        if not isinstance(times, list) or not all(type(time) in (int, float) for time in times):
            raise InputError(f"--arrivals: expected a rate, or a JSON list of seconds; {told} is neither") from None
        return lambda count: recorded(times, count)
    poisson(1, rate)
    return lambda count: poisson(count, rate, seed)


def show_report(report: Report) -> None:
    """Print a report's table, its curve of fixed lengths, its caveats and findings, and the answer."""
    from ...policies.learned import sampling_text
    from ...train.evaluate.report import sections

    facts = report.facts
    sampled = sampling_text(facts["temperature"], facts["shaping"])
    title = f"{facts['prompts']} held-out prompts, {sampled}, {facts['intervals']}"
    policies = sections(report.to_dict())[0]
    rows = [[*(cell.text for cell in row), row[0].note] for row in policies.cells[: len(report.lines)]]
    heads = [*policies.columns, "note"]
    failed = [[f"{failure.policy} FAILED", *["-"] * (len(heads) - 1)] for failure in report.failed]
    table(title, heads, [*rows, *failed])
    not_observed = ["-"] * (len(report.fixed) - 1 - len(report.acceptance))
    by_length = [
        ("tokens/s, fixed length", *(f"{rate:.0f}" for rate in report.fixed)),
        ("P(A >= k)", "", *(f"{p:.2f}" for p in report.acceptance), *not_observed),
    ]
    table("By length", ("k", *map(str, range(len(report.fixed)))), by_length)
    console = output()
    if facts.get("cluster choice"):
        console.print(f"Clusters: {facts['cluster choice']}.")
    if (sides := report.details.get("batch")) is not None:
        _show_batches(sides)
    for text in (*report.caveats, *report.findings):
        console.print(f"Note: {text}")
    console.print(report.answer.headline if report.answer else "no policy was compared")
    if sides is not None:
        console.print(sides["words"])
    if report.answer is not None:
        console.print(" ".join([report.answer.interval, *report.answer.why]))


def _show_batches(found: dict[str, Any]) -> None:
    """Print what each policy gains by batch size."""
    from ...decode.benchmark import Ratio

    best = zip(found["best_fixed"], found["lines"][0]["tokens_per_s"], strict=True)
    rows = [
        ("plain decoding, tokens/s", *(f"{rate:.0f}" for rate in found["plain"])),
        ("best fixed, tokens/s", *(f"fixed:{length}, {rate:.0f}" for length, rate in best)),
    ]
    for line in found["lines"][1:]:
        rows.append((line["name"], *(Ratio(**ratio).text() for ratio in line["to_best_fixed"])))
    table("Texts side by side, best fixed length of that batch size = 1", ("batch", *map(str, found["sizes"])), rows)
