"""The linear heads: logistic regressions by scikit-learn on scalars, their log-odds, tokens and combinations of tokens.

A linear head has three regressions: `accept`, `next` after a token, and `next` at depth 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from ...policies.contract import Array
from ...policies.display import Progress
from ...policies.errors import InputError
from ...policies.features import TOKEN_FEATURES, Kind, feature
from ...policies.heads.tables import DEPTH, HashedFeatures
from .base import HeadEstimator, basis_columns, fit_basis
from .calibration import as_classes, is_constant, log_loss
from .rows import FitRows

PENALTIES = (0.05, 0.15, 0.5)
"""Inverse penalties C that are tried; for each output the one with the least held-out loss is kept."""

COMBINATIONS = (
    ("above_token", "drawn_token"),
    ("anchor_token", "drawn_token", DEPTH),
    ("before_token", "anchor_token", "drawn_token"),
    ("drawn_token", "noisy_score"),
)
"""Combinations, each used if the head reads all of its members; further ones brought nothing on two small pairs."""

BUCKETS = 65_521
"""Size of the table of a cross: a prime below 2^16, half a megabyte for both outputs."""

RANGES = 8
"""Ranges of a crossed scalar, with equal numbers of rows."""

# Multipliers of the hash: the values of a cross times their multipliers, summed, modulo the buckets (`HashedFeatures`).
_STRIDES = {"drawn_token": 1, "above_token": 40_503, "anchor_token": 24_133, "before_token": 57_037, DEPTH: 7_919}
_RANGE_STRIDE = 5_003
_ROUNDS, _TOLERANCE = 100, 1e-4


def regression_rows(rows: FitRows) -> list[tuple[Array, Array]]:
    """Return (mask [M], labels of these rows in [0, 1]) of the three regressions."""
    drawn, (accept, following) = rows.drawn.numpy(), rows.has_label.numpy().T
    masks = ((accept, 0), (drawn & following, 1), (~drawn & following, 1))
    return [(use, rows.labels.numpy()[use, output]) for use, output in masks]


def constant_logit(y: Array) -> float:
    """Return the log-odds of labels [M] with one more of each kind (Laplace), so that they are finite."""
    return float(logit((float(y.sum()) + 1.0) / (len(y) + 2.0)))


@dataclass(eq=False, repr=False, kw_only=True)
class LogisticEstimator(HeadEstimator):
    """Logistic regressions on scalar features and the log-odds of probabilities.

    Args:
        C: inverse strength of the L2 penalty.
        features, random_state: see `HeadEstimator`.
    """

    form = "logistic"

    C: float = 1.0

    space: ClassVar[Mapping[str, Any]] = {"C": (1e-3, 1e2)}

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        basis = fit_basis(rows, self.feature_names_)
        columns = basis_columns(basis, rows.features, rows.depth)
        weight, bias = np.zeros((3, basis.width), dtype=np.float32), np.zeros(3, dtype=np.float32)
        for output, (use, y) in enumerate(regression_rows(rows)):
            if is_constant(y):
                bias[output] = constant_logit(y)
                continue
            x, classes, weights = as_classes(columns[use], y)
            model = LogisticRegression(C=self.C, max_iter=1000, random_state=self.seed).fit(x, classes, weights)
            weight[output], bias[output] = model.coef_[0], model.intercept_[0]
        return {"mean": basis.mean, "scale": basis.scale, "weight": weight, "bias": bias}


@dataclass(eq=False, repr=False, kw_only=True)
class TokensEstimator(HeadEstimator):
    """Logistic regressions with a weight for each token and for each cross of tokens.

    Args:
        C: inverse strength of the L2 penalty; None = that of `PENALTIES` with the least held-out loss.
        buckets: size of the table of each cross; 0 = no combinations.
        features, random_state: see `HeadEstimator`.
    """

    form = "tokens"
    # With many weights it matters on which rounds they are fitted; heads of few weights gain nothing by a second pass.
    passes = 2

    C: float | None = None
    buckets: int = BUCKETS

    space: ClassVar[Mapping[str, Any]] = {"C": (1e-2, 1.0), "buckets": [0, BUCKETS]}

    @classmethod
    def default_features(cls, defaults: Sequence[str]) -> tuple[str, ...]:
        """Return tokens and scores, and the default features that improve a head of tokens by more than they cost."""
        omitted = ("mean_full", "last_accepted", "top1", "depth")
        names = dict.fromkeys((*(name for name in defaults if name not in omitted), "noisy_score", *TOKEN_FEATURES))
        # In the order in which they become known, which spares the loop a reordering at each decision.
        known_first = (Kind.ANCHOR, Kind.HISTORY, Kind.PRE, Kind.POST)
        return tuple(sorted(names, key=lambda name: known_first.index(feature(name).kind)))

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        design = Design(self.feature_names_, rows, self.buckets)
        penalties = sorted(PENALTIES) if self.C is None else [self.C]
        x, held = design.matrix(rows), design.matrix(stop_rows)
        fits = [
            _regress(x[use], y, held[held_use], held_y, penalties)
            for (use, y), (held_use, held_y) in zip(regression_rows(rows), regression_rows(stop_rows), strict=True)
        ]
        (accept, accept_bias), (next_, next_bias), (opening, opening_bias) = fits
        scalars, depths, tables, hashed = zip(
            *(design.split(weight) for weight in (accept, next_, opening)), strict=True
        )
        # Tokens of the anchor have weights in the regression at depth 0 only: they fill the row of `next`.
        table = np.stack(tables[:2]).reshape(2, len(design.ids), design.vocabulary)
        for at, place in enumerate(design.ids):
            if _is_of_anchor(self.feature_names_[place]):
                table[:, at] = np.zeros(design.vocabulary), tables[2].reshape(len(design.ids), -1)[at]
        next_depths = np.append(depths[2][:1] + opening_bias, depths[1][1:] + next_bias)
        tensors = {
            "mean": design.basis.mean,
            "scale": design.basis.scale,
            "weight": np.stack(scalars),
            "bias": np.stack([depths[0] + accept_bias, next_depths]),
            "table": table,
            "edges": design.edges,
            "hashed": np.stack(hashed[:2]).reshape(2, len(design.strides), max(design.buckets, 1)),
        }
        return {name: values.astype(np.float32) for name, values in tensors.items()} | {"strides": design.strides}


class Design:
    """Rows as a sparse matrix: the basis of the scalars, a column for each depth, each token of a feature, each hashed cross.

    Args:
        names: features of the rows.
        rows: to fit on; they determine how scalars are standardised, and the vocabulary.
        buckets: size of the table of each cross; 0 = no combinations.
    """

    def __init__(self, names: Sequence[str], rows: FitRows, buckets: int) -> None:
        self.ids = [at for at, name in enumerate(names) if name in TOKEN_FEATURES]
        if not self.ids:
            raise InputError(f"--feature: the tokens head needs one of {', '.join(TOKEN_FEATURES)}")
        self.names = tuple(names)
        self.scalars = [at for at in range(len(names)) if at not in self.ids]
        scalar_rows = dataclasses.replace(rows, features=rows.features[:, self.scalars])
        self.basis = fit_basis(scalar_rows, [names[at] for at in self.scalars])
        self.depths = int(rows.depth.max()) + 1
        self.vocabulary = int(rows.features[:, self.ids].max()) + 1
        self.buckets = buckets
        combinations = [cross for cross in COMBINATIONS if set(cross) - {DEPTH} <= set(names)] if buckets else []
        self.strides = np.zeros((len(combinations), len(names) + 1), dtype=np.int64)
        for at, cross in enumerate(combinations):
            for name in cross:
                place = len(names) if name == DEPTH else self.names.index(name)
                self.strides[at, place] = _STRIDES.get(name, _RANGE_STRIDE)
        crossed = [at for at in self.scalars if self.strides[:, at].any()]
        drawn = rows.features[rows.drawn][:, crossed].double().numpy()
        shares = np.linspace(0.0, 1.0, RANGES + 1)[1:-1]
        edges = np.quantile(drawn, shares, axis=0).T if len(drawn) else np.zeros((len(crossed), 0))  # [J, RANGES - 1]
        self.edges = np.ascontiguousarray(edges, dtype=np.float32)
        self.hashes = HashedFeatures(names, self.strides, self.edges, buckets)

    def matrix(self, rows: FitRows) -> sparse.csr_matrix:
        """Return [M, F' + depths + I V + C B] float64."""
        features, depth, drawn = rows.features.numpy(), rows.depth.numpy(), rows.drawn.numpy()
        x = basis_columns(self.basis, rows.features[:, self.scalars], rows.depth)
        blocks = [sparse.csr_matrix(x.astype(np.float64)), _one_hot(depth, self.depths, np.ones_like(drawn))]
        for at in self.ids:
            # As `TokenHead` reads them: tokens of the anchor at depth 0 only, drawn ones from depth 1 on.
            is_used = ~drawn if _is_of_anchor(self.names[at]) else drawn
            blocks.append(_one_hot(features[:, at].astype(np.int64), self.vocabulary, is_used))
        if len(self.strides):
            places = self.hashes.places(features, depth)  # [M, C]
            blocks.append(_one_hot(places, len(self.strides) * self.buckets, drawn))
        return sparse.hstack(blocks, format="csr")

    def split(self, weight: Array) -> list[Array]:
        """Return (scalars [F'], depths [K + 1], tokens [I V], hashed [C B]) of a weight for each column."""
        return np.split(weight, np.cumsum([self.basis.width, self.depths, len(self.ids) * self.vocabulary]))


def _regress(
    x: sparse.csr_matrix, y: Array, held: sparse.csr_matrix, held_y: Array, penalties: Sequence[float]
) -> tuple[Array, float]:
    """Return (weight, bias) in float64 with the least held-out loss; a constant if the labels are constant.

    Args:
        x, y: [M, columns] and labels [M] to fit on.
        held, held_y: rows and labels held out.
        penalties: inverse penalties to try, ascending.
    """
    weight = np.zeros(x.shape[1])
    if is_constant(y):
        return weight, constant_logit(y)
    # A column without rows keeps a weight of 0, and most buckets of combinations have none.
    used = np.flatnonzero(x.getnnz(axis=0))
    classes, held_x = as_classes(x[:, used], y), held[:, used]
    model = LogisticRegression(solver="newton-cg", max_iter=_ROUNDS, tol=_TOLERANCE, warm_start=True)
    fits = []
    # From the strongest penalty on: each solution is a start near the next one.
    for penalty in penalties:
        model.set_params(C=penalty).fit(*classes)
        loss = log_loss(expit(held_x @ model.coef_[0] + model.intercept_[0]), held_y) if len(held_y) else 0.0
        fits.append((loss, model.coef_[0].copy(), float(model.intercept_[0])))
    _, weight[used], bias = min(fits, key=lambda fit: fit[0])
    return weight, bias


def _one_hot(values: Array, width: int, counts: Array) -> sparse.csr_matrix:
    """Return [M, width], a one in the column of each value [M] or [M, n] where `counts` [M] is true."""
    values = values.reshape(len(values), -1)
    # An unknown token is -1, and a held-out token may be beyond the vocabulary: no column, as 0 in the head's table.
    row, at = np.nonzero(counts[:, None] & (values >= 0) & (values < width))
    return sparse.csr_matrix((np.ones(len(row)), (row, values[row, at])), shape=(len(values), width))


def _is_of_anchor(name: str) -> bool:
    return feature(name).kind is Kind.ANCHOR
