"""`specstop deploy`: a policy, or what of it another runtime can take, where it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ..policies.errors import InputError, PolicyError
from .console import print_json, table
from .options import Json, Out, Overwrite

TARGETS = ("onnx",)


def deploy(
    policy: Annotated[str, typer.Option(help="A policy folder of `specstop train`, or hub:owner/name.")],
    out: Out,
    to: Annotated[str, typer.Option(help="onnx: the calibrated probabilities as an ONNX model.")] = "onnx",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a learned policy for another runtime."""
    from ..policies.learned import LearnedPolicy
    from ..policies.onnx import export_onnx
    from ..policies.specs import load_policy

    if to not in TARGETS:
        raise InputError(f"--to: expected one of {', '.join(TARGETS)}, not {to!r}")
    if out.is_dir() or (out.exists() and not overwrite):
        raise InputError(f"--out: {out} is there already; choose another name, or pass --overwrite to replace a file")
    chosen = load_policy(policy)
    if not isinstance(chosen, LearnedPolicy):
        raise PolicyError(f"--policy: {policy} has no head to deploy; expected a policy folder of `specstop train`")
    found = export_onnx(chosen, out)
    if json:
        print_json(found)
        return
    apart = found["difference"]
    checked = "onnxruntime is not installed: not checked" if apart is None else f"{apart:.1e} at most beside torch"
    table(
        f"{chosen.name} as ONNX",
        ("what", "value"),
        [(k, str(found[k])) for k in ("path", "bytes")] + [("check", checked)],
    )
