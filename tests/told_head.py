"""A head that says what its features say: what a rule makes of given probabilities."""

from __future__ import annotations

import numpy as np
from specstop.policies.contract import Array, DraftStep
from specstop.policies.heads.base import NO_HIDDEN, Head, Hidden
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.rules import Rule

EXACT = Calibrator("isotonic", knots=np.array([[0.0, 1.0], [0.0, 1.0]], dtype=np.float32))
"""Leaves probabilities as they are."""


class ToldHead(Head):
    """Its two features are accept and next."""

    kind = "told"

    def __init__(self) -> None:
        self._tensors = {}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        return features.astype(np.float64)


def biased(chance: np.ndarray, weight: float) -> np.ndarray:
    """Return p' = a / (a + w (1 - a)), what a head trained with weight w says where the true chance is a."""
    return chance / (chance + weight * (1.0 - chance))


def told_policy(rule: Rule, max_depth: int = 10) -> LearnedPolicy:
    """Return a policy that is told accept and next of each branch as its features."""
    return LearnedPolicy("told", ("top1", "top2"), ToldHead(), EXACT, EXACT, rule, max_depth)


def kept_by(rule: Rule, depth: int, before: Array, accept: Array, next_: Array) -> Array:
    """Return [S, B] bool, which branches a rule keeps.

    Args:
        rule: asked.
        depth: of the branches.
        before: [S, B] survival of the depth before, each branch's own.
        accept, next_: [S, B] in single precision.
    """
    parent = np.tile(np.arange(before.shape[1]), (len(before), 1))
    features = np.stack([accept, next_], -1).astype(np.float32)
    step = DraftStep(depth, np.ones(before.shape, dtype=bool), parent, features, {}, np.arange(len(before)))
    return told_policy(rule).survive(step, before)[1]
