"""Learned policies with random heads."""

from __future__ import annotations

import copy

import numpy as np
from head_tensors import NAMES, TENSORS, knots
from specstop.policies.contract import Array
from specstop.policies.heads import build_head
from specstop.policies.heads.base import NO_HIDDEN, Head, Hidden
from specstop.policies.learned import Calibrator, LearnedPolicy, TrainingMetadata
from specstop.policies.rules import Derived, Rule

FACTS = TrainingMetadata(
    0.7, "match", "match", {"target": "ab"}, 52.5, (0.8, 0.75), {"kind": "profile"}, {"seed": 1}, {"gain": 0.25}
)


class Certain(Head):
    """A head with one logit for every token."""

    kind = "certain"

    def __init__(self, logit: float) -> None:
        self.logit, self._tensors = logit, {}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        return np.full((len(features), 2), self.logit)


def with_head(policy: LearnedPolicy, head: Head) -> LearnedPolicy:
    changed = copy.copy(policy)
    changed.head = head
    return changed


def learned(kind: str = "logistic", rule: Rule | None = None) -> LearnedPolicy:
    head = build_head(kind, NAMES, TENSORS[kind])
    maps = Calibrator("isotonic", knots=knots()), Calibrator("temperature", 1.5)
    return LearnedPolicy("mine", NAMES, head, *maps, rule or Derived([0.1, 0.2, 0.3, 0.2]), 4, FACTS)
