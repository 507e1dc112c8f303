"""`specstop train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...policies.arguments import check_params
from ..options import key_values, numbers
from ..output import facts, next_step, plain, print_json, print_stderr, progress_bars, table, write

if TYPE_CHECKING:
    from ...train.fit.run import TrainResult

DIAGNOSTICS = ("accept_", "next_", "survival_", "fit_", "select_", "held_out_rounds")
"""Prefixes of metrics that are in the policy's README.md only."""


def train(
    *,
    traces: list[Path],
    profile: Path,
    out: Path,
    decide: str = "stop",
    head: str = "",
    rule: str = "",
    threshold: float | None = None,
    feature: list[str] | None = None,
    hidden: list[str] | None = None,
    mixed: Path | None = None,
    host: str | None = None,
    param: list[str] | None = None,
    trainer: list[str] | None = None,
    nodes: str | None = None,
    tune: int | None = None,
    storage: Path | None = None,
    report_share: float = 0.2,
    seed: int = 0,
    overwrite: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Fit a stop head, or a route among drafters, on traces and save it as a policy folder.

    Example: specstop train --traces traces --profile profile.json --out policy
    """
    from ...policies.profile import Profile

    params, arguments = key_values("--param", param), key_values("--trainer", trainer)
    check_params(params)
    costs = Profile.load(profile)  # reports an invalid profile before torch is imported
    sizes = numbers("--nodes", nodes)
    from ...train.fit.run import train as run

    with progress_bars(quiet or json) as progress:
        trained = run(
            traces, costs, head=head.split(",") if head else None, out=out, rule=rule.split(",") if rule else None,
            decide=decide, threshold=threshold, features=feature or None, hidden=hidden or None, seed=seed,
            report_share=report_share, params=params, trainer=arguments, mixed=mixed, host=host, nodes=sizes, tune=tune,
            storage=storage, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    if json:
        print_json(trained.metrics)
        return
    show_trained(trained, out)
    spec = f"{out}@{drafter}" if (drafter := decide.partition("@")[2]) else out
    next_step("evaluate", "--traces", "HELD_OUT", "--train-traces", traces[0], "--profile", profile, "--policy", spec,
              "--out", "report")  # fmt: skip


def show_trained(trained: TrainResult, out: Path) -> None:
    """Print the replayed speed of a trained policy, and the trials of a search."""
    metrics = trained.metrics
    shown = {name: x for name, x in metrics.items() if not isinstance(x, list) and not name.startswith(DIAGNOSTICS)}
    facts(f"{out}: {trained.policy.name}", shown)
    if trials := metrics.get("trials"):
        names = [name for name in trials[0] if any(row.get(name) is not None for row in trials)]
        table(
            "Trials, replayed on prompts left out, the best first", [name.replace("_", " ") for name in names],
            [[plain(row.get(name)) for name in names] for row in trials], wide=True,
        )  # fmt: skip
    if routes := metrics.get("routes"):
        names = [*routes[0]]
        table("Routes, replayed on the select prompts", names, [[plain(row[name]) for name in names] for row in routes])
    ratio = metrics.get("held_out_ratio_to_best_fixed", 1.0)
    if ratio < 1.0:
        print_stderr(
            f"slower than the best fixed length: {ratio:.3f} of it on held-out prompts; see what `specstop evaluate` "
            "says before you use it, and try another --head or more prompts"
        )
    write(f"the policy is in {out}; its README.md has these tables and its calibration")
