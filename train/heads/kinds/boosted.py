"""The boosted head: one XGBoost ensemble per output, turned into flat arrays of complete binary trees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xgboost as xgb
from scipy.special import logit

from ....policies.contract import Array
from ....policies.errors import InputError
from ....policies.heads.tables import TreesHead
from ..exported import exported
from ..fitting import FitTask
from ..matrices import OUT_OF_CORE, matrices

DEPTH, TREES, RATE = 4, 150, 0.1
TUNABLE = ("max_depth", "trees", "eta", "min_child_weight", "lambda", "subsample", "colsample_bytree")


def fit_trees(task: FitTask) -> tuple[TreesHead, dict[str, bytes]]:
    """Fit both outputs, each stopped early on held-out log loss; see `Fitter`.

    Options: `device`, `out_of_core`, and `params`: those of `TUNABLE`. The files are the boosters' UBJSON.

    Raises:
        InputError: XGBoost cannot use the device.
    """
    boosters = [_boost(task, label) for label in ("accepted", "followed")]
    arrays = [flatten(booster) for booster in boosters]
    # Both ensembles are stacked: one depth and one number of trees, the smaller one padded.
    deepest = max(depth_of(a) for a in arrays)
    arrays = [flatten(booster, deepest) for booster in boosters]
    count = max(a["leaf"].shape[0] for a in arrays)
    tensors = {name: np.stack([_padded(a[name], count) for a in arrays]) for name in arrays[0] if name != "base"}
    tensors["base"] = np.stack([a["base"] for a in arrays])
    files = {f"{name}.ubj": bytes(b.save_raw("ubj")) for name, b in zip(("accept", "next"), boosters, strict=True)}
    return TreesHead(task.names, exported(tensors, task.names, task.rows)), files


def _boost(task: FitTask, label: str) -> xgb.Booster:
    rows, options = task.rows, task.options
    share = float(rows.label(label)[rows.has(label)].float().mean())
    params = {name: value for name, value in options.params.items() if name in TUNABLE}
    trees = int(params.pop("trees", TREES))
    settings = {
        "objective": "binary:logistic",
        "max_depth": DEPTH,
        "eta": RATE,
        "min_child_weight": 20,
        "subsample": 0.8,
        "colsample_bytree": 0.8,
        "lambda": 1.0,
        "seed": task.seed,
        "tree_method": "hist",
        "eval_metric": "logloss",
        "nthread": torch.get_num_threads(),  # what the user has told torch
        "base_score": float(np.clip(share, 0.01, 0.99)),  # its log-odds are the head's `base`
        "device": options.device,
        **params,
    }
    outside = len(rows) >= OUT_OF_CORE if options.out_of_core is None else options.out_of_core
    try:
        with matrices((rows, task.held_out), label, task.names, outside) as (fitting, stopping):
            booster = xgb.train(
                settings,
                fitting,
                trees,
                evals=[(stopping, "held_out")],
                early_stopping_rounds=15,
                verbose_eval=False,
            )
    except xgb.core.XGBoostError as error:
        if options.device == "cpu":
            raise
        said = str(error).strip().splitlines()[-1]
        raise InputError(f"--device {options.device}: XGBoost cannot use it here: {said[:200]}") from None
    return booster[: booster.best_iteration + 1]  # training went on past the best round to know it


def depth_of(arrays: Mapping[str, Array]) -> int:
    """Return D of a flattened booster."""
    return int(arrays["leaf"].shape[-1]).bit_length() - 1


def flatten(booster: xgb.Booster, depth: int | None = None) -> dict[str, Array]:
    """Return a booster as `feature`, `threshold`, `missing_left` [T, 2^D - 1], `leaf` [T, 2^D], `base` [].

    D is `depth`, or that of the deepest tree.
    """
    model = json.loads(bytes(booster.save_raw("json")))["learner"]
    score = model["learner_model_param"]["base_score"].strip("[]")  # newer XGBoost: a list of one
    raw = model["gradient_booster"]["model"]["trees"]
    depth = max(1, *map(_deepest, raw)) if depth is None else depth
    trees = [_complete(tree, depth) for tree in raw]
    out = {name: np.stack([tree[name] for tree in trees]) for name in trees[0]}
    out["base"] = np.array(logit(float(score)), dtype=np.float32)
    return out


def _deepest(tree: dict[str, Any]) -> int:
    """Return the depth of a tree; nodes come after their parents."""
    depth = [0] * len(tree["left_children"])
    for node, (left, right) in enumerate(zip(tree["left_children"], tree["right_children"], strict=True)):
        if left >= 0:
            depth[left] = depth[right] = depth[node] + 1
    return max(depth)


def _complete(tree: dict[str, Any], depth: int) -> dict[str, Array]:
    """Return one tree as a complete one of this depth: a leaf above the bottom is repeated below itself."""
    inner = 2**depth - 1
    feature = np.zeros(inner, dtype=np.int64)
    # Below a leaf nothing is split, and both sides hold the same leaf: which way a row goes does not matter.
    threshold = np.full(inner, np.finfo(np.float32).max, dtype=np.float32)
    missing = np.ones(inner, dtype=bool)
    leaf = np.zeros(inner + 1, dtype=np.float32)
    at = {0: 0}  # place in the complete tree -> node of the booster's
    for place in range(2 * inner + 1):
        node = at[place]
        left, right = tree["left_children"][node], tree["right_children"][node]
        if place >= inner:
            leaf[place - inner] = tree["split_conditions"][node]  # of a leaf, XGBoost keeps its value there
        elif left < 0:
            at[2 * place + 1] = at[2 * place + 2] = node
        else:
            feature[place] = tree["split_indices"][node]
            threshold[place] = tree["split_conditions"][node]
            missing[place] = bool(tree["default_left"][node])
            at[2 * place + 1], at[2 * place + 2] = left, right
    return {"feature": feature, "threshold": threshold, "missing_left": missing, "leaf": leaf}


def _padded(values: Array, count: int) -> Array:
    """Return `values` [T, ...] with zero trees up to `count`: a zero leaf adds nothing."""
    return np.concatenate([values, np.zeros((count - len(values), *values.shape[1:]), dtype=values.dtype)])
