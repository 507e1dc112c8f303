"""`specstop train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.arguments import check_params
from ...policies.errors import InputError
from ..options import Json, Out, Overwrite, ProfileFile, Quiet, Seed, config_saved, key_values
from ..output import flat, next_step, output, print_json, progress_bars, say, table

if TYPE_CHECKING:
    from ...train.fit.run import Trained

DIAGNOSTICS = ("accept_", "next_", "survival_", "fit_", "select_", "held_out_rounds")
"""Prefixes of metrics that are in the policy's README.md only."""


def train(
    *,
    traces: Annotated[
        list[Path],
        typer.Option(help="Trace folder of `specstop collect`; repeatable, such as for several temperatures."),
    ],
    profile: ProfileFile,
    out: Out,
    head: Annotated[
        str,
        typer.Option(
            help="Head to fit: logistic, tokens, mlp, xgboost, ...; with --tune several, separated by commas. Default: "
            "logistic, or with --tune these four."
        ),
    ] = "",
    rule: Annotated[
        str,
        typer.Option(
            help="derived (from costs), survival, step, any, batch, or gain for trees; with --tune several, separated by "
            "commas. Default: the head's."
        ),
    ] = "",
    threshold: Annotated[
        float | None,
        typer.Option(help="Threshold of the rules survival, step and any. Default: the one that replays fastest."),
    ] = None,
    feature: Annotated[list[str], typer.Option(help="Feature that the head reads; repeatable. Default: a few.")] = [],  # noqa: B006
    hidden: Annotated[list[str], typer.Option(help="Hidden state that the head reads; repeatable.")] = [],  # noqa: B006
    mixed: Annotated[
        Path | None, typer.Option(help="Trace of `collect --extra mix=...` that the head is fitted on instead.")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--for", help="vllm: a policy that reads only what that engine has.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the policy. Default: the head's.")] = None,
    param: Annotated[
        list[str], typer.Option(help="Hyper-parameter of the head as key=value, such as epochs=20; repeatable.")
    ] = [],  # noqa: B006
    trainer: Annotated[
        list[str],
        typer.Option(help="Argument of lightning's Trainer as key=value, such as accelerator=gpu; repeatable."),
    ] = [],  # noqa: B006
    nodes: Annotated[
        str,
        typer.Option(help="With --rule gain: sizes of smaller trees to try, such as 63,24,8; the fastest one is kept."),
    ] = "",
    tune: Annotated[
        int | None, typer.Option(help="Try that many heads, hyper-parameters and rules by replay, and train the best.")
    ] = None,
    storage: Annotated[
        Path | None, typer.Option(help="With --tune: journal file of optuna; a search continues from its trials.")
    ] = None,
    report_share: Annotated[
        float,
        typer.Option(help="Share of the prompts that is kept out of fitting and selection, for the held-out figures."),
    ] = 0.2,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit a stop head on traces and save it as a policy folder.

    Example: specstop train --traces traces --profile profile.json --out policy
    """
    from ...policies.profile import Profile

    params, arguments = key_values("--param", param), key_values("--trainer", trainer)
    check_params(params)
    costs = Profile.load(profile)  # reports an invalid profile before torch is imported
    sizes = _integers(nodes)
    from ...train.fit.run import train as run
    from ...train.replay.checks import load_traces

    with progress_bars(quiet or json) as progress, config_saved(out):
        trained = run(
            [load_traces(path) for path in traces], costs, head=head.split(",") if head else None, out=out,
            rule=rule.split(",") if rule else None, threshold=threshold, features=feature or None, hidden=hidden or None,
            name=name, seed=seed, report_share=report_share, params=params, trainer=arguments,
            mixed=load_traces(mixed) if mixed else None, host=host, nodes=sizes, tune=tune,
            storage=storage, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    if json:
        print_json(trained.metrics)
        return
    show_trained(trained, out)
    next_step("evaluate", "--traces", "HELD_OUT", "--train-traces", traces[0], "--profile", profile, "--policy", out,
              "--out", "report")  # fmt: skip


def show_trained(trained: Trained, out: Path) -> None:
    """Print the replayed speed of a trained policy, and the trials of a search."""
    metrics = trained.metrics
    figures = {
        name: value
        for name, value in metrics.items()
        if not isinstance(value, list) and not name.startswith(DIAGNOSTICS)
    }
    table(f"{out}: {trained.policy.name}", ("what", "value"), flat(figures))
    if trials := metrics.get("trials"):
        names = [name for name in trials[0] if any(row.get(name) is not None for row in trials)]
        table(
            "Trials, replayed on prompts left out, the best first", [name.replace("_", " ") for name in names],
            [[_cell(row.get(name)) for name in names] for row in trials], wide=True,
        )  # fmt: skip
    ratio = metrics.get("held_out_ratio_to_best_fixed", 1.0)
    if ratio < 1.0:
        say(f"slower than the best fixed length: {ratio:.3f} of it on held-out prompts; see what `specstop evaluate` says "
            "before you use it, and try another --head or more prompts")  # fmt: skip
    output().print(f"the policy is in {out}; its README.md has these tables and its calibration")


def _integers(text: str) -> list[int]:
    """Return the integers in a list separated by commas."""
    try:
        return [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise InputError(f"--nodes: expected numbers such as 63,24,8, not {text!r}") from None


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
