"""Random tensors of the token head, and rows for it."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
NAMES = ("anchor_token", "entropy", "drawn_token", "above_token")
WIDTH, SIZE = 9, 7
STRIDES = [[0, 0, 1, 5, 0], [3, 0, 1, 0, 2], [0, 4, 1, 0, 0]]
"""Of what is above and drawn; of the anchor, what is drawn and the depth; of what is drawn and the range of the entropy."""


def tensors() -> dict[str, Array]:
    chance = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return chance.standard_normal(shape).astype(np.float32)

    return {
        "mean": np.array([0.5], dtype=np.float32),
        "scale": np.array([2.0], dtype=np.float32),
        "weight": draw(3, 1),
        "bias": draw(2, 4),
        "table": draw(2, 3, WIDTH),
        "strides": np.array(STRIDES),
        "edges": np.array([[0.25, 0.5]], dtype=np.float32),
        "hashed": draw(2, len(STRIDES), SIZE),
    }


def rows(count: int) -> Array:
    chance = np.random.default_rng(1)
    ids = chance.integers(-1, WIDTH + 3, (count, 3)).astype(np.float32)  # none before the first, some beyond the table
    return np.stack([ids[:, 0], chance.random(count, dtype=np.float32), ids[:, 1], ids[:, 2]], 1)
