"""Small heads of every kind, some of them on hidden states, each with its scalar features."""

from __future__ import annotations

import itertools

import numpy as np
from head_tensors import NAMES, TENSORS, WIDTH, Array, draw
from specstop.policies.heads import build_head
from specstop.policies.heads.base import Head
from specstop.policies.heads.layers import HARD_FEATURES
from token_tensors import NAMES as TOKEN_NAMES, tensors as token_tensors

DRAFT, TARGET = 5, 7
"""Widths of the hidden states."""

HALF, SMALL = np.float32(0.5), np.float32(0.3)

HeadTensors = tuple[str, tuple[str, ...], dict[str, Array]]


def resnet(names: tuple[str, ...], hidden: dict[str, int], blocks: int = 2, width: int = 6) -> HeadTensors:
    """Return a residual head on these scalars (all of them or none) and hidden states."""
    columns = WIDTH if names else 0
    tensors = {
        "mean": draw(columns, seed=31),
        "scale": np.abs(draw(columns, seed=32)) + HALF,
        "enter.weight": draw(width, columns + 1, seed=33),
        "enter.bias": draw(width, seed=34),
        "block.weight": SMALL * draw(blocks, width, width, seed=35),
        "block.bias": draw(blocks, width, seed=36),
        "leave.weight": SMALL * draw(2, width, seed=37),
        "leave.bias": draw(2, seed=38),
    }
    for at, (name, size) in enumerate(hidden.items()):
        tensors |= {
            f"enter.{name}": SMALL * draw(width, size, seed=40 + at),
            f"mean.{name}": draw(size, seed=50 + at),
            f"scale.{name}": np.abs(draw(size, seed=60 + at)) + HALF,
        }
    return "resnet", names, tensors


def layers(sizes: tuple[int, ...]) -> dict[str, Array]:
    """Return linear layers of these widths, and `first`."""
    tensors = {"first": np.array([0.3], dtype=np.float32)}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        tensors |= {f"weight.{i}": HALF * draw(outputs, inputs, seed=70 + i), f"bias.{i}": draw(outputs, seed=80 + i)}
    return tensors


def specdec(order: tuple[int, ...] = (0, 1, 2), size: int = DRAFT) -> HeadTensors:
    """Return SpecDec++'s head with these blocks in this order."""
    count = len(set(order))
    tensors = {
        "block.weight": SMALL * draw(count, size, size, seed=90),
        "block.bias": draw(count, size, seed=91),
        "order": np.array(order, dtype=np.int64),
        "leave.weight": SMALL * draw(2, size, seed=92),
        "leave.bias": draw(2, seed=93),
        "first": np.array([-0.2], dtype=np.float32),
    }
    return "specdec", (), tensors


RANDOM_HEADS: dict[str, HeadTensors] = {
    **{kind: (kind, NAMES, make()) for kind, make in TENSORS.items()},
    "tokens": ("tokens", TOKEN_NAMES, token_tensors()),
    "resnet of the draft": resnet((), {"draft_hidden": DRAFT}),
    "resnet of both": resnet(NAMES, {"draft_hidden": DRAFT, "target_hidden": TARGET}),
    "dynasd-soft": ("dynasd-soft", (), layers((DRAFT, 6, 4, 1))),
    "dynasd-hard": ("dynasd-hard", HARD_FEATURES, layers((11, 9, 1))),
    "specdec": specdec(),
    "specdec as published": specdec((0, 0, 0)),
}
"""Kind, scalar features and tensors by a name."""


def random_head(name: str) -> tuple[tuple[str, ...], Head]:
    """Return the scalar features and the head called `name`."""
    kind, names, tensors = RANDOM_HEADS[name]
    return names, build_head(kind, names, tensors)
