"""What `train` is asked for: the head, what it reads, its rule; checked before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...collect.schema import Header
from ...collect.store.folder import Trace
from ...policies.arguments import check_limits
from ...policies.errors import InputError
from ...policies.features import feature
from ..heads import make_head
from ..heads.base import HeadEstimator
from ..heads.crossfit import FOLDS
from ..replay.traces.concatenate import temperatures
from .fit_rule import check_rule

FEATURES = ("mean_accepted", "mean_full", "last_accepted", "top1", "noisy_margin", "depth")
"""What heads read unless told otherwise: few, because on a small pair every microsecond of a decision counts."""

WITHOUT_NOISE = {"noisy_margin": "drawn_prob", "noisy_lead": "", "noisy_score": ""}
"""What stands in for features that only `match` traces hold; empty = nothing."""


@dataclass(frozen=True)
class Plan:
    """What `train` was asked for, checked; see there."""

    head: HeadEstimator = field(default_factory=lambda: make_head("logistic"))
    rule: str = "derived"
    threshold: float | None = None
    features: tuple[str, ...] = FEATURES
    name: str = "logistic"
    seed: int = 0
    folds: int = FOLDS
    cross_fit: bool = True
    passes: int | None = None
    hidden: tuple[str, ...] = ()
    report_share: float = 0.0

    @property
    def grid(self) -> tuple[float, ...]:
        """The thresholds that were published with the rule, where the head is used under its own."""
        return self.head.thresholds if self.rule == self.head.rule else ()


def check_plan(plan: Plan) -> None:
    """Refuse an unknown rule or feature, or numbers out of range, before anything is read."""
    if plan.rule != "gain":  # of trees
        check_rule(plan.rule, plan.threshold)
    for wanted in plan.features:
        feature(wanted)
    check_limits(folds=plan.folds, passes=plan.passes, seed=plan.seed)


def check_used(rule: str | None, cross_fit: bool, params: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
    """Refuse what a rule has no use for, and would leave out without a word."""
    if rule in ("continuation", "gain") and not cross_fit:
        raise InputError(f"--no-cross-fit: the rule {rule} deals the prompts by itself; leave it out")
    if rule == "continuation" and (params or trainer):
        raise InputError("--param: the rule continuation fits its values in a manner of its own; leave it out")


def default_features(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return `FEATURES`, and `temperature` with traces of several."""
    more = ("temperature",) if len(temperatures(traces)) > 1 else ()
    return without_noise((*FEATURES, *more), traces[0].header)


def without_noise(names: Sequence[str], header: Header) -> tuple[str, ...]:
    """Return the names, those of noisy scores replaced or left out where traces were recorded without noise."""
    found = [name if header.verification == "match" else WITHOUT_NOISE.get(name, name) for name in names]
    return tuple(dict.fromkeys(name for name in found if name))
