"""Random tensors of heads on scalar features, and a slow reference of their inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from specstop.policies.features import FEATURES, Kind

Array = np.ndarray[Any, Any]
NAMES = ("entropy", "top1", "anchor_top1", "mean_accepted", "mean_full")  # two PRE, one ANCHOR, two HISTORY
PROBABILITIES = [1, 2, 4]
WIDTH = len(NAMES) + len(PROBABILITIES)
NEAR = 1e-4  # float32 weights that are folded, and log-odds of float32 probabilities


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def zeros(*shape: int) -> Array:
    return np.zeros(shape, dtype=np.float32)


def features(*shape: int, seed: int = 5) -> Array:
    values = np.abs(draw(*shape, len(NAMES), seed=seed))
    values[..., PROBABILITIES] = values[..., PROBABILITIES].clip(0, 2) / 2
    return values


def basis_tensors() -> dict[str, Array]:
    return {"mean": draw(WIDTH), "scale": np.abs(draw(WIDTH, seed=1)) + np.float32(0.2)}


def linear_tensors() -> dict[str, Array]:
    return {**basis_tensors(), "weight": draw(3, WIDTH, seed=2), "bias": draw(3, seed=3)}


def mlp_tensors() -> dict[str, Array]:
    sizes = [(6, WIDTH + 1), (4, 6), (2, 4)]
    layers = {f"weight.{i}": draw(*s, seed=10 + i) for i, s in enumerate(sizes)}
    return {**basis_tensors(), **layers, **{f"bias.{i}": draw(s[0], seed=20 + i) for i, s in enumerate(sizes)}}


def trees_tensors(trees: int = 5, depth: int = 3) -> dict[str, Array]:
    inner, rng = 2**depth - 1, np.random.default_rng(4)
    return {
        "feature": rng.integers(0, len(NAMES), (2, trees, inner)),
        "threshold": rng.random((2, trees, inner), dtype=np.float32),
        "missing_left": rng.random((2, trees, inner)) < 0.5,
        "leaf": draw(2, trees, 2**depth), "base": draw(2, seed=9),
    }  # fmt: skip


def resnet_tensors(blocks: int = 2, width: int = 6) -> dict[str, Array]:
    return {
        **basis_tensors(), "enter.weight": draw(width, WIDTH + 1, seed=33), "enter.bias": draw(width, seed=34),
        "block.weight": np.float32(0.5) * draw(blocks, width, width, seed=35), "block.bias": draw(blocks, width, seed=36),
        "leave.weight": np.float32(0.2) * draw(2, width, seed=37), "leave.bias": draw(2, seed=38),
    }  # fmt: skip


TENSORS = {"logistic": linear_tensors, "mlp": mlp_tensors, "xgboost": trees_tensors, "resnet": resnet_tensors}
"""Kinds that accept any scalar features."""


def slow_basis(x: Array, depth: int, tensors: dict[str, Array]) -> Array:
    """Return standardised features and log-odds; at depth 0 those that exist before drafting, 0 for the others."""
    exists = [FEATURES[n].kind in (Kind.ANCHOR, Kind.HISTORY) or depth > 0 for n in NAMES]
    edge = float(np.float32(1) - np.float32(1e-6))
    probs = [min(max(float(x[i]), 1e-6), edge) for i in PROBABILITIES]
    columns = [*x, *(math.log(p / (1 - p)) for p in probs)]
    scaled = (np.array(columns) - tensors["mean"]) / tensors["scale"]
    return scaled * [*exists, *(exists[i] for i in PROBABILITIES)]


def knots(seed: int = 0, n: int = 7) -> Array:
    levels = np.random.default_rng(seed).random(n, dtype=np.float32)
    return np.stack([np.sort(draw(n, seed=seed)) * 3, np.sort(levels)])


LOW = np.array([0.5, 0.2, 0.3, 0.4, 0.1], dtype=np.float32)
HIGH = np.array([1.0, 0.8, 0.9, 0.7, 0.6], dtype=np.float32)
"""Ranges of the features."""
