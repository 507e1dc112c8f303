"""Small heads of every kind with random weights, random rows for them, and policies of these heads."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
from specstop.policies.contract import DraftStep
from specstop.policies.heads import build_head
from specstop.policies.heads.base import NO_HIDDEN, Head, Hidden
from specstop.policies.heads.layers import HARD_FEATURES
from specstop.policies.learned import Calibrator, LearnedPolicy, TrainingMetadata
from specstop.policies.rules import Derived, Rule, Threshold

Array = np.ndarray[Any, Any]
HeadTensors = tuple[str, tuple[str, ...], dict[str, Array]]

NAMES = ("entropy", "top1", "anchor_top1", "mean_accepted", "mean_full")  # two PRE, one ANCHOR, two HISTORY
PROBABILITIES = [1, 2, 4]
WIDTH = len(NAMES) + len(PROBABILITIES)
LOW = np.array([0.5, 0.2, 0.3, 0.4, 0.1], dtype=np.float32)
HIGH = np.array([1.0, 0.8, 0.9, 0.7, 0.6], dtype=np.float32)
"""Ranges of the features."""

DRAFT, TARGET = 5, 7
"""Widths of the hidden states."""

TOKEN_NAMES = ("anchor_token", "entropy", "drawn_token", "above_token")
TOKENS, BUCKETS = 9, 7
"""Tokens with a weight, and size of the hash tables of the token head."""

STRIDES = [[0, 0, 1, 5, 0], [3, 0, 1, 0, 2], [0, 4, 1, 0, 0]]
"""Parent and drawn token; anchor, drawn token and depth; drawn token and the range of the entropy."""


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def zeros(*shape: int) -> Array:
    return np.zeros(shape, dtype=np.float32)


def features(*shape: int, seed: int = 5) -> Array:
    values = np.abs(draw(*shape, len(NAMES), seed=seed))
    values[..., PROBABILITIES] = values[..., PROBABILITIES].clip(0, 2) / 2
    return values


def knots(seed: int = 0, n: int = 7) -> Array:
    levels = np.random.default_rng(seed).random(n, dtype=np.float32)
    return np.stack([np.sort(draw(n, seed=seed)) * 3, np.sort(levels)])


def fill(shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Return random float32 tensors of these shapes; those called scale are positive."""
    tensors = {name: 0.5 * draw(*shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}
    return {name: np.abs(t) + np.float32(0.2) if name.startswith("scale") else t for name, t in tensors.items()}


def layers(*sizes: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of linear layers of these widths."""
    weights = {f"weight.{i}": (n, m) for i, (m, n) in enumerate(itertools.pairwise(sizes))}
    return weights | {f"bias.{i}": (n,) for i, n in enumerate(sizes[1:])}


def trees(count: int = 5, depth: int = 3) -> dict[str, Array]:
    inner, rng = 2**depth - 1, np.random.default_rng(4)
    return {
        "feature": rng.integers(0, len(NAMES), (2, count, inner)),
        "threshold": rng.random((2, count, inner), dtype=np.float32),
        "missing_left": rng.random((2, count, inner)) < 0.5,
        **fill({"leaf": (2, count, 2**depth), "base": (2,)}),
    }


def residual(columns: int = WIDTH, **hidden: int) -> dict[str, Array]:
    """Return a residual head on this number of scalars and log-odds, and on hidden states of these sizes."""
    blocks = {"block.weight": (2, 6, 6), "block.bias": (2, 6), "leave.weight": (2, 6), "leave.bias": (2,)}
    shapes = {"mean": (columns,), "scale": (columns,), "enter.weight": (6, columns + 1), "enter.bias": (6,), **blocks}
    for name, size in hidden.items():
        shapes |= {f"enter.{name}": (6, size), f"mean.{name}": (size,), f"scale.{name}": (size,)}
    return fill(shapes)


def specdec(*order: int, size: int = DRAFT) -> dict[str, Array]:
    """Return SpecDec++'s head with these blocks in this order."""
    count = len(set(order))
    shapes = {"block.weight": (count, size, size), "block.bias": (count, size)}
    shapes |= {"leave.weight": (2, size), "leave.bias": (2,), "first": (1,)}
    return {**fill(shapes), "order": np.array(order, dtype=np.int64)}


def token_tensors() -> dict[str, Array]:
    shapes = {"weight": (3, 1), "bias": (2, 4), "table": (2, 3, TOKENS), "hashed": (2, len(STRIDES), BUCKETS)}
    scalar = {"mean": [0.5], "scale": [2.0], "edges": [[0.25, 0.5]]}
    exact = {name: np.array(values, dtype=np.float32) for name, values in scalar.items()}
    return {**fill(shapes), **exact, "strides": np.array(STRIDES)}


BASIS = {"mean": (WIDTH,), "scale": (WIDTH,)}
TENSORS = {
    "logistic": fill({**BASIS, "weight": (3, WIDTH), "bias": (3,)}),
    "mlp": fill({**BASIS, **layers(WIDTH + 1, 6, 4, 2)}),
    "xgboost": trees(),
    "resnet": residual(),
}
"""Tensors of the kinds that accept any scalar features."""

RANDOM_HEADS: dict[str, HeadTensors] = {
    **{kind: (kind, NAMES, tensors) for kind, tensors in TENSORS.items()},
    "xgboost without trees": ("xgboost", NAMES, trees(0, 3)),
    "xgboost without splits": ("xgboost", NAMES, trees(7, 0)),
    "tokens": ("tokens", TOKEN_NAMES, token_tensors()),
    "resnet of the draft": ("resnet", (), residual(0, draft_hidden=DRAFT)),
    "resnet of both": ("resnet", NAMES, residual(draft_hidden=DRAFT, target_hidden=TARGET)),
    "dynasd-soft": ("dynasd-soft", (), fill({**layers(DRAFT, 6, 4, 1), "first": (1,)})),
    "dynasd-hard": ("dynasd-hard", HARD_FEATURES, fill({**layers(11, 9, 1), "first": (1,)})),
    "specdec": ("specdec", (), specdec(0, 1, 2)),
    "specdec as published": ("specdec", (), specdec(0, 0, 0)),
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


def random_policy(
    name: str, rule: Rule | None = None, max_depth: int = 5, metadata: TrainingMetadata | None = None
) -> LearnedPolicy:
    """Return a policy of the head called `name`."""
    names, head = random_head(name)
    maps = Calibrator("isotonic", knots=knots()), Calibrator("temperature", 1.5)
    rule = rule or RULES.get(name, Derived([0.1, 0.2, 0.3, 0.2]))
    return LearnedPolicy("mine", names, head, *maps, rule, max_depth, metadata or TrainingMetadata())


FACTS = TrainingMetadata(
    0.7, "match", "match", {"target": "ab"}, 52.5, (0.8, 0.75), {"kind": "profile"}, {"seed": 1}, {"gain": 0.25}
)


def learned(kind: str = "logistic", rule: Rule | None = None) -> LearnedPolicy:
    """Return a policy with all metadata."""
    return random_policy(kind, rule or Derived([0.1, 0.2, 0.3, 0.2]), 4, FACTS)


def with_head(policy: LearnedPolicy, head: Head) -> LearnedPolicy:
    changed = copy.copy(policy)
    changed.head = head
    return changed


class Certain(Head):
    """A head with one logit for every token."""

    kind = "certain"

    def __init__(self, logit: float) -> None:
        self.logit, self._tensors = logit, {}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        return np.full((len(features), 2), self.logit)


class FeatureHead(Head):
    """Its two features are accept and next."""

    kind = "features"

    def __init__(self) -> None:
        self._tensors = {}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        return features.astype(np.float64)


def feature_policy(rule: Rule, max_depth: int = 10) -> LearnedPolicy:
    """Return a policy that reads accept and next of each branch as its features."""
    exact = Calibrator("isotonic", knots=np.array([[0.0, 1.0], [0.0, 1.0]], dtype=np.float32))
    return LearnedPolicy("features", ("top1", "top2"), FeatureHead(), exact, exact, rule, max_depth)


def kept_by(rule: Rule, depth: int, before: Array, accept: Array, next_: Array) -> Array:
    """Return [S, B] bool, which branches of a depth a rule keeps, from [S, B] survival before it, accept and next."""
    parent = np.tile(np.arange(before.shape[1]), (len(before), 1))
    features = np.stack([accept, next_], -1).astype(np.float32)
    step = DraftStep(depth, np.ones(before.shape, dtype=bool), parent, features, {}, np.arange(len(before)))
    return feature_policy(rule).survive(step, before)[1]


def scalars(names: tuple[str, ...], count: int, seed: int = 5) -> Array:
    """Return random rows of scalar features. Token ids beyond the table and -1 are among them."""
    if names != TOKEN_NAMES:
        return features(count, seed=seed) if names == NAMES else np.abs(draw(count, len(names), seed=seed))
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, TOKENS + 3, (count, 3)).astype(np.float32)
    entropy = rng.choice(np.array([0.25, 0.5, *rng.random(9)], dtype=np.float32), count)  # includes both edges
    return np.stack([ids[:, 0], entropy, ids[:, 1], ids[:, 2]], 1)


def hidden_states(name: str, *shape: int, seed: int = 3) -> dict[str, Array]:
    """Return random hidden states for the head called `name`."""
    return {state: draw(*shape, size, seed=seed + size) for state, size in random_head(name)[1].sizes.items()}
