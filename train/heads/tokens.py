"""The token head, fitted: sparse logistic regressions on scalars, depth, the tokens that are there, and pairs of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from ...policies.errors import InputError
from ...policies.features import TOKEN_FEATURES
from ...policies.heads import Basis, TokenHead
from ...policies.heads_tokens import PAIR, bucket
from .calibrate import log_loss
from .fitting import FitTask
from .linear import fit_basis
from .rows import FitRows

PENALTIES = (0.05, 0.15, 0.5)
"""Inverse penalties C that are tried; the one with the least held-out loss is kept, output by output."""

BUCKETS = 65_521
"""Places for pairs of tokens: a prime below 2^16, half a megabyte for both outputs."""

_ROUNDS = 200


class Design:
    """Rows as a sparse matrix: the basis of the scalars, a column for each depth, token of each feature, and bucket of pairs.

    Args:
        names: features of the rows.
        rows: to fit on; they say how scalars are standardised and which tokens there are.
        buckets: for pairs of tokens, where the features have both.
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
        self.pair = [self.names.index(name) for name in PAIR if name in names]
        self.buckets = buckets if len(self.pair) == len(PAIR) else 0

    def matrix(self, rows: FitRows) -> sparse.csr_matrix:
        """Return [M, F' + depths + I V + B] float64."""
        first = rows.depth == 0
        scalars = rows.features[:, self.scalars]
        x = torch.where(first[:, None], self.basis(scalars, 0), self.basis(scalars, 1))
        known = [first if self.names[at] == "anchor_token" else ~first for at in self.ids]
        blocks = [sparse.csr_matrix(x.double().numpy()), _one_hot(rows.depth, self.depths, torch.ones_like(first))]
        for at, counts in zip(self.ids, known, strict=True):
            blocks.append(_one_hot(rows.features[:, at].long(), self.vocabulary, counts))
        if self.buckets:
            above, drawn = (rows.features[:, at].long() for at in self.pair)
            blocks.append(_one_hot(bucket(above, drawn, self.buckets), self.buckets, ~first))
        return sparse.hstack(blocks, format="csr")

    def parts(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return (scalars [F'], depths [K + 1], tokens [I V], pairs [B]) of a weight for each column."""
        return torch.split(weight, [self.basis.width, self.depths, len(self.ids) * self.vocabulary, self.buckets])


def fit_tokens(task: FitTask) -> tuple[TokenHead, dict[str, bytes]]:
    """Fit the token head; see `Fitter`.

    `params`: `C`, one value or the least held-out loss of `PENALTIES`; `buckets` for pairs of tokens, 0 = none.
    """
    design = Design(task.names, task.rows, int(task.options.params.get("buckets", BUCKETS)))
    given = task.options.params.get("C")
    penalties = PENALTIES if given is None else (float(given),)
    x, held = design.matrix(task.rows), design.matrix(task.held_out)
    found = []
    for label, use, held_use in _parts(task.rows, task.held_out):
        found.append(_regress((x[use.numpy()], label[0][use]), (held[held_use.numpy()], label[1][held_use]), penalties))
    (accept, _), (following, later), (opening, first) = found
    scalars, depths, tables, pairs = zip(
        *(design.parts(weight) for weight in (accept, following, opening)), strict=True
    )
    after = torch.cat([depths[2][:1] + first, depths[1][1:] + later])
    table = torch.stack([tables[0], tables[1]]).view(2, len(design.ids), design.vocabulary).clone()
    for at, place in enumerate(design.ids):
        if task.names[place] == "anchor_token":
            table[:, at] = torch.stack([torch.zeros(design.vocabulary), tables[2].view(len(design.ids), -1)[at]])
    tensors = {
        "mean": design.mean,
        "scale": design.scale,
        "weight": torch.stack(scalars),
        "bias": torch.stack([depths[0] + found[0][1], after]),
        "table": table,
        "pairs": torch.stack(pairs[:2]),
    }
    return TokenHead(task.names, {name: t.float().contiguous() for name, t in tensors.items()}), {}


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
    best: tuple[float, Tensor, Tensor] | None = None
    for penalty in penalties:
        model = LogisticRegression(C=penalty, max_iter=_ROUNDS, tol=1e-3).fit(x, y.numpy())
        weight, bias = torch.from_numpy(model.coef_[0]), torch.tensor(float(model.intercept_[0]), dtype=torch.float64)
        scores = held[0] @ model.coef_[0] + model.intercept_[0]
        loss = log_loss(torch.sigmoid(torch.from_numpy(np.asarray(scores))), held[1]) if len(held[1]) else 0.0
        if best is None or loss < best[0]:
            best = loss, weight, bias
    assert best is not None
    return best[1], best[2]


def _one_hot(values: Tensor, width: int, counts: Tensor) -> sparse.csr_matrix:
    """Return [M, width], a one in the column of each value that counts and lies inside."""
    use = (counts & (values >= 0) & (values < width)).nonzero()[:, 0].numpy()
    cells = (np.ones(len(use)), (use, values.numpy()[use]))
    return sparse.csr_matrix(cells, shape=(len(values), width))


def _only(rows: FitRows, columns: Sequence[int]) -> FitRows:
    return FitRows(rows.features[:, list(columns)], rows.depth, rows.accepted, rows.followed, rows.followed_known)
