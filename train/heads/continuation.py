"""Heads whose second output is the value of drafting on: ridge regression, boosted trees, a small network.

Rows are (anchor, depth); the label is what going on saved in hindsight, in tokens. All kinds end as the arrays of
`policies.heads`, so that a continuation policy runs, is saved and is loaded as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xgboost as xgb
from torch import Tensor, nn

from ...policies.contract import Array
from ...policies.heads.base import Head
from ...policies.heads.layers import LinearHead, MLPHead
from ...policies.heads.tables import TreesHead
from .base import basis_columns, fit_basis, ranges, with_ranges
from .boosted import flatten
from .networks import Perceptron, flagged_columns, layer_tensors
from .rows import FitRows

TREES = {"max_depth": 4, "eta": 0.1, "min_child_weight": 40.0, "subsample": 0.8, "lambda": 5.0}
MOST_TREES = 150
HIDDEN = (32, 32)
EPOCHS, BATCH, RATE = 12, 512, 4e-3
LEAST_STEPS = 600
CLIP = 6.0
"""Tokens beyond which a label counts as much as at it: a text that runs on for long says little about the next one."""


@dataclass(frozen=True)
class ValueRows:
    """M rows (anchor, depth j): `features` [M, F], `depth`, `gain` in tokens, `weight`; all [M]."""

    features: Tensor
    depth: Tensor
    gain: Tensor
    weight: Tensor

    def part(self, use: Tensor) -> ValueRows:
        """Return the rows where `use` [M] holds."""
        return ValueRows(self.features[use], self.depth[use], self.gain[use], self.weight[use])


ValueFitter = Callable[[ValueRows, ValueRows, Sequence[str], int], Head]
"""(rows to fit on, rows to stop early on, feature names, seed) -> head."""


def boost(
    x: Tensor, y: Tensor, weight: Tensor, seed: int, trees: int, held: tuple[Tensor, Tensor, Tensor] | None = None
) -> xgb.Booster:
    """Return boosted regression trees on x [M, F], stopped early on `held` where it is given."""
    options = {**TREES, "objective": "reg:squarederror", "base_score": 0.5, "tree_method": "hist", "seed": seed,
               "nthread": torch.get_num_threads()}  # fmt: skip
    # Labels are shifted by the base score: `flatten` knows bases of probabilities, whose log-odds at a half are 0.
    matrices = [xgb.DMatrix(a.numpy(), b.clamp(-CLIP, CLIP).numpy() + 0.5, weight=w.numpy())
                for a, b, w in ((x, y, weight), *([held] if held is not None else []))]  # fmt: skip
    stop = {} if held is None else {"evals": [(matrices[1], "held_out")], "early_stopping_rounds": 15}
    booster = xgb.train(options, matrices[0], trees, verbose_eval=False, **stop)
    return booster if held is None else booster[: booster.best_iteration + 1]


def fit_boosted_value(rows: ValueRows, held: ValueRows, names: Sequence[str], seed: int) -> TreesHead:
    """Fit boosted regression trees."""
    parts = [(r.features, r.gain, r.weight) for r in (rows, held)]
    arrays = flatten(boost(*parts[0], seed, MOST_TREES, parts[1]), int(TREES["max_depth"]))
    tensors = {name: np.stack([np.zeros_like(a), a]) for name, a in arrays.items()}
    tensors["threshold"][0] = np.finfo(np.float32).max  # the first output is void: nothing is split
    return TreesHead(names, exported(tensors, names, _as_fit_rows(rows)))


def fit_linear_value(rows: ValueRows, held: ValueRows, names: Sequence[str], seed: int) -> LinearHead:
    """Fit ridge regressions: one for depth 0, one for what comes after."""
    basis = fit_basis(_as_fit_rows(rows), names)
    columns, gain, weight = basis_columns(basis, rows.features, rows.depth), rows.gain.numpy(), rows.weight.numpy()
    first = rows.depth.numpy() == 0
    # accept, which stays void; next; next at depth 0.
    slopes, bias = np.zeros((3, basis.width), dtype=np.float32), np.zeros(3, dtype=np.float32)
    for at, use in ((1, ~first), (2, first)):
        if use.any():
            slopes[at], bias[at] = _ridge(columns[use], gain[use], weight[use])
    fitted = {"mean": basis.mean, "scale": basis.scale, "weight": slopes, "bias": bias}
    return LinearHead(names, exported(fitted, names, _as_fit_rows(rows)))


def _ridge(x: Array, y: Array, weight: Array) -> tuple[Array, float]:
    """Return (weight [F'], bias) of the weighted least squares under a small penalty."""
    x = np.append(x, np.ones((len(x), 1)), 1)
    weighted = x.T * weight  # [F' + 1, M]
    penalty = np.eye(x.shape[1])
    penalty[-1, -1] = 0.0  # the bias is not drawn to 0
    solved: Array = np.linalg.solve(weighted @ x + penalty, weighted @ np.clip(y, -CLIP, CLIP))
    return solved[:-1], float(solved[-1])


def fit_neural_value(rows: ValueRows, held: ValueRows, names: Sequence[str], seed: int) -> MLPHead:
    """Fit a network by least squares and keep the epoch with the least held-out error; torch's random state is kept."""
    basis = fit_basis(_as_fit_rows(rows), names)
    sides = [
        (flagged_columns(basis, _as_fit_rows(r)), r.gain.clamp(-CLIP, CLIP).float(), r.weight.float())
        for r in (rows, held)
    ]
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        network = Perceptron([basis.width + 1, *HIDDEN, 2], nn.functional.silu)
        best = _descend(network, sides, torch.Generator().manual_seed(seed))
    fitted = {"mean": basis.mean, "scale": basis.scale, **layer_tensors(best)}
    last = len(HIDDEN)
    fitted[f"weight.{last}"][0], fitted[f"bias.{last}"][0] = 0.0, 0.0  # `accept` is void, not fitted
    return MLPHead(names, exported(fitted, names, _as_fit_rows(rows)))


def _descend(
    network: nn.Module, sides: Sequence[tuple[Tensor, Tensor, Tensor]], generator: torch.Generator
) -> dict[str, Tensor]:
    def error(part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, weight = part
        found: Tensor = (weight * (network(x)[:, 1] - y) ** 2).sum() / weight.sum().clamp_min(1e-9)
        return found

    fit, held = sides
    if not bool(held[2].any()):  # where all short texts end in their first round nothing is left to stop early by
        held = fit
    each = -(-len(fit[1]) // BATCH)
    # Of few rows an epoch is few steps: more epochs make up for it.
    epochs = max(EPOCHS, -(-LEAST_STEPS // each))
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, epochs * each)
    best: dict[str, Tensor] = {}
    least = float("inf")
    for _ in range(epochs):
        for at in torch.randperm(len(fit[1]), generator=generator).split(BATCH):
            optimizer.zero_grad()
            error((fit[0][at], fit[1][at], fit[2][at])).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            now = float(error(held))
        if now < least or not best:
            best, least = {name: t.detach().clone() for name, t in network.state_dict().items()}, now
    return best


def exported(tensors: Any, names: Sequence[str], rows: FitRows) -> dict[str, Array]:
    """Return the arrays of a head with the ranges of its features."""
    arrays = {name: np.ascontiguousarray(np.asarray(values)) for name, values in tensors.items()}
    return with_ranges(arrays, *ranges(names, rows.features, rows.depth))


def _as_fit_rows(rows: ValueRows) -> FitRows:
    # Basis and ranges read features and depth only; there are no labels of acceptance.
    none = torch.zeros(len(rows.depth), dtype=torch.bool)
    return FitRows(rows.features, rows.depth, none, none, none)


VALUE_FITTERS: dict[str, ValueFitter] = {
    "logistic": fit_linear_value,
    "mlp": fit_neural_value,
    "xgboost": fit_boosted_value,
}
"""By the kind of head that comes out."""
