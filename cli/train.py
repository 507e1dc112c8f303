"""`specstop train`."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import flat
from .config import save_config
from .console import print_json, progress_bars, table
from .options import Config, Json, Out, Overwrite, ProfileFile, Quiet, Seed, Set, Traces


def train(
    traces: Traces,
    profile: ProfileFile,
    out: Out,
    head: Annotated[str, typer.Option(help="logistic, mlp or xgboost.")] = "logistic",
    rule: Annotated[str, typer.Option(help="derived (from costs, no threshold), survival or step.")] = "derived",
    threshold: Annotated[float, typer.Option(help="Of the rules survival and step.")] = 0.5,
    feature: Annotated[list[str], typer.Option(help="Features that the head reads; default: all recorded ones.")] = [],  # noqa: B006
    name: Annotated[str | None, typer.Option(help="Name of the policy; default: the head's.")] = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
    set: Set = [],  # noqa: B006
) -> None:
    """Fit a stop head on traces and save it as a policy folder."""
    from ..policies.costs import Profile

    costs = Profile.load(profile)
    from ..train.evaluate import load_traces
    from ..train.run import train as run

    with progress_bars(quiet or json) as progress:
        trained = run(
            load_traces(traces),
            costs,
            head=head,
            out=out,
            rule=rule,
            threshold=threshold,
            features=feature or None,
            name=name,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )
    save_config(out)
    if json:
        print_json(trained.metrics)
    else:
        table(f"{out}: {trained.policy.name}, on held-out prompts", ("what", "value"), flat(trained.metrics))
