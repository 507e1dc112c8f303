"""`specstop deploy`: a policy, or what of it another runtime can take, where it runs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.errors import InputError, PolicyError, close_match
from ..options import Json, Out, Overwrite, Quiet, Seed, config_saved
from ..output import output, print_json, progress_bars, table

if TYPE_CHECKING:
    from ...policies.display import Progress

TARGETS = ("onnx", "hf", "vllm", "sglang", "trtllm", "llama.cpp")
FROM_TRACES = ("vllm", "sglang", "trtllm", "llama.cpp")
BY_BATCH = ("vllm", "sglang", "trtllm")

To = Annotated[
    str,
    typer.Option(
        help="onnx: a file with the calibrated probabilities. hf: a folder for generate(custom_generate=...) that runs the "
        "exact policy. vllm: the policy as a class that drafts there; vllm, sglang, trtllm: draft lengths by "
        "batch size; llama.cpp: draft length and p_min; these four from --traces and --profile."
    ),
]


def deploy(
    out: Out,
    to: To = "onnx",
    policy: Annotated[
        str | None,
        typer.Option(
            help="A policy folder of `specstop train`, or hub:owner/name; of an engine's table: whose loss is to be stated."
        ),
    ] = None,
    traces: Annotated[Path | None, typer.Option(help="Training traces, dense ones of chains.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Latency profile of `specstop profile`.")] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Traces of other prompts, which the stated figures are from; default: a quarter of --traces, held out."
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="hf: the drafter, as in `specstop decode`; the folder of a trained drafter is exported too. Default: the "
            "drafter of --traces, or that of the policy's training."
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="vllm, sglang, trtllm: the largest batch of the table. Default: 256, 64, 256.")
    ] = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a learned policy, or what of it another runtime can take, for that runtime.

    Example: specstop deploy --to hf --policy policy --out exported
    """
    if to not in TARGETS:
        raise InputError(f"--to: expected one of {', '.join(TARGETS)}, not {to!r}{close_match(to, TARGETS)}")
    if max_batch is not None and to not in BY_BATCH:
        raise InputError(f"--max-batch: only {', '.join(BY_BATCH)} have lengths by batch size, not {to}")
    if drafter is not None and to != "hf":
        raise InputError(
            f"--drafter: only hf carries a drafter, not {to}; an engine's files are of the drafter of --traces"
        )
    if to == "onnx":
        deploy_onnx(_named(policy, to), out, overwrite, json)
        return
    missing = [name for name, path in (("--traces", traces), ("--profile", profile)) if path is None]
    if missing and (to in FROM_TRACES or len(missing) == 1 or held_out is not None):
        raise InputError(
            f"{' and '.join(missing)}: expected as well; what {to} is to do is chosen, and its gain stated, by replaying "
            "traces under a profile (specstop collect, specstop profile)"
        )
    # A hub folder is for others: paths of this machine mean nothing there.
    with progress_bars(quiet or json) as progress, nullcontext() if to == "hf" else config_saved(out):
        figures = _deploy(to, policy, traces, profile, held_out, drafter, out, max_batch, seed, overwrite, progress)
    if json:
        print_json(figures)
        return
    show_export(figures)
    output().print(f"README.md in {out} says how to use it, what to expect and what is lost")


def _deploy(
    to: str,
    policy: str | None,
    traces: Path | None,
    profile: Path | None,
    held_out: Path | None,
    drafter: str | None,
    out: Path,
    max_batch: int | None,
    seed: int,
    overwrite: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Call the engine's function."""
    from ...policies.registry import load_policy

    if to == "hf" and (traces is None or profile is None):
        from ...train.export.hf import deploy_hf

        return deploy_hf(_named(policy, to), out, drafter=drafter, overwrite=overwrite)
    from ...policies.profile import Profile
    from ...train.replay.traces.checking import load_traces

    assert traces is not None and profile is not None
    costs, opened = Profile.load(profile), load_traces(traces)
    held = load_traces(held_out) if held_out is not None else None
    shared: dict[str, Any] = {"held_out": held, "seed": seed, "overwrite": overwrite, "progress": progress}
    if to == "hf":
        from ...train.export.deploy import deploy_hf_replayed

        return deploy_hf_replayed(_named(policy, to), opened, costs, out, drafter=drafter, **shared)
    from ...train.export.deploy import deploy as run

    stated = load_policy(policy) if policy is not None else None
    return run(to, opened, costs, out, stated, max_batch=max_batch, **shared)


def _named(policy: str | None, to: str) -> str:
    if policy is None:
        raise InputError(f"--policy: expected a policy folder of `specstop train`; {to} is made of one")
    return policy


def deploy_onnx(policy: str, out: Path, overwrite: bool, json: bool) -> None:
    """Write the ONNX model and say how it was checked."""
    from ...policies.files import prepare_output_file
    from ...policies.learned import LearnedPolicy
    from ...policies.registry import load_policy
    from ...train.export.onnx_model import PRODUCER, export_onnx

    prepare_output_file(out, PRODUCER.encode(), overwrite=overwrite)
    chosen = load_policy(policy)
    if not isinstance(chosen, LearnedPolicy):
        raise PolicyError(f"--policy: {policy} has no head to deploy; expected a policy folder of `specstop train`")
    found = export_onnx(chosen, out)
    if json:
        print_json(found)
        return
    apart = found["difference"]
    checked = "onnxruntime is not installed: not checked" if apart is None else f"{apart:.1e} off at most"
    table(
        f"{chosen.name} as ONNX",
        ("what", "value"),
        [(k, str(found[k])) for k in ("path", "bytes")] + [("check", checked)],
    )


def show_export(figures: dict[str, Any]) -> None:
    """Print what an export gains at one request, and by batch size."""
    from ...decode.benchmark import Ratio

    alone = figures.get("alone")
    rows = []
    if alone:
        named = {
            "to plain decoding": "to_plain",
            f"to the best fixed length ({alone['best_fixed']})": "to_best_fixed",
            f"{alone.get('policy')} to this export": "policy_to_this",
            "knowing every accepted length, to this": "oracle_bound_to_this",
        }
        rows = [(what, Ratio(**r).text()) for what, key in named.items() if (r := alone.get(key))]
    for name in ("settings", "older_settings"):
        if name in figures:
            rows.append((name, ", ".join(f"{k} {v:g}" for k, v in figures[name].items())))
    title = f"{figures['engine']}: times as fast, one request, {alone['prompts']}" if alone else figures["engine"]
    table(title, ("what", "value"), rows or [("policy", str(figures.get("policy")))])
    batches = figures.get("batches")
    if batches:
        chosen = "length" if "length" in batches[0] else "steps"
        lines = [(str(b["batch"]), str(b[chosen]).strip("[]"), f"{b['to_plain']:.3f}") for b in batches]
        table("By batch size", ("batch", chosen, "to plain"), lines)
