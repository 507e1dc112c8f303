"""Calibration of a head's logits: identity, temperature or isotonic, whichever has the least held-out loss."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit
from sklearn.isotonic import IsotonicRegression

from ....policies.contract import Array
from ....policies.learned import Calibrator
from ..soft_classes import constant

ISOTONIC_GAIN = 0.005
"""Relative gain in loss that an isotonic map must bring: it costs more to evaluate than a temperature."""

LEAST = 20
"""Rows below which nothing is fitted."""

_LOG_RANGE = (math.log(0.1), math.log(10.0))  # of temperatures
_MOST_KNOTS = 64
_MOST_ROWS = 100_000  # that quantiles are taken of
_EDGE = 1e-3


def fit_calibrator(logits: Array, labels: Array, sequence: Array | None = None) -> Calibrator:
    """Choose and fit a calibrator.

    Each kind is fitted on one half and scored by log loss on the other, then with the halves exchanged; the best is fitted
    again on all.

    Args:
        logits: [M] of held-out rows.
        labels: [M] bool, or chances.
        sequence: [M], rows of one text fall in one half; without it, or of one text alone, halves alternate.
    """
    if _says_nothing(labels):
        return Calibrator()
    # Rows of one text resemble each other: spread over both halves they would flatter the freer map.
    parts = np.arange(len(labels)) if sequence is None else np.unique(sequence, return_inverse=True)[1]
    half = (parts if parts.max() else np.arange(len(labels))) % 2 == 0  # of one part alone rows alternate
    losses = {"identity": log_loss(Calibrator()(logits), labels)}
    for kind in ("temperature", "isotonic"):
        losses[kind] = sum(
            log_loss(fit_kind(kind, logits[fit], labels[fit])(logits[~fit]), labels[~fit]) * float((~fit).mean())
            for fit in (half, ~half)
        )
    losses["isotonic"] *= 1.0 + ISOTONIC_GAIN
    return fit_kind(min(losses, key=losses.__getitem__), logits, labels)


def fit_kind(kind: str, logits: Array, labels: Array) -> Calibrator:
    """Return a calibrator of this kind; the identity where there is nothing to fit."""
    if kind == "identity" or _says_nothing(labels):
        return Calibrator()
    if kind == "temperature":
        # The loss is convex in the temperature's inverse; between bounds it cannot run away.
        found = minimize_scalar(
            lambda at: log_loss(expit(logits / np.exp(at)), labels), bounds=_LOG_RANGE, method="bounded"
        )
        return Calibrator(kind, float(np.exp(found.x)))
    return Calibrator(kind, knots=_isotonic(logits, labels))


def _says_nothing(labels: Array) -> bool:
    return len(labels) < LEAST or constant(labels)


def _isotonic(logits: Array, labels: Array) -> Array:
    """Return at most 64 knots [2, n] float32 of the isotonic fit, at quantiles of the logits."""
    x = logits.astype(np.float64)
    # Never 0 or 1: a factor of 0 would end every product for good, and a loss may not be infinite.
    fit = IsotonicRegression(y_min=_EDGE, y_max=1 - _EDGE, out_of_bounds="clip").fit(x, labels.astype(np.float64))
    knots = np.unique(np.quantile(x[:: max(1, len(x) // _MOST_ROWS)], np.linspace(0.0, 1.0, _MOST_KNOTS)))
    if len(knots) < 2:
        knots = np.append(knots, knots + 1.0)  # all logits alike: a map has two knots at least
    # Between the fit's own steps rounding may lower a value, and a calibrator refuses knots that fall.
    return np.stack([knots, np.maximum.accumulate(fit.predict(knots))]).astype(np.float32)


def log_loss(probability: Array, labels: Array) -> float:
    """Return the mean negative log-likelihood in nats of labels, bits or chances."""
    p = np.clip(np.asarray(probability, dtype=np.float64), 1e-6, 1.0 - 1e-6)
    y = np.asarray(labels, dtype=np.float64)
    return float(-(y * np.log(p) + (1.0 - y) * np.log1p(-p)).mean())


def auc(score: Array, labels: Array) -> float | None:
    """Return the area under the ROC curve: the chance that an accepted row scores higher than a rejected one.

    None where all labels are the same.
    """
    from sklearn.metrics import roc_auc_score

    if bool(labels.all()) or not bool(labels.any()):
        return None
    return float(roc_auc_score(labels, score))
