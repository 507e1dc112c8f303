"""`deploy`: what a serving engine can take of a policy, chosen on traces, written as the engine's own files with a page."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ...collect.schema import drafter_of
from ...collect.store import Trace
from ...policies.arguments import check_limits
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import InputError
from ...policies.files import prepare_output_dir, staged_folder, write_atomic, write_json
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ...policies.registry import PolicySpec, as_policy, load_policy
from .folder import Export, Written, plain_values
from .hf import deploy_hf, exported_drafter
from .page import FIGURES, alone_table

ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "llama.cpp": "llama_cpp"}
"""By name the module whose `make_files` is called."""

PAGE = "README.md"
EXPORT_SCHEMA = 1


def deploy(
    to: str,
    traces: Trace,
    profile: Profile,
    out: str | Path,
    policy: PolicySpec | None = None,
    *,
    max_batch: int | None = None,
    held_out: Trace | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write what a serving engine can take of a policy: its files, a page that says what is lost, the figures behind it.

    Args:
        to: of `ENGINES`.
        traces: dense training traces of chains.
        profile: what rounds cost; of one without batches `serving.batch_profile` says how it is scaled to them.
        out: folder for the engine's files, `README.md` and `figures.json`.
        policy: to run there, where the engine can, and whose loss is to be stated.
        max_batch: the largest batch looked at; None = as is usual with the engine.
        held_out: traces of other prompts to say figures on; None = a quarter of `traces`.
        seed: of split, bootstrap and the order of the texts.
        overwrite: replace what is in `out`.
        progress: see `Progress`.

    Returns:
        The figures.

    Raises:
        InputError: `out` is not empty, `max_batch` is below 1, or there is no such engine.
        TraceError: the traces are not dense ones of chains, or lack what the engine's rule reads.
    """
    if to not in ENGINES:
        raise InputError(f"--to: expected one of {', '.join(ENGINES)}, not {to!r}")
    if max_batch is not None:
        check_limits(max_batch=max_batch)
    policy = None if policy is None else as_policy(policy)
    folder = claimed(out, traces, profile, policy, held_out, overwrite=overwrite)
    export = Export(
        traces, profile, policy, held_out=held_out, seed=seed, progress=progress, out=folder, max_batch=max_batch
    )
    written: Written = import_module(f".{ENGINES[to]}", __package__).make_files(export)
    figures = plain_values({**written.figures, "facts": export.facts()})
    told: dict[str, Any] = {"schema": EXPORT_SCHEMA, "kind": "export", "engine": to, **figures}
    with staged_folder(folder) as stage:
        for name, text in written.files.items():
            write_atomic(stage / name, text)
        write_json(stage / FIGURES, told)
        write_atomic(stage / PAGE, written.page)
    return told


def deploy_hf_replayed(
    policy: str | Path,
    traces: Trace,
    profile: Profile,
    out: str | Path,
    *,
    drafter: str | None = None,
    held_out: Trace | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write the folder of `deploy_hf` with the policy's replayed gains on its card.

    Args:
        policy: a policy folder, `hub:owner/name`, or a built-in; a learned one is written as it was replayed, settled for
            the profile.
        drafter: as of `find_drafter`; None = that of the traces.
        traces, profile, held_out, seed, progress: see `Export`.
        out, overwrite: see `deploy_hf`.

    Raises:
        InputError, PolicyError: see `deploy_hf`.
        TraceError: the traces cannot be replayed.
    """
    chosen, drafter = load_policy(policy), drafter or drafter_of(traces.header)
    exported_drafter(chosen, drafter)  # refused before any work is done
    folder = claimed(out, traces, profile, chosen, held_out, overwrite=overwrite)
    export = Export(traces, profile, chosen, held_out=held_out, seed=seed, progress=progress)
    made = export.policy
    assert made is not None
    rounds = export.played(made)
    export.policy = None  # it is itself what is exported
    alone = export.alone(rounds)
    gains = alone_table(alone) + "\n\n"
    if export.settled:
        gains += f"The policy was trained under another profile; this folder has it as replayed: {export.settled}.\n\n"
    figures = plain_values({"alone": alone, "settled": export.settled, "facts": export.facts()})
    settled = made if isinstance(made, LearnedPolicy) else None
    return deploy_hf(
        policy, folder, drafter=drafter, settled=settled, figures=figures, gains=gains, overwrite=overwrite
    )


def claimed(
    out: str | Path,
    traces: Trace,
    profile: Profile,
    policy: StopPolicy | None,
    held_out: Trace | None,
    *,
    overwrite: bool,
) -> Path:
    """Return `out` as a folder that may be written, asked before any work is done; see `prepare_output_dir`."""
    read = [trace.folder for trace in (traces, held_out) if trace is not None]
    sources = [profile.source, policy.source if policy is not None else None]
    return prepare_output_dir(out, overwrite=overwrite, inputs=[*read, *sources])
