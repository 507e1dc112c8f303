"""Heads whose second output is the value of drafting on: ridge regression, boosted trees, a small network.

Rows are (anchor, depth); the label is what going on saved in hindsight, in tokens. All kinds end as the flat tensors of
`policies.heads`, so that a continuation policy runs, is saved and is loaded as any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xgboost as xgb
from torch import Tensor, nn

from ...policies.heads import Basis, Head, LinearHead, MLPHead, TreesHead
from .boosted import flatten
from .linear import fit_basis
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
    arrays = flatten(boost(*parts[0], seed, MOST_TREES, parts[1]))
    tensors = {name: torch.stack([torch.zeros_like(a), a]) for name, a in arrays.items()}
    tensors["threshold"][0] = float(np.finfo(np.float32).max)  # the first output is void: nothing is split
    return TreesHead(names, tensors)


def fit_linear_value(rows: ValueRows, held: ValueRows, names: Sequence[str], seed: int) -> LinearHead:
    """Fit ridge regressions: one for depth 0, one for what comes after."""
    mean, scale = fit_basis(_as_fit_rows(rows), names)
    basis = Basis(names, mean, scale)
    weight, bias = torch.zeros(3, basis.width), torch.zeros(3)
    for at, depth, use in ((1, 1, rows.depth > 0), (2, 0, rows.depth == 0)):
        if bool(use.any()):
            weight[at], bias[at] = _ridge(basis(rows.features[use], depth), rows.gain[use], rows.weight[use])
    return LinearHead(names, {"mean": mean, "scale": scale, "weight": weight, "bias": bias})


def _ridge(x: Tensor, y: Tensor, weight: Tensor, strength: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (weight [F'], bias []) of the weighted least squares under a small penalty."""
    x = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    w, y = weight.double()[:, None], y.clamp(-CLIP, CLIP).double()
    penalty = strength * torch.eye(x.shape[1], dtype=torch.float64)
    penalty[-1, -1] = 0.0
    solved = torch.linalg.solve((x * w).T @ x + penalty, (x * w).T @ y).float()
    return solved[:-1], solved[-1]


def fit_neural_value(rows: ValueRows, held: ValueRows, names: Sequence[str], seed: int) -> MLPHead:
    """Fit a network by least squares and keep the epoch with the least held-out error; torch's random state is kept."""
    mean, scale = fit_basis(_as_fit_rows(rows), names)
    basis = Basis(names, mean, scale)
    sides = [(_columns(basis, r), r.gain.clamp(-CLIP, CLIP).float(), r.weight.float()) for r in (rows, held)]
    sizes = [basis.width + 1, *HIDDEN, 2]
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        layers = nn.ModuleList([nn.Linear(i, o) for i, o in itertools.pairwise(sizes)])
        best = _descend(layers, sides, torch.Generator().manual_seed(seed))
    tensors = {f"{part}.{i}": best[f"{i}.{part}"] for i in range(len(layers)) for part in ("weight", "bias")}
    last = len(layers) - 1
    tensors[f"weight.{last}"][0], tensors[f"bias.{last}"][0] = 0.0, 0.0
    return MLPHead(names, {"mean": mean, "scale": scale, **tensors})


def _descend(
    layers: nn.ModuleList, sides: Sequence[tuple[Tensor, Tensor, Tensor]], generator: torch.Generator
) -> dict[str, Tensor]:
    def error(part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, weight = part
        for index, layer in enumerate(layers):
            x = layer(x if index == 0 else nn.functional.silu(x))
        return (weight * (x[:, 1] - y) ** 2).sum() / weight.sum().clamp_min(1e-9)

    fit, held = sides
    each = -(-len(fit[1]) // BATCH)
    epochs = max(EPOCHS, -(-LEAST_STEPS // each))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=RATE, weight_decay=1e-2)
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
            best, least = {name: t.detach().clone() for name, t in layers.state_dict().items()}, now
    return best


def _columns(basis: Basis, rows: ValueRows) -> Tensor:
    first = (rows.depth == 0)[:, None]
    return torch.cat([torch.where(first, basis(rows.features, 0), basis(rows.features, 1)), first.float()], 1)


def _as_fit_rows(rows: ValueRows) -> FitRows:
    none = torch.zeros(len(rows.depth), dtype=torch.bool)
    return FitRows(rows.features, rows.depth, none, none, none)


VALUE_FITTERS: dict[str, ValueFitter] = {
    "logistic": fit_linear_value,
    "mlp": fit_neural_value,
    "xgboost": fit_boosted_value,
}
"""By the kind of head that comes out."""
