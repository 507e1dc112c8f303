"""How well survival is calibrated: ECE, Brier score, AUC and loss, by depth and by temperature.

The expected calibration error of a sample is never zero: with n rows in 10 bins even the truth shows some. So it stands
beside what a predictor that is right shows at that size, by simulation from the predictions themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....policies.contract import Array
from .logits import auc, log_loss

BINS = 10
DRAWS = 200
DEEPEST = 8
"""Depths that the report shows."""


@dataclass(frozen=True)
class Scored:
    """Survival of R rounds beside what came of them.

    Attributes:
        survival: [R, K].
        length: [R] accepted.
        temperature: [R].
        there: [R, K] whether there was a token whose survival it is.
    """

    survival: Array
    length: Array
    temperature: Array
    there: Array


def calibration_error(predicted: Array, labels: Array, bins: int = BINS) -> float:
    """Return the expected calibration error over bins of equal mass: the mean over rows of |mean predicted - share of true|.

    Args:
        predicted: [M] probabilities.
        labels: [M] bool.
        bins: of equal mass, by rank of the prediction.
    """
    chance, truth = np.asarray(predicted, dtype=np.float64), np.asarray(labels)
    order = np.argsort(chance, kind="stable")
    return _gap(chance[order], truth[order], bins) if len(truth) else 0.0


def perfect_error(predicted: Array, seed: int = 0, bins: int = BINS, draws: int = DRAWS) -> tuple[float, float]:
    """Return (mean, 95th percentile) of the error that a perfectly calibrated predictor with these predictions shows."""
    if not len(predicted):
        return 0.0, 0.0
    generator = np.random.default_rng(seed)
    ordered = np.sort(np.asarray(predicted, dtype=np.float64))
    # Labels that come true with just the chances predicted; bins are the same, as they go by prediction.
    errors = [_gap(ordered, generator.random(len(ordered)) < ordered, bins) for _ in range(draws)]
    return float(np.mean(errors)), float(np.quantile(errors, 0.95))


def _gap(ordered: Array, labels: Array, bins: int) -> float:
    """Return the error of predictions in rising order."""
    # |mean predicted - share of true| times the rows of a bin is the absolute sum of its differences.
    rows, count = len(ordered), min(bins, len(ordered))
    sums = np.add.reduceat(labels - ordered, np.arange(count) * rows // count)
    return float(np.abs(sums).sum()) / rows


def survival_scores(scored: Scored, deepest: int = DEEPEST, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each depth and temperature, and for each depth over all temperatures where there are several.

    Each has `temperature` (None = all), `depth`, `rounds`, mean `predicted` and `observed` survival, `ece` and
    `ece_perfect` (mean of the simulation), `brier`, `auc` and `log_loss`.
    """
    temperatures = np.unique(scored.temperature).tolist()
    rows = []
    for one in [*([None] if len(temperatures) > 1 else []), *temperatures]:
        alike = np.full(len(scored.length), True) if one is None else scored.temperature == one
        for depth in range(1, min(deepest, scored.survival.shape[1]) + 1):
            use = alike & scored.there[:, depth - 1]
            if use.any():
                rows.append(_row(scored.survival[use, depth - 1], scored.length[use] >= depth, one, depth, seed))
    return rows


def _row(predicted: Array, labels: Array, temperature: float | None, depth: int, seed: int) -> dict[str, Any]:
    return {
        "temperature": None if temperature is None else round(temperature, 6),
        "depth": depth,
        "rounds": len(labels),
        "predicted": float(predicted.mean()),
        "observed": float(labels.mean()),
        "ece": calibration_error(predicted, labels),
        "ece_perfect": perfect_error(predicted, seed)[0],
        "brier": float(np.square(predicted - labels).mean()),
        "auc": auc(predicted, labels),
        "log_loss": log_loss(predicted, labels),
    }
