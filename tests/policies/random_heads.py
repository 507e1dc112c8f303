"""Small heads of every kind with random weights, their scalar features, hidden states and rules."""

from __future__ import annotations

import itertools

import numpy as np
from head_tensors import NAMES, TENSORS, WIDTH, Array, draw, features, knots
from specstop.policies.heads import build_head
from specstop.policies.heads.base import Head
from specstop.policies.heads.layers import HARD_FEATURES
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.rules import Derived, Rule, Threshold

DRAFT, TARGET = 5, 7
"""Widths of the hidden states."""

HALF, SMALL = np.float32(0.5), np.float32(0.3)
TOKEN_NAMES = ("anchor_token", "entropy", "drawn_token", "above_token")
TOKENS, BUCKETS = 9, 7
"""Tokens with a weight, and size of the hash tables of the token head."""

STRIDES = [[0, 0, 1, 5, 0], [3, 0, 1, 0, 2], [0, 4, 1, 0, 0]]
"""Parent and drawn token; anchor, drawn token and depth; drawn token and the range of the entropy."""

HeadTensors = tuple[str, tuple[str, ...], dict[str, Array]]


def resnet(names: tuple[str, ...], hidden: dict[str, int], blocks: int = 2, width: int = 6) -> HeadTensors:
    """Return a residual head on these scalars (all of them or none) and hidden states."""
    columns = WIDTH if names else 0
    tensors = {
        "mean": draw(columns, seed=31), "scale": np.abs(draw(columns, seed=32)) + HALF,
        "enter.weight": draw(width, columns + 1, seed=33), "enter.bias": draw(width, seed=34),
        "block.weight": SMALL * draw(blocks, width, width, seed=35), "block.bias": draw(blocks, width, seed=36),
        "leave.weight": SMALL * draw(2, width, seed=37), "leave.bias": draw(2, seed=38),
    }  # fmt: skip
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
        "block.weight": SMALL * draw(count, size, size, seed=90), "block.bias": draw(count, size, seed=91),
        "order": np.array(order, dtype=np.int64), "leave.weight": SMALL * draw(2, size, seed=92),
        "leave.bias": draw(2, seed=93), "first": np.array([-0.2], dtype=np.float32),
    }  # fmt: skip
    return "specdec", (), tensors


def token_tensors() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"weight": (3, 1), "bias": (2, 4), "table": (2, 3, TOKENS), "hashed": (2, len(STRIDES), BUCKETS)}
    scalar = {"mean": [0.5], "scale": [2.0], "edges": [[0.25, 0.5]]}
    return {
        **{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
        **{name: np.array(values, dtype=np.float32) for name, values in scalar.items()},
        "strides": np.array(STRIDES),
    }


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
"""Kind, scalar features and tensors by name."""

RULES: dict[str, Rule] = {
    "mlp": Threshold("survival", 0.2), "specdec": Threshold("survival", 0.1), "xgboost": Threshold("step", 0.4),
    "dynasd-soft": Threshold("any", 0.4), "dynasd-hard": Threshold("any", 0.4), "resnet": Derived([0.1, 0.2], 1),
}  # fmt: skip


def random_head(name: str) -> tuple[tuple[str, ...], Head]:
    """Return the scalar features and the head called `name`."""
    kind, names, tensors = RANDOM_HEADS[name]
    return names, build_head(kind, names, tensors)


def random_policy(name: str, rule: Rule | None = None) -> LearnedPolicy:
    """Return a policy of the head called `name`."""
    names, head = random_head(name)
    maps = Calibrator("isotonic", knots=knots()), Calibrator("temperature", 1.5)
    return LearnedPolicy("mine", names, head, *maps, rule or RULES.get(name, Derived([0.1, 0.2, 0.3, 0.2])), 5)


def scalars(names: tuple[str, ...], count: int, seed: int = 5) -> Array:
    """Return random rows of scalar features: ids of tokens beyond the table, and -1, are among them."""
    if names != TOKEN_NAMES:
        return features(count, seed=seed) if names == NAMES else np.abs(draw(count, len(names), seed=seed))
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, TOKENS + 3, (count, 3)).astype(np.float32)
    entropy = rng.choice(np.array([0.25, 0.5, *rng.random(9)], dtype=np.float32), count)  # both edges too
    return np.stack([ids[:, 0], entropy, ids[:, 1], ids[:, 2]], 1)


def hidden_states(name: str, *shape: int, seed: int = 3) -> dict[str, Array]:
    """Return random hidden states for the head called `name`."""
    return {state: draw(*shape, size, seed=seed + size) for state, size in random_head(name)[1].sizes.items()}
