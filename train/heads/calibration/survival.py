"""Fitting the survival tables: at each depth the simplest monotone map that lowers the loss on prompts left out.

Of a round that was visited, all K depths serve: a live policy does not know that a branch has failed, so S_j has to be right
for rounds whose token was rejected long before as well. Maps are tried in order of their freedom: none; a temperature on the
log-odds of the product (sequential temperature scaling, DSpark); slope and offset (Platt, 1999); isotonic on the means of
bins of equal mass. Each is fitted on some prompts and scored on others. All end as a table of `KNOTS` knots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.special import expit, logit

from ....policies.contract import Array
from ....policies.learned import Calibrator, SurvivalMaps
from .logits import log_loss

KNOTS = 33
"""Knots of a table."""

MAX_STARTS = 3
"""Number of first factors that tables are fitted for; a product that begins later is not mapped."""

MAPS = ("identity", "temperature", "platt", "isotonic")
LEAST = 100
"""Rows below which nothing is fitted."""

GAIN = 1e-4
"""Relative gain in held-out loss that a freer map must bring."""

PER_BIN, MOST_BINS = 100, 24
_STEPS = 25
_MOST_ROWS = 100_000  # that quantiles are taken of
_EDGE = 1e-4


def identity_tables(starts: int, depth: int) -> Array:
    """Return survival tables [L, K, 2, n] float32 that change nothing."""
    line = np.linspace(0.0, 1.0, KNOTS, dtype=np.float32)
    return np.broadcast_to(line, (starts, depth, 2, KNOTS)).copy()


@dataclass(frozen=True)
class Products:
    """What survival is fitted on: R visited rounds.

    Attributes:
        accept: [R, K] calibrated `accept` at depths 1..K.
        length: [R] accepted length A.
        fold: [R] of the prompt: all rounds of a prompt are in one.
        there: [R, K] whether there was a token at all, since no policy is asked about one that a drafter does not know.
    """

    accept: Array
    length: Array
    fold: Array
    there: Array

    def of(self, use: Array) -> Products:
        """Return only the rounds `use` [R] bool."""
        return Products(self.accept[use], self.length[use], self.fold[use], self.there[use])


@dataclass(frozen=True)
class SurvivalFit:
    """Tables, and the kind of map that was chosen at each depth for products from depth 1 on."""

    maps: SurvivalMaps
    kinds: tuple[str, ...]


def fit_survival(products: Products) -> SurvivalFit:
    """Choose and fit the tables.

    Args:
        products: of the rounds to fit on.
    """
    depth = products.accept.shape[1]
    tables = identity_tables(MAX_STARTS, depth)
    chosen: list[str] = []
    for start in range(1, min(MAX_STARTS, depth) + 1):
        # A product that begins at `start` says nothing of the tokens before it: they are given as accepted.
        alive = products.of(products.length >= start - 1)
        tables[start - 1], kinds = fit_tables(alive, start)
        chosen = chosen or kinds
    return SurvivalFit(SurvivalMaps(tables), tuple(chosen))


def unchanged_survival(depth: int) -> SurvivalFit:
    """Return tables that change nothing."""
    return SurvivalFit(SurvivalMaps(identity_tables(min(MAX_STARTS, depth), depth)), ("identity",) * depth)


def survival(accept: Array, tables: Array | None = None) -> Array:
    """Return [R, K] float64, S_j of `accept` [R, K] under tables [K, 2, n] of products from depth 1 on; None = products."""
    columns = []
    product = np.ones(len(accept))
    for at in range(accept.shape[1]):
        product = product * accept[:, at]
        product = product if tables is None else _through(tables[at], product)
        columns.append(product)
    return np.stack(columns, 1) if columns else accept


def fit_tables(products: Products, start: int) -> tuple[Array, list[str]]:
    """Return (tables [K, 2, n], kinds) of products that begin at depth `start`, of rounds with A >= start - 1.

    Args:
        products: of these rounds.
        start: first factor; tables above it change nothing.
    """
    depth = products.accept.shape[1]
    tables, chosen = identity_tables(1, depth)[0], []
    product = np.ones(len(products.length))
    for j in range(start, depth + 1):
        product = product * products.accept[:, j - 1]
        use = products.there[:, j - 1]
        known, labels = product[use], products.length[use] >= j
        kind = _choose(known, labels, products.fold[use])
        tables[j - 1] = _fit(kind, known, labels)
        product = _through(tables[j - 1], product)  # deeper maps are fitted on what this one gives
        chosen.append(kind)
    return tables, chosen


def _choose(product: Array, labels: Array, fold: Array) -> str:
    """Return the simplest kind of map that no freer one beats on prompts left out."""
    if len(labels) < LEAST or bool(labels.all()) or not bool(labels.any()) or len(np.unique(fold)) < 2:
        return "identity"
    best, least = "identity", log_loss(product, labels)
    for kind in MAPS[1:]:
        total = 0.0
        for one in np.unique(fold):
            out = fold == one
            table = _fit(kind, product[~out], labels[~out])
            total += log_loss(_through(table, product[out]), labels[out]) * int(out.sum())
        if total / len(labels) < least * (1.0 - GAIN):
            best, least = kind, total / len(labels)
    return best


def _fit(kind: str, product: Array, labels: Array) -> Array:
    """Return the table [2, n] of a map of this kind."""
    same: Array = identity_tables(1, 1)[0, 0]
    if kind == "identity" or len(labels) < LEAST or bool(labels.all()) or not bool(labels.any()):
        return same
    if kind == "isotonic":
        return _isotonic(product, labels)
    slope, offset = _logistic(_odds(product), labels.astype(np.float64), offset=kind == "platt")
    if slope <= 0.0:  # the product says nothing, or less
        return same
    return _table(partial(_bent, slope=slope, offset=offset), product)


def _bent(product: Array, slope: float, offset: float) -> Array:
    chance: Array = expit(slope * _odds(product) + offset)
    return chance


def _odds(product: Array) -> Array:
    odds: Array = logit(np.clip(product, _EDGE, 1.0 - _EDGE))
    return odds


def _table(bend: Callable[[Array], Array], product: Array) -> Array:
    """Return the knots of a smooth map: half of them where products lie, half evenly in the log-odds."""
    inner = KNOTS - 2
    # KNOTS in all: both ends, quantiles, and a grid, so that the map also bends where products of these prompts are rare.
    quantiles = np.quantile(product[:: max(1, len(product) // _MOST_ROWS)], np.linspace(0.0, 1.0, inner // 2 + 1))
    even = expit(np.linspace(-6.0, 6.0, inner - inner // 2 - 1))
    x = np.sort(np.clip(np.concatenate([[0.0, 1.0], quantiles, even]), 0.0, 1.0))
    return np.stack([x, np.maximum.accumulate(bend(x))]).astype(np.float32)


def _isotonic(product: Array, labels: Array) -> Array:
    """Return the knots of an isotonic fit to the means of bins of equal mass, level outside them."""
    order = np.argsort(product, kind="stable")
    bins = max(2, min(MOST_BINS, len(order) // PER_BIN))
    first = np.arange(bins) * len(order) // bins
    rows = np.diff(first, append=len(order))
    # Rounded, so that bins of one and the same value count as one.
    means = np.add.reduceat(product[order], first) / rows
    true = np.add.reduceat(labels[order].astype(np.float64), first)
    x, which = np.unique(np.round(means, 9), return_inverse=True)
    weight = np.bincount(which, rows)
    y = isotonic_regression(np.bincount(which, true) / weight, weights=weight).x
    knots = np.stack([x, np.clip(y, _EDGE, 1.0 - _EDGE)])
    # All tables have KNOTS knots, so that they stack; MOST_BINS is fewer.
    level = np.repeat(knots[:, -1:], KNOTS - len(x), 1)
    table: Array = np.clip(np.concatenate([knots, level], 1), 0.0, 1.0).astype(np.float32)
    return table


def _logistic(odds: Array, labels: Array, offset: bool) -> tuple[float, float]:
    """Return (slope, offset) of a logistic regression on one column by Newton's method, drawn a little to (1, 0)."""
    slope, shift = 1.0, 0.0
    # Grows with the rows as the Hessian does: it matters only where that is nearly singular, as of products all alike.
    ridge = 1e-3 * len(odds) / 100
    for _ in range(_STEPS):
        p = expit(slope * odds + shift)
        residual, weight = labels - p, p * (1.0 - p)
        g0 = float((residual * odds).sum()) - ridge * (slope - 1.0)
        h00 = float((weight * odds * odds).sum()) + ridge
        if not offset:
            move = (g0 / h00, 0.0)
        else:
            g1 = float(residual.sum()) - ridge * shift
            h01, h11 = float((weight * odds).sum()), float(weight.sum()) + ridge
            determinant = h00 * h11 - h01 * h01
            move = ((h11 * g0 - h01 * g1) / determinant, (h00 * g1 - h01 * g0) / determinant)
        # A full Newton step may overshoot where accepted and rejected rows are nearly separated.
        slope, shift = slope + max(-1.0, min(1.0, move[0])), shift + max(-1.0, min(1.0, move[1]))
        if abs(move[0]) + abs(move[1]) < 1e-6:
            break
    return slope, shift


def _through(table: Array, product: Array) -> Array:
    # As `SurvivalMaps` does it: interpolation in float32 would change the product a little.
    if np.array_equal(table[0], table[1]):
        return product
    return np.clip(Calibrator("isotonic", knots=table)(product), 0.0, 1.0)
