"""`specstop import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...policies.errors import InputError
from ..options import Dtype, Json, Models, Out, Overwrite, config_saved
from ..output import next_step, print_json, table


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="Weights: a .pt, .bin or .safetensors file, or a folder with one. Or records of vLLM: a .jsonl file of "
            "responses."
        ),
    ],
    out: Out,
    target: Annotated[
        str | None,
        typer.Option(help="Target of Medusa's heads, which become a drafter, or of records. Default: import a policy."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model of records.")] = None,
    dtype: Dtype = "float32",
    layout: Annotated[
        str, typer.Option(help="Of a policy: dynasd-soft, dynasd-hard, specdec, or auto: by the tensors' names.")
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
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import released weights (a stop head of DynaSD or SpecDec++, or Medusa's heads) or acceptance records of vLLM.

    No code of the file is run. Example: specstop import vllm.jsonl --out traces
    """
    is_medusa = target is not None and draft is None and source.is_dir()
    if not (is_medusa or _has_weights(source)):
        _import_records(source, out, target or "", draft or "", overwrite, json)
        return
    if draft is not None:
        raise InputError("--draft: names the draft model of records; weights have none")
    if target is not None:
        given = {
            "layout": layout != "auto", "threshold": threshold is not None, "depth": depth is not None,
            "rejection-weight": rejection_weight != 1.0,
        }  # fmt: skip
        if odd := [key for key, is_given in given.items() if is_given]:
            raise InputError(f"--{odd[0]}: a drafter has none; leave it out, or --target to import a policy")
        _drafter(source, out, target, dtype, overwrite, json)
        return
    if dtype != "float32":
        raise InputError("--dtype: is that of the target of Medusa's heads; give --target with it, or leave it out")
    from ...train.released import import_weights

    with config_saved(out):
        done = import_weights(
            source,
            out,
            layout=layout,
            threshold=threshold,
            depth=depth,
            rejection_weight=rejection_weight,
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


def _has_weights(source: Path) -> bool:
    """Whether a file has the suffix of weights, or a folder has such a file. A path that does not exist counts as weights."""
    suffixes = (".pt", ".pth", ".bin", ".safetensors")
    if source.is_dir():
        return any(path.suffix in suffixes for path in source.iterdir())
    return source.suffix in suffixes or not source.exists()


def _import_records(source: Path, out: Path, target: str, draft: str, overwrite: bool, json: bool) -> None:
    """Convert vLLM's acceptance records to a trace."""
    from ...collect.engines.vllm_records import import_vllm
    from .info import show_trace

    with config_saved(out):
        import_vllm(source, out, target=target, draft=draft, overwrite=overwrite)
    show_trace(out, False, json)


def _drafter(weights: Path, out: Path, target: str, dtype: str, overwrite: bool, json: bool) -> None:
    """Import Medusa's heads."""
    from ...train.released import import_medusa

    with config_saved(out):
        models = Models(target, drafter="lookup", dtype=dtype)
        trained = import_medusa(weights, models.open(models.find(), "plain"), out, overwrite=overwrite)
    network: Any = trained.network
    depth = network.shape.depth
    facts = {"kind": trained.kind, "depth": depth, **trained.provenance}
    if json:
        print_json({"path": str(out), **facts})
        return
    table(f"{out}: a {trained.kind} drafter", ("what", "value"), [(key, str(value)) for key, value in facts.items()])
    # Another type may round the target's weights, which are then not those that the heads are for.
    told = () if dtype == "float32" else ("--dtype", dtype)
    next_step("collect", "--target", target, "--drafter", f"{trained.kind}:{out}", "--depth", depth, *told)
