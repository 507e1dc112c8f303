"""The token head, fitted: sparse logistic regressions on scalars, depth, the tokens that are there, and crosses of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from ...policies.crosses import DEPTH, Crosses
from ...policies.errors import InputError
from ...policies.features import TOKEN_FEATURES, Kind, feature
from ...policies.heads import Basis, TokenHead
from .calibrate import log_loss
from .fitting import FitTask
from .linear import fit_basis
from .rows import FitRows

PENALTIES = (0.05, 0.15, 0.5)
"""Inverse penalties C that are tried; the one with the least held-out loss is kept, output by output."""

CROSSES = (
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

_STRIDES = {"drawn_token": 1, "above_token": 40_503, "anchor_token": 24_133, "before_token": 57_037, DEPTH: 7_919}
_RANGE_STRIDE = 5_003
_ROUNDS, _TOLERANCE = 100, 1e-4


class Design:
    """Rows as a sparse matrix: the basis of the scalars, a column for each depth, token of each feature, place of each cross.

    Args:
        names: features of the rows.
        rows: to fit on; they say how scalars are standardised and which tokens there are.
        buckets: places of each cross; 0 = no crosses.
    """

    def __init__(self, names: Sequence[str], rows: FitRows, buckets: int = BUCKETS) -> None:
        self.ids = [at for at, name in enumerate(names) if name in TOKEN_FEATURES]
        if not self.ids:
            raise InputError(f"--features: the tokens head needs one of {', '.join(TOKEN_FEATURES)}")
        self.names = tuple(names)
        self.scalars = [at for at in range(len(names)) if at not in self.ids]
        bare = [names[at] for at in self.scalars]
        # The spread of no column is not defined, and a head may well read tokens alone.
        self.mean, self.scale = fit_basis(_only(rows, self.scalars), bare) if bare else (torch.zeros(0), torch.zeros(0))
        self.basis = Basis(bare, self.mean, self.scale)
        self.depths = int(rows.depth.max()) + 1
        self.vocabulary = int(rows.features[:, self.ids].max()) + 1
        self.buckets = buckets
        crosses = [cross for cross in CROSSES if set(cross) - {DEPTH} <= set(names)] if buckets else []
        self.strides = torch.zeros(len(crosses), len(names) + 1, dtype=torch.int64)
        for at, cross in enumerate(crosses):
            for name in cross:
                place = len(names) if name == DEPTH else self.names.index(name)
                self.strides[at, place] = _STRIDES.get(name, _RANGE_STRIDE)
        ranged = [at for at in self.scalars if bool((self.strides[:, at] != 0).any())]
        drawn = rows.features[rows.depth > 0][:, ranged].double().numpy()
        shares = np.linspace(0.0, 1.0, RANGES + 1)[1:-1]
        edges = np.quantile(drawn, shares, axis=0).T if len(drawn) else np.zeros((len(ranged), 0))
        self.edges = torch.from_numpy(edges.copy()).float()
        self.places = Crosses(names, self.strides, self.edges, buckets)

    def matrix(self, rows: FitRows) -> sparse.csr_matrix:
        """Return [M, F' + depths + I V + C B] float64."""
        first = rows.depth == 0
        scalars = rows.features[:, self.scalars]
        x = torch.where(first[:, None], self.basis(scalars, 0), self.basis(scalars, 1))
        known = [first if _of_anchor(self.names[at]) else ~first for at in self.ids]
        blocks = [sparse.csr_matrix(x.double().numpy()), _one_hot(rows.depth, self.depths, torch.ones_like(first))]
        for at, counts in zip(self.ids, known, strict=True):
            blocks.append(_one_hot(rows.features[:, at].long(), self.vocabulary, counts))
        if len(self.strides):
            places = self.places.places(rows.features, rows.depth)
            blocks.append(_one_hot(places, len(self.strides) * self.buckets, ~first))
        return sparse.hstack(blocks, format="csr")

    def parts(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return (scalars [F'], depths [K + 1], tokens [I V], crosses [C B]) of a weight for each column."""
        crosses = len(self.strides) * self.buckets
        return torch.split(weight, [self.basis.width, self.depths, len(self.ids) * self.vocabulary, crosses])


def fit_tokens(task: FitTask) -> tuple[TokenHead, dict[str, bytes]]:
    """Fit the token head; see `Fitter`.

    `params`: `C`, one value or the least held-out loss of `PENALTIES`; `buckets` of each cross, 0 = no crosses.
    """
    design = Design(task.names, task.rows, int(task.options.params.get("buckets", BUCKETS)))
    given = task.options.params.get("C")
    penalties = PENALTIES if given is None else (float(given),)
    x, held = design.matrix(task.rows), design.matrix(task.held_out)
    found = []
    for label, use, held_use in _parts(task.rows, task.held_out):
        found.append(_regress((x[use.numpy()], label[0][use]), (held[held_use.numpy()], label[1][held_use]), penalties))
    (accept, _), (following, later), (opening, first) = found
    scalars, depths, tables, crosses = zip(
        *(design.parts(weight) for weight in (accept, following, opening)), strict=True
    )
    after = torch.cat([depths[2][:1] + first, depths[1][1:] + later])
    table = torch.stack([tables[0], tables[1]]).view(2, len(design.ids), design.vocabulary).clone()
    for at, place in enumerate(design.ids):
        if _of_anchor(task.names[place]):
            table[:, at] = torch.stack([torch.zeros(design.vocabulary), tables[2].view(len(design.ids), -1)[at]])
    tensors = {
        "mean": design.mean,
        "scale": design.scale,
        "weight": torch.stack(scalars),
        "bias": torch.stack([depths[0] + found[0][1], after]),
        "table": table,
        "strides": design.strides,
        "edges": design.edges,
        "crosses": torch.stack(crosses[:2]).view(2, len(design.strides), max(design.buckets, 1)),
    }
    whole = {name: (t if name == "strides" else t.float()).contiguous() for name, t in tensors.items()}
    return TokenHead(task.names, whole), {}


def _parts(rows: FitRows, held: FitRows) -> list[tuple[tuple[Tensor, Tensor], Tensor, Tensor]]:
    """Return labels and rows (to fit on, held out) of accept, of next behind a drawn token, and of next at depth 0."""
    following = rows.followed, held.followed
    return [
        ((rows.accepted, held.accepted), rows.drawn, held.drawn),
        (following, rows.drawn & rows.followed_known, held.drawn & held.followed_known),
        (following, ~rows.drawn & rows.followed_known, ~held.drawn & held.followed_known),
    ]


def _regress(
    rows: tuple[sparse.csr_matrix, Tensor], held: tuple[sparse.csr_matrix, Tensor], penalties: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return (weight, bias []) in float64; labels of one kind only give a constant."""
    x, y = rows
    if len(y) == 0 or bool(y.all()) or not bool(y.any()):
        odds = torch.logit(torch.tensor((float(y.sum()) + 1.0) / (len(y) + 2.0), dtype=torch.float64))
        return torch.zeros(x.shape[1], dtype=torch.float64), odds
    # A column that no row uses keeps a weight of 0, and most places of the crosses are such.
    used = np.flatnonzero(x.getnnz(axis=0))
    x, unseen = x[:, used], held[0][:, used]
    model = LogisticRegression(solver="newton-cg", max_iter=_ROUNDS, tol=_TOLERANCE, warm_start=True)
    fits = []
    for penalty in sorted(penalties):
        model.set_params(C=penalty).fit(x, y.numpy())
        scores = torch.from_numpy(unseen @ model.coef_[0] + model.intercept_[0])
        loss = log_loss(torch.sigmoid(scores), held[1]) if len(held[1]) else 0.0
        fits.append((loss, model.coef_[0].copy(), float(model.intercept_[0])))
    _, found, bias = min(fits, key=lambda fit: fit[0])
    weight = torch.zeros(rows[0].shape[1], dtype=torch.float64)
    weight[torch.from_numpy(used)] = torch.from_numpy(found)
    return weight, torch.tensor(bias, dtype=torch.float64)


def _one_hot(values: Tensor, width: int, counts: Tensor) -> sparse.csr_matrix:
    """Return [M, width], a one in the column of each value [M] or [M, n] that counts and lies inside."""
    values = values.view(len(values), -1)
    row, at = (counts[:, None] & (values >= 0) & (values < width)).nonzero().T.numpy()
    cells = (np.ones(len(row)), (row, values.numpy()[row, at]))
    return sparse.csr_matrix(cells, shape=(len(values), width))


def _of_anchor(name: str) -> bool:
    return feature(name).kind is Kind.ANCHOR


def _only(rows: FitRows, columns: Sequence[int]) -> FitRows:
    return FitRows(rows.features[:, list(columns)], rows.depth, rows.accepted, rows.followed, rows.followed_known)
