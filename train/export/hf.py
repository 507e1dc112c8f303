"""A policy as a repository for `generate(custom_generate=...)` of transformers (`decode.hf.exported` runs it)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...decode.drafters.folder import TrainedDrafter, load_drafter, save_drafter
from ...decode.drafters.spec import (
    BUILTINS as DRAFTERS,
    NETWORKS,
    change_paths,
    check_drafter,
    needs_draft,
    parse_spec,
)
from ...decode.hf.exported import DRAFTER, FIGURES, POLICY
from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, SpecstopWarning
from ...policies.files import staged_folder, write_atomic, write_json
from ...policies.learned import LearnedPolicy, sampling_text
from ...policies.registry import BUILTINS, PolicySpec
from ...policies.storage import save_policy

GENERATE = '''"""Decodes with the stop policy of this repository. The code is in the package specstop."""

from specstop.decode.hf.exported import generate_exported


def generate(model, **arguments):
    """Return the output of `model.generate`, drafted with the policy and the drafter of this repository."""
    return generate_exported(model, arguments)
'''


def page_of(template: str, **values: Any) -> str:
    """Return the page of an export."""
    pages = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined)
    return pages.get_template(template).render(values) + "\n"


def check_exportable(source: PolicySpec, policy: StopPolicy, spec: str | None) -> tuple[str, TrainedDrafter | None]:
    """Return the spec of the drafter that a policy is exported with, and the trained drafter in it.

    Args:
        source: how the policy was named.
        policy: the policy; a learned one knows the drafter that it was trained with.
        spec: as of `find_drafters`; None = the drafter of the training, by default the draft model.

    Raises:
        InputError: there is no such drafter, or it reads a text file, which is not exported.
        PolicyError: the policy is a plugin.
    """
    learned = policy if isinstance(policy, LearnedPolicy) else None
    if learned is None and str(source).partition("?")[0].partition(":")[0] not in BUILTINS:
        raise PolicyError(
            f"--policy: {source} is a plugin, and its code is not exported; install it where the model is served"
        )
    spec = spec or str((learned and learned.metadata.provenance.get("drafter")) or "model")
    check_drafter(spec)
    *before, last = parse_spec(spec)
    if files := [part.path for part in (*before, last) if part.path and part.name not in NETWORKS]:
        raise InputError(
            f"--drafter: {spec} reads the file {files[0]}, which is not exported; use suffix without a file"
        )
    trained = load_drafter(last.path, kind=NETWORKS[last.name]) if last.name in NETWORKS else None
    draft = learned.metadata.pair.get("draft", "") if learned else ""
    if learned and trained is not None and draft and not draft.endswith(trained.identity):
        text = f"{learned.name} was trained with another drafter ({draft}) than {spec} ({trained.identity})"
        warnings.warn(text, SpecstopWarning, stacklevel=3)
    return spec, trained


def write_hf(
    source: PolicySpec,
    policy: StopPolicy,
    folder: Path,
    spec: str,
    trained: TrainedDrafter | None = None,
    figures: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a repository for `target.generate(custom_generate=folder, trust_remote_code=True, draft_model=...)`.

    Args:
        source: how the policy was named.
        policy: what is exported.
        folder: an empty folder: receives `custom_generate/`, `policy/` with the policy folder, `drafter/` with that of a
            trained drafter, `README.md` and `figures.json`.
        spec, trained: the drafter, as of `check_exportable`.
        figures: expected speed; None = the metrics of the policy.

    Returns:
        The contents of `figures.json`.
    """
    spec = change_paths(spec, lambda _: DRAFTER)
    learned = policy if isinstance(policy, LearnedPolicy) else None
    metrics = dict(learned.metadata.metrics) if learned else {}
    contents = {
        "schema": 1,
        "kind": "export",
        "engine": "hf",
        "policy": policy.name,
        "spec": None if learned is not None else str(source),
        "drafter": spec,
        "exact": True,
        "specstop": version("specstop"),
        **(figures or ({"metrics": metrics} if learned else {})),
    }
    page = page_of(
        "hf.md.j2",
        name=policy.name,
        drafter=spec,
        needs_draft=needs_draft(spec),
        plugins=[part.name for part in parse_spec(spec) if part.name not in DRAFTERS],
        verification=learned.metadata.verification if learned else "",
        sampling=sampling_text(learned.metadata.temperature, learned.metadata.sampling) if learned else "",
        alone=(figures or {}).get("alone"),
        adaptation=(figures or {}).get("adaptation"),
        held_out=metrics.get("held_out_ratio_to_best_fixed"),
    )
    with staged_folder(folder) as stage:
        if learned is not None:
            save_policy(learned, stage / POLICY)
        if trained is not None:
            save_drafter(trained, stage / DRAFTER)
        write_atomic(stage / "custom_generate" / "generate.py", GENERATE)
        write_atomic(stage / "custom_generate" / "requirements.txt", f"specstop>={version('specstop')}\n")
        write_json(stage / FIGURES, contents)
        write_atomic(stage / "README.md", page)
    return contents
