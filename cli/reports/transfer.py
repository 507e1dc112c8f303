"""`specstop transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...policies.files import prepare_output_dir, staged_folder
from ..console.output import output, print_json, progress_bars, table
from ..options.config import config_saved
from ..options.shared import Json, Out, Overwrite, Policies, Quiet, Seed


def transfer(
    traces: Annotated[
        list[Path], typer.Option(help="Held-out trace folder of `specstop collect`, a column each; repeatable.")
    ],
    profile: Annotated[
        list[Path],
        typer.Option("--profile", help="Latency profile of `specstop profile`: one for all traces, or one for each."),
    ],
    out: Out,
    policy: Policies = [],  # noqa: B006
    by_group: Annotated[
        bool, typer.Option("--by-group", help="Show a column for each group of prompts in the traces.")
    ] = False,
    allow_overlap: Annotated[
        bool,
        typer.Option(
            "--allow-overlap", help="Warn about prompts that policies were trained on instead of refusing them."
        ),
    ] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Use policies on traces that they were not trained on: a table that says where not to deploy them."""
    from ...policies.profile import Profile

    costs = [Profile.load(path) for path in profile]  # report invalid profiles before torch is imported
    from ...policies.registry import load_policy
    from ...train.replay.traces.checking import load_traces
    from ...train.report.whatif.records import write_whatif
    from ...train.report.whatif.transfer import transfer as run

    prepare_output_dir(out, overwrite=overwrite)
    policies = [load_policy(spec) for spec in policy]
    names = [p.name for p in policies]
    if len(names) > len(dict.fromkeys(names)):  # folders tell policies of one name apart
        names = [
            Path(spec).name if names.count(p.name) > 1 else p.name for spec, p in zip(policy, policies, strict=True)
        ]
    with progress_bars(quiet or json) as progress:
        found = run(
            policies,
            [load_traces(path) for path in traces],
            costs,
            names=names,
            by_group=by_group,
            allow_overlap=allow_overlap,
            seed=seed,
            progress=progress,
        )
    with config_saved(out), staged_folder(out) as stage:
        write_whatif(found, stage)
    if json:
        print_json(found.to_dict())
        return
    head, rows = found.table()
    table("Ratio to the best fixed length of each column", head, rows)
    for name, where in found.refused:
        output().print(f"do not deploy {name} on {where}: its interval lies below the best fixed length there")
    output().print(f"transfer.json and transfer.md are in {out}")
