"""Several policies that differ in a threshold as one policy whose threshold goes by stream."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...policies.baselines import Confidence
from ...policies.baselines_online import Online
from ...policies.contract import StopPolicy
from ...policies.learned import LearnedPolicy
from ...policies.rules import Derived, Rule, Threshold


def stacked(policies: Sequence[StopPolicy], streams: int) -> StopPolicy | None:
    """Return one policy for `len(policies) * streams` streams, the first `streams` under the first, and so on.

    Returns:
        None where they differ in more than thresholds.
    """
    first = policies[0]
    if any(type(p) is not type(first) or p.max_depth != first.max_depth or p.first != first.first for p in policies):
        return None
    if type(first) is Confidence:
        made = copy.copy(first)
        made.threshold = _by_stream([p.threshold for p in policies], streams)  # type: ignore[attr-defined,assignment]
        return made
    if type(first) is Online:
        online = [p for p in policies if isinstance(p, Online)]
        if any((p.prior, p.decay) != (first.prior, first.decay) for p in online):
            return None
        learning: Any = copy.copy(first)
        learning.threshold = _by_stream([p.threshold for p in online], streams, torch.float64)
        policy: StopPolicy = learning
        return policy
    if type(first) is LearnedPolicy:
        learned = [p for p in policies if isinstance(p, LearnedPolicy)]
        same = all(
            p.head is first.head
            and p.accept is first.accept
            and p.following is first.following
            and p.survival is first.survival
            for p in learned
        )
        rule = _stacked_rules([p.rule for p in learned], streams)
        return first.with_rule(rule) if same and rule is not None else None
    return None


def _stacked_rules(rules: Sequence[Rule], streams: int) -> Rule | None:
    first = rules[0]
    rule: Rule
    if any(type(r) is not type(first) or r.kind != first.kind for r in rules):
        return None
    if isinstance(first, Threshold):
        rule = copy.copy(first)
        rule.threshold = _by_stream([r.threshold for r in rules], streams)  # type: ignore[attr-defined,assignment]
        return rule
    if isinstance(first, Derived):
        tables = [r.thresholds for r in rules if isinstance(r, Derived)]
        if len({len(table) for table in tables}) > 1:
            return None
        rule = copy.copy(first)
        columns: Any = [_by_stream(column, streams) for column in zip(*tables, strict=True)]
        rule.thresholds = tuple(columns)
        return rule
    return None


def _by_stream(values: Sequence[float], streams: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [R, 1] in the other side's type: a comparison with a plain number is one in that type as well."""
    return torch.tensor(list(values), dtype=dtype).repeat_interleave(streams)[:, None]
