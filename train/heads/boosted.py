"""The boosted head: one XGBoost ensemble per output, converted to flat arrays of complete binary trees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import xgboost as xgb
from scipy.special import logit

from ...policies.contract import Array
from ...policies.display import Progress
from ...policies.errors import InputError
from .base import HeadEstimator
from .rows import FitRows

TUNABLE = ("max_depth", "eta", "min_child_weight", "reg_lambda", "subsample", "colsample_bytree", "device")
PATIENCE = 15
"""Trees without a lower held-out loss after which boosting stops."""


@dataclass(eq=False, repr=False, kw_only=True)
class XGBoostEstimator(HeadEstimator):
    """Boosted trees on scalar features; `boosters_` holds those of the outputs by name.

    Args:
        max_depth, eta, min_child_weight, reg_lambda, subsample, colsample_bytree, device: see XGBoost.
        trees: maximum number for each output.
        features, random_state: see `HeadEstimator`.
    """

    max_depth: int = 4
    trees: int = 150
    eta: float = 0.1
    min_child_weight: float = 20.0
    reg_lambda: float = 1.0
    subsample: float = 0.8
    colsample_bytree: float = 0.8
    device: str = "cpu"

    form = "xgboost"

    space: ClassVar[Mapping[str, Any]] = {
        "max_depth": [2, 3, 4, 5, 6],
        "trees": [50, 100, 150, 300],
        "eta": (0.03, 0.3),
        "min_child_weight": [5, 20, 50, 200],
        "reg_lambda": (0.1, 30.0),
    }

    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        boosters = {name: self._boost(rows, stop_rows, column) for column, name in enumerate(("accept", "next"))}
        self.boosters_ = boosters
        # Both ensembles are stacked: the one with fewer trees is padded with zero trees, which add nothing.
        arrays = [flatten(booster, self.max_depth) for booster in boosters.values()]
        count = max(len(one["leaf"]) for one in arrays)
        pads = [((0, count - len(one["leaf"])), (0, 0)) for one in arrays]
        return {
            name: np.stack(
                [one[name] if name == "base" else np.pad(one[name], pad) for one, pad in zip(arrays, pads, strict=True)]
            )
            for name in arrays[0]
        }

    def _boost(self, rows: FitRows, stop_rows: FitRows, column: int) -> xgb.Booster:
        """Return the ensemble of an output, stopped early on held-out log loss."""
        names = self.feature_names_ if len(set(self.feature_names_)) == len(self.feature_names_) else None
        fitting, stopping = (
            (part.features[use].numpy(), part.labels[use, column].numpy())
            for part in (rows, stop_rows)
            for use in [part.has_label[:, column].bool()]
        )
        settings = {
            "objective": "binary:logistic",
            **{name: getattr(self, name) for name in TUNABLE},
            "seed": self.seed,
            "tree_method": "hist",
            "eval_metric": "logloss",
            "nthread": torch.get_num_threads(),  # follows the user's setting of torch
            "base_score": float(np.clip(fitting[1].mean(), 0.01, 0.99)),  # its log-odds are the head's `base`
        }
        try:
            matrices = [xgb.DMatrix(*data, feature_names=names) for data in (fitting, stopping)]
            booster = xgb.train(
                settings, matrices[0], self.trees, evals=[(matrices[1], "held_out")], early_stopping_rounds=PATIENCE,
                verbose_eval=False,
            )  # fmt: skip
        except xgb.core.XGBoostError as error:
            if self.device == "cpu":
                raise
            reason = " ".join(str(error).partition("Stack trace")[0].partition(": ")[2].split())[:200]
            raise InputError(f"--param device {self.device}: XGBoost cannot use it here: {reason}") from None
        return booster[: booster.best_iteration + 1]


def flatten(booster: xgb.Booster, depth: int) -> dict[str, Array]:
    """Return a booster as `feature`, `threshold`, `missing_left` [T, 2^D - 1], `leaf` [T, 2^D], `base` [].

    Args:
        booster: of trees that are at most as deep as `depth`.
        depth: D.
    """
    model = json.loads(bytes(booster.save_raw("json")))["learner"]
    trees = [_complete(tree, depth) for tree in model["gradient_booster"]["model"]["trees"]]
    score = float(model["learner_model_param"]["base_score"].strip("[]"))  # xgboost 3: a list of one
    arrays = {name: np.stack([tree[name] for tree in trees]) for name in trees[0]}
    return arrays | {"base": np.array(logit(score), dtype=np.float32)}


def _complete(tree: dict[str, Any], depth: int) -> dict[str, Array]:
    """Return a tree as a complete one of this depth: a leaf above the bottom is repeated below itself."""
    inner = 2**depth - 1
    feature = np.zeros(inner, dtype=np.int64)
    # Below a leaf nothing is split. Both sides hold the same leaf, so it does not matter which way a row goes.
    threshold = np.full(inner, np.finfo(np.float32).max, dtype=np.float32)
    missing = np.ones(inner, dtype=bool)
    leaf = np.zeros(inner + 1, dtype=np.float32)
    node_at = {0: 0}  # place in the complete tree -> node of the booster
    for place in range(2 * inner + 1):
        node = node_at[place]
        left, right = tree["left_children"][node], tree["right_children"][node]
        if place >= inner:
            leaf[place - inner] = tree["split_conditions"][node]  # XGBoost keeps the value of a leaf there
        elif left < 0:
            node_at[2 * place + 1] = node_at[2 * place + 2] = node
        else:
            feature[place] = tree["split_indices"][node]
            threshold[place] = tree["split_conditions"][node]
            missing[place] = bool(tree["default_left"][node])
            node_at[2 * place + 1], node_at[2 * place + 2] = left, right
    return {"feature": feature, "threshold": threshold, "missing_left": missing, "leaf": leaf}
