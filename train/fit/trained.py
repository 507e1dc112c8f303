"""What training leaves, and the folder that it is to go to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...collect.store.folder import Trace
from ...policies.files.outputs import claim_folder
from ...policies.latency.profile import Profile
from ...policies.learned.policy import LearnedPolicy
from ..heads.fitting import FitOptions


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


def claimed(
    out: str | Path, traces: Iterable[Trace | None], profile: Profile, fit: FitOptions | None, *, overwrite: bool
) -> Path:
    """Return the policy folder to write, asked for before any work is done; see `claim_folder`."""
    read = [trace.folder for trace in traces if trace is not None]
    work = fit.checkpoints if fit is not None else None
    return claim_folder(out, overwrite=overwrite, inputs=[*read, profile.source, work])
