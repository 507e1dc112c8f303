"""The boosted head: one XGBoost ensemble per output, turned into flat arrays of complete binary trees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xgboost as xgb
from torch import Tensor

from ..policies.heads import TreesHead
from .fitting import FitTask
from .rows import FitRows

DEPTH, TREES, RATE = 4, 150, 0.1


def fit_boosted(
    rows: FitRows, held_out: FitRows, names: Sequence[str], seed: int = 0
) -> tuple[TreesHead, dict[str, bytes]]:
    """Fit both outputs, each stopped early on held-out log loss.

    Returns:
        The head, and the boosters' UBJSON by file name, for retraining.
    """
    boosters = [
        _boost(rows, held_out, "accepted", names, seed),
        _boost(rows, held_out, "followed", names, seed),
    ]
    arrays = [flatten(booster) for booster in boosters]
    count = max(a["leaf"].shape[0] for a in arrays)
    tensors = {name: torch.stack([_padded(a[name], count) for a in arrays]) for name in arrays[0] if name != "base"}
    tensors["base"] = torch.stack([a["base"] for a in arrays])
    files = {f"{name}.ubj": bytes(b.save_raw("ubj")) for name, b in zip(("accept", "next"), boosters, strict=True)}
    return TreesHead(names, tensors), files


def fit_trees(task: FitTask) -> tuple[TreesHead, dict[str, bytes]]:
    """Fit the boosted ensembles; see `Fitter`."""
    return fit_boosted(task.rows, task.held_out, task.names, task.seed)


def _boost(rows: FitRows, held_out: FitRows, label: str, names: Sequence[str], seed: int) -> xgb.Booster:
    matrices = []
    for part in (rows, held_out):
        use = part.drawn if label == "accepted" else part.followed_known
        matrices.append(
            xgb.DMatrix(
                part.features[use].numpy(),
                getattr(part, label)[use].float().numpy(),
                feature_names=list(names),
            )
        )
    options = {
        "objective": "binary:logistic",
        "max_depth": DEPTH,
        "eta": RATE,
        "min_child_weight": 20,
        "subsample": 0.8,
        "colsample_bytree": 0.8,
        "lambda": 1.0,
        "seed": seed,
        "tree_method": "hist",
        "eval_metric": "logloss",
        "nthread": torch.get_num_threads(),
        "base_score": float(np.clip(matrices[0].get_label().mean(), 0.01, 0.99)),
    }
    booster = xgb.train(
        options,
        matrices[0],
        TREES,
        evals=[(matrices[1], "held_out")],
        early_stopping_rounds=15,
        verbose_eval=False,
    )
    return booster[: booster.best_iteration + 1]


def flatten(booster: xgb.Booster) -> dict[str, Tensor]:
    """Return a booster as `feature`, `threshold`, `missing_left` [T, 2^D - 1], `leaf` [T, 2^D], `base` []."""
    model = json.loads(bytes(booster.save_raw("json")))["learner"]
    score = model["learner_model_param"]["base_score"].strip("[]")
    trees = [_complete(tree) for tree in model["gradient_booster"]["model"]["trees"]]
    out = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    out["base"] = torch.logit(torch.tensor(float(score)))
    return out


def _complete(tree: dict[str, Any]) -> dict[str, Tensor]:
    """Return one tree as a complete one of depth D: a leaf above the bottom is repeated below itself."""
    inner = 2**DEPTH - 1
    feature = torch.zeros(inner, dtype=torch.int64)
    threshold = torch.full((inner,), float(np.finfo(np.float32).max))
    missing = torch.ones(inner, dtype=torch.bool)
    leaf = torch.zeros(inner + 1)
    at = {0: 0}  # place in the complete tree -> node of the booster's
    for place in range(2 * inner + 1):
        node = at[place]
        left, right = tree["left_children"][node], tree["right_children"][node]
        if place >= inner:
            leaf[place - inner] = tree["split_conditions"][node]
        elif left < 0:
            at[2 * place + 1] = at[2 * place + 2] = node
        else:
            feature[place] = tree["split_indices"][node]
            threshold[place] = tree["split_conditions"][node]
            missing[place] = bool(tree["default_left"][node])
            at[2 * place + 1], at[2 * place + 2] = left, right
    return {"feature": feature, "threshold": threshold, "missing_left": missing, "leaf": leaf}


def _padded(values: Tensor, count: int) -> Tensor:
    """Return `values` [T, ...] with zero trees up to `count`: a zero leaf adds nothing."""
    return torch.cat([values, values.new_zeros(count - len(values), *values.shape[1:])])
