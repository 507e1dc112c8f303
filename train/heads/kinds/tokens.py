"""The token head, fitted: sparse logistic regressions on scalars, depth, the tokens that are there, and hashed of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from ....policies.contract import Array
from ....policies.errors import InputError
from ....policies.features import TOKEN_FEATURES, Kind, feature
from ....policies.heads.tables import DEPTH, HashedFeatures, TokenHead
from ..basis import basis_columns, fit_basis
from ..calibration.logits import log_loss
from ..exported import exported
from ..fitting import FitTask
from ..rows import FitRows
from ..soft_classes import constant, two_classes

PENALTIES = (0.05, 0.15, 0.5)
"""Inverse penalties C that are tried; the one with the least held-out loss is kept, output by output."""

COMBINATIONS = (
    ("above_token", "drawn_token"),
    ("anchor_token", "drawn_token", DEPTH),
    ("before_token", "anchor_token", "drawn_token"),
    ("drawn_token", "noisy_score"),
)
"""What is crossed, where a head reads all of it; more of them told no more on two small pairs."""

BUCKETS = 65_521
"""Places of a cross: a prime below 2^16, half a megabyte for both outputs."""

RANGES = 8
"""Of a crossed scalar, each with as many rows."""

# Multipliers of the hash: each member of a cross times its own, summed, modulo the buckets (`HashedFeatures`).
_STRIDES = {"drawn_token": 1, "above_token": 40_503, "anchor_token": 24_133, "before_token": 57_037, DEPTH: 7_919}
_RANGE_STRIDE = 5_003
_ROUNDS, _TOLERANCE = 100, 1e-4


class Design:
    """Rows as a sparse matrix: the basis of the scalars, a column for each depth, token of each feature, place of each cross.

    Args:
        names: features of the rows.
        rows: to fit on; they say how scalars are standardised and which tokens there are.
        buckets: places of each cross; 0 = no hashed features.
    """

    def __init__(self, names: Sequence[str], rows: FitRows, buckets: int = BUCKETS) -> None:
        self.ids = [at for at, name in enumerate(names) if name in TOKEN_FEATURES]
        if not self.ids:
            raise InputError(f"--feature: the tokens head needs one of {', '.join(TOKEN_FEATURES)}")
        self.names = tuple(names)
        self.scalars = [at for at in range(len(names)) if at not in self.ids]
        self.basis = fit_basis(_only(rows, self.scalars), [names[at] for at in self.scalars])
        self.depths = int(rows.depth.max()) + 1
        self.vocabulary = int(rows.features[:, self.ids].max()) + 1
        self.buckets = buckets
        hashed = [cross for cross in COMBINATIONS if set(cross) - {DEPTH} <= set(names)] if buckets else []
        self.strides = np.zeros((len(hashed), len(names) + 1), dtype=np.int64)
        for at, cross in enumerate(hashed):
            for name in cross:
                place = len(names) if name == DEPTH else self.names.index(name)
                self.strides[at, place] = _STRIDES.get(name, _RANGE_STRIDE)
        ranged = [at for at in self.scalars if self.strides[:, at].any()]
        drawn = rows.features[rows.drawn][:, ranged].double().numpy()
        shares = np.linspace(0.0, 1.0, RANGES + 1)[1:-1]
        edges = np.quantile(drawn, shares, axis=0).T if len(drawn) else np.zeros((len(ranged), 0))  # [J, RANGES - 1]
        self.edges = np.ascontiguousarray(edges, dtype=np.float32)
        self.places = HashedFeatures(names, self.strides, self.edges, buckets)

    def matrix(self, rows: FitRows) -> sparse.csr_matrix:
        """Return [M, F' + depths + I V + C B] float64."""
        features, depth, drawn = rows.features.numpy(), rows.depth.numpy(), rows.drawn.numpy()
        x = basis_columns(self.basis, rows.features[:, self.scalars], rows.depth)
        blocks = [sparse.csr_matrix(x.astype(np.float64)), _one_hot(depth, self.depths, np.ones_like(drawn))]
        for at in self.ids:
            # As `TokenHead` reads them: tokens of the anchor at depth 0 alone, drawn ones from depth 1 on.
            known = ~drawn if _of_anchor(self.names[at]) else drawn
            blocks.append(_one_hot(features[:, at].astype(np.int64), self.vocabulary, known))
        if len(self.strides):
            places = self.places.places(features, depth)  # [M, C]
            blocks.append(_one_hot(places, len(self.strides) * self.buckets, drawn))
        return sparse.hstack(blocks, format="csr")

    def parts(self, weight: Array) -> list[Array]:
        """Return (scalars [F'], depths [K + 1], tokens [I V], hashed [C B]) of a weight for each column."""
        return np.split(weight, np.cumsum([self.basis.width, self.depths, len(self.ids) * self.vocabulary]))


def fit_tokens(task: FitTask) -> tuple[TokenHead, dict[str, bytes]]:
    """Fit the token head; see `Fitter`.

    `params`: `C`, one value or the least held-out loss of `PENALTIES`; `buckets` of each cross, 0 = no hashed features.
    """
    design = Design(task.names, task.rows, int(task.options.params.get("buckets", BUCKETS)))
    given = task.options.params.get("C")
    penalties = PENALTIES if given is None else (float(given),)
    x, held = design.matrix(task.rows), design.matrix(task.held_out)
    found = []
    for label, use, held_use in _parts(task.rows, task.held_out):
        found.append(_regress((x[use], label[0][use]), (held[held_use], label[1][held_use]), penalties))
    (accept, above), (next_, later), (opening, first) = found
    scalars, depths, tables, hashed = zip(*(design.parts(weight) for weight in (accept, next_, opening)), strict=True)
    # Of tokens of the anchor the opening regression alone has weights: they fill the row of `next`.
    table = np.stack(tables[:2]).reshape(2, len(design.ids), design.vocabulary)
    for at, place in enumerate(design.ids):
        if _of_anchor(task.names[place]):
            table[:, at] = np.zeros(design.vocabulary), tables[2].reshape(len(design.ids), -1)[at]
    fitted = {
        "mean": design.basis.mean,
        "scale": design.basis.scale,
        "weight": np.stack(scalars),
        "bias": np.stack([depths[0] + above, np.append(depths[2][:1] + first, depths[1][1:] + later)]),
        "table": table,
        "edges": design.edges,
        "hashed": np.stack(hashed[:2]).reshape(2, len(design.strides), max(design.buckets, 1)),
    }
    whole = {name: values.astype(np.float32) for name, values in fitted.items()}
    return TokenHead(task.names, exported({**whole, "strides": design.strides}, task.names, task.rows)), {}


_Part = tuple[tuple[Array, Array], Array, Array]


def _parts(rows: FitRows, held: FitRows) -> list[_Part]:
    """Return labels and rows (to fit on, held out) of accept, of next after a drawn token, and of next at depth 0."""
    accepted, followed = ((rows.label(name).numpy(), held.label(name).numpy()) for name in ("accepted", "followed"))
    drawn, known = ((getattr(rows, name).numpy(), getattr(held, name).numpy()) for name in ("drawn", "followed_known"))
    return [
        (accepted, *drawn),
        (followed, drawn[0] & known[0], drawn[1] & known[1]),
        (followed, ~drawn[0] & known[0], ~drawn[1] & known[1]),
    ]


def _regress(
    rows: tuple[sparse.csr_matrix, Array], held: tuple[sparse.csr_matrix, Array], penalties: Sequence[float]
) -> tuple[Array, float]:
    """Return (weight, bias) in float64; labels of one kind only give a constant."""
    x, y = rows
    weight = np.zeros(x.shape[1])
    if constant(y):
        return weight, float(logit((float(y.sum()) + 1.0) / (len(y) + 2.0)))
    # A column that no row uses keeps a weight of 0, and most places of hashed features are such.
    used = np.flatnonzero(x.getnnz(axis=0))
    x, unseen = x[:, used], held[0][:, used]
    model = LogisticRegression(solver="newton-cg", max_iter=_ROUNDS, tol=_TOLERANCE, warm_start=True)
    doubled = two_classes(x, y)
    fits = []
    # From the strongest penalty on: each solution is a start near the next one.
    for penalty in sorted(penalties):
        model.set_params(C=penalty).fit(*doubled)
        loss = log_loss(expit(unseen @ model.coef_[0] + model.intercept_[0]), held[1]) if len(held[1]) else 0.0
        fits.append((loss, model.coef_[0].copy(), float(model.intercept_[0])))
    _, weight[used], bias = min(fits, key=lambda fit: fit[0])
    return weight, bias


def _one_hot(values: Array, width: int, counts: Array) -> sparse.csr_matrix:
    """Return [M, width], a one in the column of each value [M] or [M, n] that counts and lies inside."""
    values = values.reshape(len(values), -1)
    # An unknown token is -1, and a held-out one may lie beyond those fitted on: no column, as 0 in the head's table.
    row, at = np.nonzero(counts[:, None] & (values >= 0) & (values < width))
    return sparse.csr_matrix((np.ones(len(row)), (row, values[row, at])), shape=(len(values), width))


def _of_anchor(name: str) -> bool:
    return feature(name).kind is Kind.ANCHOR


def _only(rows: FitRows, columns: Sequence[int]) -> FitRows:
    return FitRows(rows.features[:, list(columns)], rows.depth, rows.accepted, rows.followed, rows.followed_known)
