"""`specstop import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console.output import print_json, table
from ..options.config import config_saved
from ..options.shared import Json, Out, Overwrite


def import_(
    weights: Annotated[Path, typer.Argument(help="The .pt, .bin or .safetensors file, or a folder with one.")],
    out: Out,
    layout: Annotated[
        str, typer.Option(help="dynasd-soft, dynasd-hard, specdec, or auto: by the tensors' names.")
    ] = "auto",
    threshold: Annotated[
        float | None,
        typer.Option(help="Threshold of the published rule. Default: 0.4 (DynaSD), 0.3 (SpecDec++, h = 0.7)."),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Deepest draft. Default: 5 (DynaSD), 20 (SpecDec++).")] = None,
    rejection_weight: Annotated[
        float,
        typer.Option(
            help="Weight of rejections in SpecDec++'s training, whose bias is taken out: 6 for the released head, 1 for none."
        ),
    ] = 1.0,
    name: Annotated[str | None, typer.Option(help="Name of the policy; default: the layout's.")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Bring a released head (DynaSD, SpecDec++) into a policy folder. No code of the file is run."""
    from ...train.released.convert import import_weights

    with config_saved(out):
        done = import_weights(
            weights,
            out,
            layout=layout,
            threshold=threshold,
            depth=depth,
            rejection_weight=rejection_weight,
            name=name,
            overwrite=overwrite,
        )
    policy = done.policy
    facts = {
        "layout": done.layout,
        "reads": ", ".join((*policy.features, *(f"{v} of {size} numbers" for v, size in policy.sizes.items()))),
        "rule": ", ".join(f"{key} {value}" for key, value in policy.rule.to_dict().items()),
        "max depth": policy.max_depth,
        "weights": sum(array.size for array in policy.head.tensors().values()),
    }
    if json:
        print_json({"path": str(done.path), **facts})
    else:
        table(f"{done.path}: {policy.name}", ("what", "value"), [(key, str(value)) for key, value in facts.items()])
