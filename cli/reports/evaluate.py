"""`specstop evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console.output import output, print_json, progress_bars, table
from ..options.config import config_saved
from ..options.sampling import UNUSED, with_shaping
from ..options.shared import Config, Json, Out, Overwrite, Policies, ProfileFile, Quiet, Seed, Set, Traces

if TYPE_CHECKING:
    from ...decode.verify.sampling import Shaping
    from ...train.report.records import Report


@with_shaping
def evaluate(
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
    shaping: Shaping = UNUSED,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
    set: Set = [],  # noqa: B006
) -> None:
    """Say offline, exactly, what each policy would gain on held-out prompts with this latency.

    Filters are those that the traces were sampled with; traces sampled otherwise than --top-p and the like say are refused.
    """
    from ...policies.latency.profile import Profile

    costs = Profile.load(profile)
    from ...policies.storage.registry import load_policy
    from ...train.report.evaluate import evaluate as run, load_traces

    with progress_bars(quiet or json) as progress, config_saved(out):
        report = run(
            load_traces(traces),
            costs,
            [load_policy(spec) for spec in policy],
            train_traces=load_traces(train_traces) if train_traces else None,
            out=out,
            sweep=sweep,
            achievable=achievable,
            shaping=shaping if shaping.facts else None,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )
    if json:
        print_json(report.to_dict())
        return
    show_report(report)
    page = out / "report.html"
    output().print(f"The page: {page} (the same as report.md, report.json, report.csv, report.png beside it)")


def show_report(report: Report) -> None:
    """Print a report's table, its curve of fixed lengths, its caveats and findings, and the answer."""
    from ...policies.learned.conditions import sampling_text
    from ...train.report.writing.files import headline, policy_rows

    facts = report.facts
    sampled = sampling_text(facts["temperature"], facts["shaping"])
    title = f"{facts['prompts']} held-out prompts, {sampled}, {facts['intervals']}"
    heads, *rows = policy_rows(report)
    table(title, heads, rows)
    by_length = [
        ("tokens/s, fixed length", *(f"{rate:.0f}" for rate in report.fixed)),
        ("P(A >= k)", "", *(f"{p:.2f}" for p in report.acceptance)),
    ]
    table("By length", ("k", *map(str, range(len(report.fixed)))), by_length)
    console = output()
    for text in (*report.caveats, *report.findings):
        console.print(f"Note: {text}")
    console.print(headline(report))
    if report.answer is not None:
        console.print(" ".join([f"How sure: {report.answer.sure}", *report.answer.why]))
