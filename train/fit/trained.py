"""What training leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...policies.learned import LearnedPolicy


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
