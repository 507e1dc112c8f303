"""What training leaves, and the folder that it is to go to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...collect.schema import Header
from ...collect.store.folder import Trace
from ...policies.files import prepare_output_dir
from ...policies.learned import LearnedPolicy, TrainingMetadata
from ...policies.profile import Profile


@dataclass(frozen=True)
class Trained:
    """A trained policy and how its head does on held-out prompts.

    Attributes:
        policy: ready to use.
        path: its folder, or None.
        metrics: rows, log loss and AUC of both outputs, calibration kinds, replayed rate and best fixed rate, and
            `reliability`, a row for each depth and temperature (`scores.survival_scores`).
    """

    policy: LearnedPolicy
    path: Path | None
    metrics: dict[str, Any]


def facts_of(
    header: Header, sampled_at: Sequence[float], sources: Sequence[str], seed: int, **more: Any
) -> TrainingMetadata:
    """Return what a policy that was trained on these traces remembers of them; `more` joins its provenance."""
    if (drafter := header.facts.get("drafter")) is not None:
        more["drafter"] = drafter  # what the policy is exported with (`train.export.hf`)
    return TrainingMetadata(
        temperature=sampled_at[0] if len(sampled_at) == 1 else tuple(sampled_at),
        verification=header.verification,
        label=header.label,
        shaping=dict(header.shaping),
        pair=dict(header.pair),
        provenance={"traces": ", ".join(sources), **more, "seed": seed, "specstop": version("specstop")},
    )


def claimed(
    out: str | Path, traces: Iterable[Trace | None], profile: Profile, work: Path | None = None, *, overwrite: bool
) -> Path:
    """Return the policy folder to write, asked for before any work is done; see `prepare_output_dir`."""
    read = [trace.folder for trace in traces if trace is not None]
    return prepare_output_dir(out, overwrite=overwrite, inputs=[*read, profile.source, work])
