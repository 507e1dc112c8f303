"""`specstop deploy`: a policy, or what another runtime can take of it, as files of that runtime."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import Json, Out, Overwrite, Quiet, config_saved
from ..output import output, print_json, progress_bars, table

To = Annotated[
    str,
    typer.Option(
        help="onnx: a file with the calibrated probabilities. hf: a folder for generate(custom_generate=...) that runs the "
        "exact policy. vllm: the policy as a class that drafts there. vllm, sglang, trtllm: draft lengths by batch size. "
        "llama.cpp: draft length and p_min. These four need --traces and --profile."
    ),
]


def deploy(
    out: Out,
    to: To = "onnx",
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy folder of `specstop train`, or hub:owner/name. Of an engine's table: reports its loss."
        ),
    ] = None,
    traces: Annotated[Path | None, typer.Option(help="Training traces, dense ones of chains.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Latency profile of `specstop profile`. Tables have the batch sizes that it measured."),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Traces of other prompts to report on. Default: a quarter of the prompts of --traces."),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="hf: the drafter, as in `specstop decode`. Default: that of --traces or of the policy's training."
        ),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a policy, or what another runtime can take of it, for that runtime.

    Example: specstop deploy --to vllm --traces traces --profile profile.json --policy policy --out vllm
    """
    from ...policies.profile import Profile

    costs = (
        None if profile is None else Profile.load(profile)
    )  # an invalid profile is reported before torch is imported
    from ...train.export.deploy import deploy as run

    # A hub folder is for others: paths of this machine mean nothing there.
    with progress_bars(quiet or json) as progress, nullcontext() if to in ("hf", "onnx") else config_saved(out):
        figures = run(
            to, out, policy, traces=traces, profile=costs, held_out=held_out, drafter=drafter,
            overwrite=overwrite, progress=progress,
        )  # fmt: skip
    if json:
        print_json(figures)
        return
    show_export(figures)
    if to != "onnx":
        output().print(f"README.md in {out} says how to use it, what speed to expect and what is lost")


def show_export(figures: dict[str, Any]) -> None:
    """Print the expected speed of an export at one request and by batch size, or how an ONNX model was checked."""
    from ...decode.benchmark import Ratio

    if "difference" in figures:
        difference = figures["difference"]
        check = "not checked: onnxruntime is not installed" if difference is None else f"at most {difference:.1e} off"
        rows = [("path", figures["path"]), ("bytes", str(figures["bytes"])), ("check", check)]
        table("ONNX model", ("what", "value"), rows)
        return
    alone, rows = figures.get("alone"), [("policy", str(figures.get("policy")))]
    if alone:
        named = {
            "to plain decoding": "to_plain",
            f"to the best fixed length ({alone['best_fixed']})": "to_best_fixed",
            f"{alone.get('policy')} to this export": "policy_to_this",
            "oracle bound to this export": "oracle_bound_to_this",
        }
        rows = [(what, Ratio(**ratio).text()) for what, key in named.items() if (ratio := alone.get(key))]
    if "settings" in figures:
        rows.append(("settings", ", ".join(f"{name} {value:g}" for name, value in figures["settings"].items())))
    title = f"{figures['engine']}: times as fast, one request, {alone['prompts']}" if alone else figures["engine"]
    table(title, ("what", "value"), rows)
    if batches := figures.get("batches"):
        lines = [(str(row["batch"]), str(row["length"]), Ratio(**row["to_plain"]).text()) for row in batches]
        table("By batch size", ("batch", "length", "to plain decoding"), lines)
