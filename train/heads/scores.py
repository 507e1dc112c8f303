"""How well survival is calibrated: ECE, Brier score, AUC and loss, by depth and by temperature.

The expected calibration error of a sample is never zero: with n rows in 10 bins even the truth shows some. So it stands
beside what a predictor that is right shows at that size, by simulation from the predictions themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...policies.learned import LearnedPolicy
from ..traces.data import TraceArrays, seen_features
from .calibrate import auc, log_loss
from .rows import Visits

BINS = 10
DRAWS = 200
DEEPEST = 8
"""Depths that the report shows."""


@dataclass(frozen=True)
class Scored:
    """Survival of R rounds beside what came of them: `survival` [R, K], `length` [R] accepted, `temperature` [R]."""

    survival: Tensor
    length: Tensor
    temperature: Tensor


def calibration_error(predicted: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Return the expected calibration error over bins of equal mass: the mean over rows of |mean predicted - share of true|.

    Args:
        predicted: [M] probabilities.
        labels: [M] bool.
        bins: of equal mass, by rank of the prediction.
    """
    order = predicted.argsort(stable=True)
    return float(_gap(predicted.double()[order], labels[order], bins)) if len(labels) else 0.0


def perfect_error(predicted: Tensor, seed: int = 0, bins: int = BINS, draws: int = DRAWS) -> tuple[float, float]:
    """Return (mean, 95th percentile) of the error that a perfectly calibrated predictor with these predictions shows."""
    if not len(predicted):
        return 0.0, 0.0
    generator = torch.Generator().manual_seed(seed)
    ordered = predicted.double().sort().values
    errors = []
    for _ in range(draws):
        labels = torch.rand(len(ordered), generator=generator, dtype=torch.float64) < ordered
        errors.append(_gap(ordered, labels, bins))
    found = torch.stack(errors)
    return float(found.mean()), float(torch.quantile(found, 0.95))


def _gap(ordered: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Return the error of predictions in rising order."""
    parts = torch.tensor_split(labels.double() - ordered, min(bins, len(ordered)))
    return torch.stack([part.sum().abs() for part in parts]).sum() / len(ordered)


def survival_scores(scored: Scored, deepest: int = DEEPEST, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each depth and temperature, and for each depth over all temperatures where there are several.

    Each has `temperature` (None = all), `depth`, `rounds`, mean `predicted` and `observed` survival, `ece` and
    `ece_perfect` (mean of the simulation), `brier`, `auc` and `log_loss`.
    """
    heats = scored.temperature.unique().tolist()
    rows = []
    for heat in [*([None] if len(heats) > 1 else []), *heats]:
        use = torch.ones_like(scored.length, dtype=torch.bool) if heat is None else scored.temperature == heat
        for depth in range(1, min(deepest, scored.survival.shape[1]) + 1):
            rows.append(_row(scored.survival[use, depth - 1], scored.length[use] >= depth, heat, depth, seed))
    return rows


def _row(predicted: Tensor, labels: Tensor, heat: float | None, depth: int, seed: int) -> dict[str, Any]:
    return {
        "temperature": None if heat is None else round(heat, 6),
        "depth": depth,
        "rounds": len(labels),
        "predicted": float(predicted.mean()),
        "observed": float(labels.double().mean()),
        "ece": calibration_error(predicted, labels),
        "ece_perfect": perfect_error(predicted, seed)[0],
        "brier": float((predicted.double() - labels.double()).square().mean()),
        "auc": auc(predicted, labels),
        "log_loss": log_loss(predicted, labels),
    }


def policy_survival(policy: LearnedPolicy, arrays: TraceArrays, visited: Visits) -> Scored:
    """Return what the policy would say of survival in these rounds, drafted to full depth, beside what came of them.

    Args:
        policy: any learned policy of scalar features; its product is taken from depth 1 on, whenever it is asked first.
        arrays: a trace of chains, held out where the answer shall mean something.
        visited: rounds, such as `visits(arrays, [replay(arrays, policy, profile)])`.
    """
    seen = seen_features(arrays, policy.features, visited.row, visited.history)
    maps: Sequence[Any] = [None] * (arrays.depth + 1) if policy.survival is None else policy.survival.by_depth(1)
    product = torch.ones(len(seen))
    columns = []
    for depth in range(1, min(arrays.depth, policy.max_depth) + 1):
        product = product * policy.probabilities(seen[:, depth], depth)[0]
        product = product if maps[depth] is None else maps[depth](product)
        columns.append(product)
    heat = arrays.column("temperature")[visited.row]
    return Scored(torch.stack(columns, 1), arrays.accepted[visited.row], heat)
