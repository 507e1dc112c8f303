"""Calibration of heads: fitted on prompts that a head was not fitted on, exported as a temperature or a table, and scored.

`fit_calibrator` maps logits of one output to probabilities. `fit_survival` maps the product of calibrated factors to the
survival of a prefix, because the product of calibrated factors is not calibrated (sequential temperature scaling, DSpark).
Both choose the simplest map that no freer one beats on prompts left out: identity, temperature, isotonic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_auc_score

from ...policies.contract import Array
from ...policies.learned import Calibrator, SurvivalMaps

GAINS = {"temperature": 1e-4, "isotonic": 0.005}
"""Relative gain in loss that each map must bring. An isotonic one costs more to evaluate than a temperature."""

MIN_ROWS = 20
"""Minimum number of rows to fit a map on."""

KNOTS = 33
"""Knots of a survival table."""

MAX_STARTS = 3
"""Maximum depth of the first factor of a product that has survival tables. Products that begin deeper are not mapped."""

BINS, DRAWS = 10, 200
"""Of the calibration error: bins, and simulations of a perfect predictor."""

_LOG_RANGE = (math.log(0.1), math.log(10.0))  # of temperatures
_MAX_KNOTS = 64
_MAX_QUANTILE_ROWS = 100_000
_EDGE = 1e-3  # an isotonic map never returns 0 or 1: a factor of 0 would end every product, and a loss must be finite
_PRODUCT_EDGE = 1e-4


@dataclass(frozen=True)
class Outputs:
    """Outputs of heads on R rounds that they were not fitted on.

    Attributes:
        logits: [R, K + 1, 2] float64, `accept` and `next` at depths 0..K, also after a rejection.
        labels, has_label: [R, K + 1, 2], see `rows.round_labels`.
        length: [R] accepted length.
        group: [R], the number of the prompt, for choosing calibrators on prompts left out.
        drawn: [R, K] whether x_1..x_K were drawn: a drafter may know no token.
        lag: `Head.lag`; `accept` scores nothing at the first `lag` depths.
    """

    logits: Array
    labels: Array
    has_label: Array
    length: Array
    group: Array
    drawn: Array
    lag: int = 0

    def labelled(self, output: int) -> tuple[Array, Array, Array]:
        """Return (logits, labels, groups) [M] of the rows of an output, 0 = `accept` or 1 = `next`, that have a label."""
        use = self.has_label[..., output]
        group = np.broadcast_to(self.group[:, None], use.shape)
        return self.logits[use, output], self.labels[use, output], group[use]

    def accept(self, calibrator: Calibrator) -> Array:
        """Return [R, K], the probabilities of `accept` at depths 1..K; 1 where a head with lag scores nothing, as live."""
        accept = calibrator(self.logits[:, 1:, 0])
        accept[:, : self.lag] = 1.0
        return accept


class Calibrated(NamedTuple):
    """Calibrators of both outputs, and survival tables; None if they change nothing."""

    accept: Calibrator
    next: Calibrator
    survival: SurvivalMaps | None


def calibrate(outputs: Outputs, unchanged: bool = False) -> Calibrated:
    """Fit both calibrators and the survival tables.

    Args:
        outputs: of heads on rounds of prompts that they were not fitted on.
        unchanged: keep probabilities and products as the head returns them.
    """
    if unchanged:
        return Calibrated(Calibrator(), Calibrator(), None)
    accept, next_ = (fit_calibrator(*outputs.labelled(output)) for output in (0, 1))
    return Calibrated(accept, next_, fit_survival(outputs.accept(accept), outputs))


def fit_calibrator(logits: Array, labels: Array, groups: Array | None = None) -> Calibrator:
    """Choose and fit a calibrator.

    Each kind is fitted on one half and scored by log loss on the other, then vice versa. The best kind is fitted to all rows.

    Args:
        logits: [M] of held-out rows.
        labels: [M] in [0, 1].
        groups: [M]; rows of a group are in the same half. With one group, or without, rows alternate.
    """
    if _is_uninformative(labels):
        return Calibrator()
    # Rows of a text are alike: in both halves they would favour the freer map.
    part = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    half = (part if part.max() else np.arange(len(labels))) % 2 == 0
    losses = {"identity": log_loss(Calibrator()(logits), labels)}
    for kind, gain in GAINS.items():
        losses[kind] = (1.0 + gain) * sum(
            log_loss(fit_kind(kind, logits[fit], labels[fit])(logits[~fit]), labels[~fit]) * float((~fit).mean())
            for fit in (half, ~half)
        )
    return fit_kind(min(losses, key=losses.__getitem__), logits, labels)


def fit_kind(kind: str, logits: Array, labels: Array) -> Calibrator:
    """Return a calibrator of this kind; the identity if there is nothing to fit."""
    if kind == "identity" or _is_uninformative(labels):
        return Calibrator()
    if kind == "temperature":
        # The loss is convex in the inverse temperature; the bounds keep it finite.
        best = minimize_scalar(
            lambda at: log_loss(expit(logits / np.exp(at)), labels), bounds=_LOG_RANGE, method="bounded"
        )
        return Calibrator(kind, float(np.exp(best.x)))
    x = logits.astype(np.float64)
    fit = IsotonicRegression(y_min=_EDGE, y_max=1 - _EDGE, out_of_bounds="clip").fit(x, labels.astype(np.float64))
    knots = np.unique(_quantiles(x, _MAX_KNOTS))
    if len(knots) < 2:
        knots = np.append(knots, knots + 1.0)  # all logits are equal: a map has at least two knots
    # Rounding may lower a value between the steps of the fit, and a calibrator refuses falling knots.
    return Calibrator(kind, knots=np.stack([knots, np.maximum.accumulate(fit.predict(knots))]).astype(np.float32))


def _is_uninformative(labels: Array) -> bool:
    return len(labels) < MIN_ROWS or is_constant(labels)


def _quantiles(x: Array, count: int) -> Array:
    quantiles: Array = np.quantile(x[:: max(1, len(x) // _MAX_QUANTILE_ROWS)], np.linspace(0.0, 1.0, count))
    return quantiles


# Survival


def fit_survival(accept: Array, outputs: Outputs) -> SurvivalMaps | None:
    """Return survival tables by first factor and depth; None if all of them are the identity.

    A live policy does not know that a branch has failed, so S_j has to be right for rounds with a rejection before depth j
    as well: all K depths of a round count, where a token was drawn.

    Args:
        accept: [R, K] calibrated `accept` at depths 1..K.
        outputs: the rounds; their lengths, prompts and drawn tokens are used.
    """
    depth = accept.shape[1]
    line = np.linspace(0.0, 1.0, KNOTS, dtype=np.float32)
    tables = np.broadcast_to(line, (min(MAX_STARTS, depth), depth, 2, KNOTS)).copy()
    for start in range(1, len(tables) + 1):
        # A product that begins at `start` is conditional on the tokens before it.
        alive = outputs.length >= start - 1
        product = np.ones(int(alive.sum()))
        for j in range(start, depth + 1):
            product = product * accept[alive, j - 1]
            use = outputs.drawn[alive, j - 1]
            odds = _odds(product[use])
            calibrator = fit_calibrator(odds, outputs.length[alive][use] >= j, outputs.group[alive][use])
            if calibrator.kind != "identity":
                tables[start - 1, j - 1] = _table(calibrator, odds)
                product = _apply(tables[start - 1, j - 1], product)  # deeper maps are fitted on the result
    return None if np.array_equal(tables[:, :, 0], tables[:, :, 1]) else SurvivalMaps(tables)


def _odds(product: Array) -> Array:
    odds: Array = logit(np.clip(product, _PRODUCT_EDGE, 1.0 - _PRODUCT_EDGE))
    return odds


def _table(calibrator: Calibrator, odds: Array) -> Array:
    """Return a calibrator of log-odds as knots [2, KNOTS] of probabilities: the ends, quantiles, and a grid in the log-odds.

    The grid covers products that are rare among these rows.
    """
    inner = KNOTS - 2
    grid = np.linspace(-6.0, 6.0, inner - inner // 2)
    x = np.sort(np.concatenate([[0.0, 1.0], expit(_quantiles(odds, inner // 2)), expit(grid)]))
    return np.stack([x, np.maximum.accumulate(calibrator(_odds(x)))]).astype(np.float32)


def _apply(table: Array, product: Array) -> Array:
    # As `SurvivalMaps` computes it; interpolation in float32 would differ a little.
    return np.clip(Calibrator("isotonic", knots=table)(product), 0.0, 1.0)


# Labels and scores


def is_constant(y: Array) -> bool:
    """Return whether labels [M], bool or chances, are all accepted or all rejected."""
    return len(y) == 0 or bool((y >= 1).all()) or bool((y <= 0).all())


def as_classes(x: Any, y: Array) -> tuple[Any, Array, Array | None]:
    """Return rows, classes and weights for a classifier of rows [M, ...], an array or a sparse matrix, with labels [M].

    A label that is a chance becomes two rows, one of each class, with the chances as weights: their weighted log loss
    y (-ln p) + (1 - y)(-ln(1 - p)) is the cross-entropy.
    """
    classes = y >= 1
    if np.array_equal(classes, y):
        return x, classes, None
    double = sparse.vstack([x, x], format="csr") if sparse.issparse(x) else np.concatenate([x, x])
    return double, np.repeat([True, False], len(y)), np.concatenate([y, 1.0 - y]).astype(np.float64)


def log_loss(probability: Array, labels: Array) -> float:
    """Return the mean negative log-likelihood in nats of labels in [0, 1] (scikit-learn's takes no chances)."""
    p = np.clip(np.asarray(probability, dtype=np.float64), 1e-6, 1.0 - 1e-6)
    y = np.asarray(labels, dtype=np.float64)
    return float(-(y * np.log(p) + (1.0 - y) * np.log1p(-p)).mean())


def auc(score: Array, labels: Array) -> float | None:
    """Return the area under the ROC curve of labels in [0, 1]; None if all labels are 0 or all are 1."""
    if is_constant(labels):
        return None
    score, classes, weights = as_classes(score, labels)
    return float(roc_auc_score(classes, score, sample_weight=weights))


def calibration_error(predicted: Array, labels: Array, bins: int = BINS) -> float:
    """Return the expected calibration error: the mean over rows of |mean predicted - share of true| of their bin.

    Args:
        predicted: [M] probabilities.
        labels: [M] bool.
        bins: of equal numbers of rows, by rank of the prediction.
    """
    p, y = np.asarray(predicted, dtype=np.float64), np.asarray(labels)
    order = np.argsort(p, kind="stable")
    return _gap(p[order], y[order], bins) if len(y) else 0.0


def perfect_error(predicted: Array, seed: int = 0, bins: int = BINS, draws: int = DRAWS) -> tuple[float, float]:
    """Return (mean, 95th percentile) of the error of a perfectly calibrated predictor with these predictions, by simulation.

    The expected calibration error of a sample is never zero, so it is reported beside this one.
    """
    if not len(predicted):
        return 0.0, 0.0
    generator = np.random.default_rng(seed)
    ordered = np.sort(np.asarray(predicted, dtype=np.float64))
    errors = [_gap(ordered, generator.random(len(ordered)) < ordered, bins) for _ in range(draws)]
    return float(np.mean(errors)), float(np.quantile(errors, 0.95))


def _gap(ordered: Array, labels: Array, bins: int) -> float:
    """Return the error of ascending predictions."""
    # |mean predicted - share of true| times the rows of a bin is the absolute sum of its differences.
    rows, count = len(ordered), min(bins, len(ordered))
    sums = np.add.reduceat(labels - ordered, np.arange(count) * rows // count)
    return float(np.abs(sums).sum()) / rows
