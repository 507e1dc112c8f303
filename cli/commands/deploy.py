"""`specstop deploy`: a policy, or what another runtime can take of it, as files of that runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..output import print_json, progress_bars, table, write


def deploy(
    out: Path,
    to: str = "onnx",
    policy: str | None = None,
    traces: Path | None = None,
    profile: Path | None = None,
    held_out: Path | None = None,
    drafter: list[str] | None = None,
    overwrite: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Write a policy, or what another runtime can take of it, for that runtime.

    Example: specstop deploy --to vllm --traces traces --profile profile.json --policy policy --out vllm
    """
    from ...policies.profile import Profile

    # An invalid profile is reported before torch is imported.
    costs = None if profile is None else Profile.load(profile)
    from ...train.export.deploy import deploy as run

    with progress_bars(quiet or json) as progress:
        figures = run(
            to, out, policy, traces=traces, profile=costs, held_out=held_out, drafter="+".join(drafter or ()) or None,
            overwrite=overwrite, progress=progress,
        )  # fmt: skip
    if json:
        print_json(figures)
        return
    show_export(figures)
    if to != "onnx":
        write(f"README.md in {out} says how to use it, what speed to expect and what is lost")


def show_export(figures: dict[str, Any]) -> None:
    """Print the expected speed of an export at one request and by batch size, or how an ONNX model was checked."""
    from ...decode.benchmark import Ratio

    if "difference" in figures:
        difference = figures["difference"]
        check = "not checked: onnxruntime is not installed" if difference is None else f"at most {difference:.1e} off"
        rows = [("path", figures["path"]), ("bytes", str(figures["bytes"])), ("check", check)]
        table("ONNX model", ("what", "value"), rows)
        return
    title, rows = figures["engine"], [("policy", str(figures.get("policy")))]
    if alone := figures.get("alone"):
        title = f"{title}: times as fast, one request, {alone['prompts']}"
        ratios = {
            "to plain decoding": "to_plain",
            f"to the best fixed length ({alone['best_fixed']})": "to_best_fixed",
            f"{alone.get('policy')} to this export": "policy_to_this",
            "oracle bound to this export": "oracle_bound_to_this",
        }
        rows = [(what, Ratio(**ratio).text()) for what, key in ratios.items() if (ratio := alone.get(key))]
    if "settings" in figures:
        rows.append(("settings", ", ".join(f"{name} {value:g}" for name, value in figures["settings"].items())))
    table(title, ("what", "value"), rows)
    if batches := figures.get("batches"):
        lines = [(str(row["batch"]), str(row["length"]), Ratio(**row["to_plain"]).text()) for row in batches]
        table("By batch size", ("batch", "length", "to plain decoding"), lines)
