"""What `train` is asked for: the head, what it reads, its rule; checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from ...collect.schema import Header
from ...collect.store import Trace
from ...policies.arguments import check_limits
from ...policies.errors import InputError, close_match
from ...policies.features import feature
from ..heads.crossfit import (
    FOLDS,
)
from ..heads.fitting import HEAD_KINDS, FitOptions
from ..heads.head_specs import HeadSpec, head_spec
from ..replay.traces.concatenate import temperatures
from .fit_rule import check_rule

FEATURES = ("mean_accepted", "mean_full", "last_accepted", "top1", "noisy_margin", "depth")
"""What heads read unless told otherwise: few, because on a small pair every microsecond of a decision counts."""

WITHOUT_NOISE = {"noisy_margin": "drawn_prob", "noisy_lead": "", "noisy_score": ""}
"""What stands in for features that only `match` traces hold; empty = nothing."""


@dataclass(frozen=True)
class Plan:
    """What `train` was asked for, checked; see there."""

    head: str = "logistic"
    rule: str = "derived"
    threshold: float | None = None
    features: tuple[str, ...] = FEATURES
    name: str = "logistic"
    seed: int = 0
    folds: int = FOLDS
    cross_fit: bool = True
    passes: int | None = None
    fit: FitOptions = field(default_factory=FitOptions)
    hidden: tuple[str, ...] = ()
    report_share: float = 0.0

    @property
    def head_spec(self) -> HeadSpec:
        """What the head asks of training."""
        return head_spec(self.head)

    @property
    def grid(self) -> tuple[float, ...]:
        """The thresholds that were published with the rule, where the head is used under its own."""
        return self.head_spec.thresholds if self.rule == self.head_spec.rule else ()


def check_plan(plan: Plan) -> None:
    """Refuse an unknown head, rule or feature, or numbers out of range, before anything is read."""
    if plan.head not in HEAD_KINDS:
        known = ", ".join(HEAD_KINDS)
        raise InputError(f"--head: unknown head {plan.head!r}{close_match(plan.head, HEAD_KINDS)}; expected {known}")
    if plan.rule != "gain":  # of trees
        check_rule(plan.rule, plan.threshold)
    for wanted in plan.features:
        feature(wanted)
    check_limits(folds=plan.folds, passes=plan.passes, seed=plan.seed)


def check_used(rule: str | None, cross_fit: bool, options: FitOptions) -> None:
    """Refuse what a rule has no use for, and would leave out without a word."""
    if rule in ("continuation", "gain") and not cross_fit:
        raise InputError(f"--no-cross-fit: the rule {rule} deals the prompts by itself; leave it out")
    usual, odd = FitOptions(), ""
    if rule == "continuation":
        names = (field.name for field in fields(options))
        odd = next((name for name in names if getattr(options, name) != getattr(usual, name)), "")
    if odd:
        option = "param" if odd == "params" else odd.replace("_", "-")
        raise InputError(f"--{option}: the rule continuation fits its values in a manner of its own; leave it out")


def default_features(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return `FEATURES`, and `temperature` with traces of several."""
    more = ("temperature",) if len(temperatures(traces)) > 1 else ()
    return without_noise((*FEATURES, *more), traces[0].header)


def without_noise(names: Sequence[str], header: Header) -> tuple[str, ...]:
    """Return the names, those of noisy scores replaced or left out where traces were recorded without noise."""
    found = [name if header.verification == "match" else WITHOUT_NOISE.get(name, name) for name in names]
    return tuple(dict.fromkeys(name for name in found if name))
