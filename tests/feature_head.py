"""A head with features as outputs, for the decisions of rules on known probabilities; ranges of a head's features."""

from __future__ import annotations

import numpy as np
from specstop.policies.contract import Array, DraftStep
from specstop.policies.heads.base import NO_HIDDEN, Head, Hidden
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.rules import Rule

EXACT = Calibrator("isotonic", knots=np.array([[0.0, 1.0], [0.0, 1.0]], dtype=np.float32))
"""The identity on probabilities."""


class FeatureHead(Head):
    """Its two features are accept and next."""

    kind = "features"

    def __init__(self) -> None:
        self._tensors = {}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        return features.astype(np.float64)


def biased(chance: np.ndarray, weight: float) -> np.ndarray:
    """Return p' = a / (a + w (1 - a)), the output of a head trained with rejection weight w at a true chance of a."""
    return chance / (chance + weight * (1.0 - chance))


def feature_policy(rule: Rule, max_depth: int = 10) -> LearnedPolicy:
    """Return a policy that reads accept and next of each branch as its features."""
    return LearnedPolicy("features", ("top1", "top2"), FeatureHead(), EXACT, EXACT, rule, max_depth)


def kept_by(rule: Rule, depth: int, before: Array, accept: Array, next_: Array) -> Array:
    """Return [S, B] bool, which branches of a depth a rule keeps, from [S, B] survival before it, accept and next."""
    parent = np.tile(np.arange(before.shape[1]), (len(before), 1))
    features = np.stack([accept, next_], -1).astype(np.float32)
    step = DraftStep(depth, np.ones(before.shape, dtype=bool), parent, features, {}, np.arange(len(before)))
    return feature_policy(rule).survive(step, before)[1]


def with_ranges(tensors: dict[str, Array], low: Array, high: Array) -> dict[str, Array]:
    """Return the tensors of a head with ranges [F]; NaN or infinite = no bound."""
    most = float(np.finfo(np.float32).max)
    sides = ((low, -most), (high, most))
    low, high = (np.nan_to_num(side, nan=end).clip(-most, most).astype(np.float32) for side, end in sides)
    return {**tensors, "low": low, "high": high}
