"""`deploy`: a policy, or what an engine can take of it, as files of that runtime with a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...collect.schema import drafter_of
from ...collect.store import Trace
from ...policies.display import Progress, silent
from ...policies.errors import InputError, PolicyError, close_match
from ...policies.files import prepare_output_dir, staged_folder, write_atomic, write_json
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile, load_profile
from ...policies.registry import PolicySpec, as_policy
from ..replay.checks import load_traces
from ..replay.run import replay
from .basis import Basis
from .hf import check_exportable, page_of, write_hf

ENGINES = ("vllm", "sglang", "trtllm", "llama.cpp")
TARGETS = ("onnx", "hf", *ENGINES)


def deploy(
    to: str,
    out: str | Path,
    policy: PolicySpec | None = None,
    *,
    traces: Trace | str | Path | None = None,
    profile: Profile | str | Path | None = None,
    held_out: Trace | str | Path | None = None,
    drafter: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write a policy, or what a runtime can take of it, with the expected speed.

    Args:
        to: one of `TARGETS`.
        out: folder of the export, with `README.md` and `figures.json`; for `onnx` a file.
        policy: a policy, spec or folder: exported, or for engines without policies compared with their tables.
        traces: dense training traces of chains. Required for engines; with `profile` they add the expected speed to `hf`.
        profile: costs of rounds; tables have lengths for the batch sizes that it measured.
        held_out: traces of other prompts to report on; None = a quarter of the prompts of `traces`.
        drafter: of `hf`, as of `find_drafters`; None = that of the traces, or that the policy was trained with.
        seed: of the split, the bootstrap and the order of requests.
        overwrite: replace `out`.
        progress: see `Progress`.

    Returns:
        The figures.

    Raises:
        InputError: an argument is missing or does not apply, or `out` is not empty.
        TraceError: the traces are not dense ones of chains, or lack what the engine's rule reads.
        PolicyError: the policy has no form for the runtime.
    """
    _check_arguments(to, policy, traces, profile, held_out, drafter)
    chosen = None if policy is None else as_policy(policy)
    source = policy if isinstance(policy, (str, Path)) else "" if chosen is None else chosen.shown_name
    if to == "onnx":
        if not isinstance(chosen, LearnedPolicy):
            raise PolicyError(f"--policy: expected a learned policy, got {policy}, which has no head to deploy")
        from .onnx_model import export_onnx

        return export_onnx(chosen, out, overwrite=overwrite)
    trace, held = (None if one is None else load_traces(one) for one in (traces, held_out))
    costs = None if profile is None else load_profile(profile)
    inputs = [one.folder for one in (trace, held) if one is not None]
    sources = [None if costs is None else costs.source, None if chosen is None else chosen.source]
    folder = prepare_output_dir(out, overwrite=overwrite, inputs=[*inputs, *sources])
    if to == "hf":
        assert chosen is not None
        spec = drafter or (None if trace is None else drafter_of(trace.header))
        exported_drafter = check_exportable(source, chosen, spec)  # before the replay
        if trace is None or costs is None:
            return write_hf(source, chosen, folder, *exported_drafter)
    assert trace is not None and costs is not None
    basis = Basis(trace, costs, chosen, held_out=held, seed=seed, progress=progress)
    if to != "hf":
        return _write_engine(to, folder, basis)
    assert basis.policy is not None
    replayed, basis.policy = basis.policy, None  # it is itself the export
    alone = basis.single_request(replay(basis.held, replayed, basis.profile))
    figures = {"alone": alone, "adaptation": basis.adaptation, "facts": basis.facts}
    return write_hf(source, replayed, folder, *exported_drafter, figures)


def _write_engine(to: str, folder: Path, basis: Basis) -> dict[str, Any]:
    """Write the files of an engine, the figures and the page; return the figures."""
    from .engines import ENGINES as serialisers  # imports scikit-learn

    files, figures, page_facts = serialisers[to](basis, folder)
    content = {"schema": 1, "kind": "export", "engine": to, **figures, "facts": basis.facts}
    page = page_of(
        "engine.md.j2", engine=to, files=files, figures=figures, facts=basis.facts, adaptation=basis.adaptation,
        shares_prompts=basis.shares_prompts, **page_facts,
    )  # fmt: skip
    with staged_folder(folder) as stage:
        for name, text in files.items():
            write_atomic(stage / name, text)
        write_json(stage / "figures.json", content)
        write_atomic(stage / "README.md", page)
    return content


def _check_arguments(to: str, policy: Any, traces: Any, profile: Any, held_out: Any, drafter: str | None) -> None:
    """Raise `InputError` unless the arguments fit the runtime."""
    if to not in TARGETS:
        raise InputError(f"--to: expected one of {', '.join(TARGETS)}, not {to!r}{close_match(to, TARGETS)}")
    if to in ("onnx", "hf") and policy is None:
        raise InputError(f"--policy: expected a policy folder of `specstop train`; {to} exports one")
    if to != "hf" and drafter is not None:
        raise InputError(
            f"--drafter: only hf has a drafter, not {to}; an engine's files are for the drafter of the traces"
        )
    engine_options = {"--traces": traces, "--profile": profile, "--held-out": held_out}
    if to == "onnx" and (unused := next((name for name, value in engine_options.items() if value is not None), None)):
        raise InputError(f"{unused}: onnx exports the head alone; leave it out")
    missing = [name for name, value in (("--traces", traces), ("--profile", profile)) if value is None]
    if missing and (to in ENGINES or (to == "hf" and (len(missing) == 1 or held_out is not None))):
        raise InputError(
            f"{' and '.join(missing)}: expected as well; what {to} is to do is chosen by replaying traces under a profile "
            "(specstop collect, specstop profile)"
        )
