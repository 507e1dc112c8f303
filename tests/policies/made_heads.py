"""Small heads of every kind, some of them on hidden states, each with its scalar features."""

from __future__ import annotations

import itertools

import torch
from specstop.policies.heads import build_head
from specstop.policies.heads_base import Head
from specstop.policies.heads_dynasd import HARD_FEATURES
from test_heads import NAMES, TENSORS, WIDTH, draw
from torch import Tensor

DRAFT, TARGET = 5, 7
"""Widths of the hidden states."""

Made = tuple[str, tuple[str, ...], dict[str, Tensor]]


def resnet(names: tuple[str, ...], hidden: dict[str, int], blocks: int = 2, width: int = 6) -> Made:
    """Return a residual head on these scalars (all of them or none) and hidden states."""
    columns = WIDTH if names else 0
    tensors = {
        "mean": draw(columns, seed=31),
        "scale": draw(columns, seed=32).abs() + 0.2,
        "enter.weight": draw(width, columns + 1, seed=33),
        "enter.bias": draw(width, seed=34),
        "block.weight": 0.3 * draw(blocks, width, width, seed=35),
        "block.bias": draw(blocks, width, seed=36),
        "leave.weight": 0.3 * draw(2, width, seed=37),
        "leave.bias": draw(2, seed=38),
    }
    for at, (name, size) in enumerate(hidden.items()):
        tensors |= {
            f"enter.{name}": 0.3 * draw(width, size, seed=40 + at),
            f"mean.{name}": draw(size, seed=50 + at),
            f"scale.{name}": draw(size, seed=60 + at).abs() + 0.2,
        }
    return "resnet", names, tensors


def layers(sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Return linear layers of these widths, and `first`."""
    tensors = {"first": torch.tensor([0.3])}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        tensors |= {f"weight.{i}": 0.5 * draw(outputs, inputs, seed=70 + i), f"bias.{i}": draw(outputs, seed=80 + i)}
    return tensors


def specdec(order: tuple[int, ...] = (0, 1, 2), size: int = DRAFT) -> Made:
    """Return SpecDec++'s head with these blocks in this order."""
    count = len(set(order))
    tensors = {
        "block.weight": 0.3 * draw(count, size, size, seed=90),
        "block.bias": draw(count, size, seed=91),
        "order": torch.tensor(order, dtype=torch.int64),
        "leave.weight": 0.4 * draw(2, size, seed=92),
        "leave.bias": draw(2, seed=93),
        "first": torch.tensor([-0.2]),
    }
    return "specdec", (), tensors


MADE: dict[str, Made] = {
    **{kind: (kind, NAMES, make()) for kind, make in TENSORS.items()},
    "resnet of the draft": resnet((), {"draft_hidden": DRAFT}),
    "resnet of both": resnet(NAMES, {"draft_hidden": DRAFT, "target_hidden": TARGET}),
    "dynasd-soft": ("dynasd-soft", (), layers((DRAFT, 6, 4, 1))),
    "dynasd-hard": ("dynasd-hard", HARD_FEATURES, layers((11, 9, 1))),
    "specdec": specdec(),
    "specdec as published": specdec((0, 0, 0)),
}
"""Kind, scalar features and tensors by a name."""


def made_head(name: str) -> tuple[tuple[str, ...], Head]:
    """Return the scalar features and the head called `name`."""
    kind, names, tensors = MADE[name]
    return names, build_head(kind, names, tensors)
