"""Several policies that differ in a threshold as one policy whose threshold goes by stream."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from ...policies.contract import Array, StopPolicy
from ...policies.fixed import FeatureThreshold
from ...policies.host import is_trusted
from ...policies.learned import LearnedPolicy
from ...policies.published.online import Online
from ...policies.rules import Rule


def stacked(policies: Sequence[StopPolicy], streams: int) -> StopPolicy | None:
    """Return one policy for `len(policies) * streams` streams, the first `streams` under the first, and so on.

    Returns:
        None where they differ in more than thresholds.
    """
    first = policies[0]
    if not is_trusted(first):  # what decides there need not be the level
        return None
    if any(type(p) is not type(first) or p.max_depth != first.max_depth or p.first != first.first for p in policies):
        return None
    if isinstance(first, FeatureThreshold):
        return _at_levels(first, [p.level for p in policies if isinstance(p, FeatureThreshold)], streams, np.float32)
    if isinstance(first, Online):
        online = [p for p in policies if isinstance(p, Online)]
        if any((p.prior, p.decay) != (first.prior, first.decay) for p in online):
            return None
        return _at_levels(first, [p.level for p in online], streams, np.float64)
    # Subclasses decide by more than a rule's levels.
    if type(first) is LearnedPolicy:
        learned = [p for p in policies if isinstance(p, LearnedPolicy)]
        same = all(
            p.head is first.head and p.accept is first.accept and p.next is first.next and p.survival is first.survival
            for p in learned
        )
        rule = _stacked_rules([p.rule for p in learned], streams)
        return first.with_rule(rule) if same and rule is not None else None
    return None


def _at_levels(
    policy: FeatureThreshold | Online, levels: Sequence[float | Array], streams: int, dtype: type[np.floating]
) -> StopPolicy:
    """Return the policy with a level for each stream [R, 1], in the type in which it compares."""
    made = copy.copy(policy)
    made.level = np.repeat(np.array(levels, dtype=dtype), streams)[:, None]
    return made


def _stacked_rules(rules: Sequence[Rule], streams: int) -> Rule | None:
    """Return a rule with a threshold for each stream; None where they differ in more, or in the depths they have."""
    first = rules[0]
    shape = type(first), first.kind, first.scales, len(first.levels)
    if any((type(r), r.kind, r.scales, len(r.levels)) != shape for r in rules):
        return None
    rule = copy.copy(first)
    # By depth: a [1] of each policy -> [policies x streams].
    rule.levels = tuple(
        np.repeat(np.concatenate(levels), streams) for levels in zip(*(r.levels for r in rules), strict=True)
    )
    return rule
