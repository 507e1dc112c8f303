"""Calibration of a head's logits: identity, temperature or isotonic, whichever has the least held-out loss."""

from __future__ import annotations

import torch
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from ...policies.calibration import Calibrator

ISOTONIC_GAIN = 0.005
"""Relative gain in loss that an isotonic map must bring: it costs more to evaluate than a temperature."""

LEAST = 20
"""Rows below which nothing is fitted."""

_MOST_KNOTS = 64
_EDGE = 1e-3


def fit_calibrator(logits: Tensor, labels: Tensor, sequence: Tensor | None = None) -> Calibrator:
    """Choose and fit a calibrator.

    Each kind is fitted on one half and scored by log loss on the other, both ways; the best is fitted again on all.

    Args:
        logits: [M] of held-out rows.
        labels: [M] bool.
        sequence: [M], rows of one text fall in one half; without it halves alternate.
    """
    if len(labels) < LEAST or bool(labels.all()) or not bool(labels.any()):
        return Calibrator()
    half = (torch.arange(len(labels)) if sequence is None else sequence) % 2 == 0
    losses = {"identity": log_loss(Calibrator()(logits), labels)}
    for kind in ("temperature", "isotonic"):
        losses[kind] = sum(
            log_loss(fit_kind(kind, logits[fit], labels[fit])(logits[~fit]), labels[~fit])
            * float((~fit).float().mean())
            for fit in (half, ~half)
        )
    losses["isotonic"] *= 1.0 + ISOTONIC_GAIN
    return fit_kind(min(losses, key=losses.__getitem__), logits, labels)


def fit_kind(kind: str, logits: Tensor, labels: Tensor) -> Calibrator:
    """Return a calibrator of this kind; the identity where there is nothing to fit."""
    if kind == "identity" or len(labels) < LEAST or bool(labels.all()) or not bool(labels.any()):
        return Calibrator()
    if kind == "temperature":
        grid = torch.logspace(-1.0, 1.0, 81)
        losses = [log_loss(torch.sigmoid(logits / t), labels) for t in grid]
        return Calibrator(kind, float(grid[int(torch.tensor(losses).argmin())]))
    return Calibrator(kind, knots=_isotonic(logits, labels))


def _isotonic(logits: Tensor, labels: Tensor) -> Tensor:
    """Return at most 64 knots [2, n] of the isotonic fit, at quantiles of the logits."""
    fit = IsotonicRegression(y_min=_EDGE, y_max=1 - _EDGE, out_of_bounds="clip").fit(
        logits.double().numpy(), labels.double().numpy()
    )
    x = torch.quantile(
        logits.double()[:: max(1, len(logits) // 100_000)], torch.linspace(0, 1, _MOST_KNOTS).double()
    ).unique()
    if len(x) < 2:
        x = torch.stack([x[0], x[0] + 1])
    return torch.stack([x, torch.from_numpy(fit.predict(x.numpy())).cummax(0).values]).float()


def log_loss(probability: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-likelihood in nats."""
    p = probability.double().clamp(1e-6, 1 - 1e-6)
    return float(-torch.where(labels, p.log(), (1 - p).log()).mean())


def auc(score: Tensor, labels: Tensor) -> float | None:
    """Return the area under the ROC curve: the chance that an accepted row scores higher than a rejected one.

    None where all labels are the same.
    """
    from sklearn.metrics import roc_auc_score

    if bool(labels.all()) or not bool(labels.any()):
        return None
    return float(roc_auc_score(labels.numpy(), score.numpy()))
