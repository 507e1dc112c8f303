"""What `train` fits: a `Plan`, validated at construction, and the three disjoint sets of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...collect.schema import Header
from ...collect.store import Trace
from ...policies.arguments import check_limits
from ...policies.errors import InputError, close_match
from ...policies.features import TOKEN_FEATURES, feature
from ...policies.rules import THRESHOLD_RULES, Derived, Rule, Threshold
from ..heads.base import HeadEstimator
from ..heads.crossfit import FOLDS, Folds
from ..heads.rows import split_prompts
from ..replay.arrays import TraceArrays, temperatures

RULES = ("derived", *THRESHOLD_RULES, "batch", "gain")

FEATURES = ("mean_accepted", "mean_full", "last_accepted", "top1", "noisy_margin", "depth")
"""Default features of heads for chains. They are few because each microsecond of a decision counts on a small pair."""

TREE_FEATURES = ("mean_accepted", "noisy_margin", "noisy_lead", "depth", "branch_rank")
"""Default features of heads for trees; all come from one pass over the scores."""

IMPLIED_BY_TOKENS = ("branch_rank", "noisy_score")
"""Tree features that a head of tokens does not need: measured, it is as fast without them and decides sooner."""

WITHOUT_NOISE = {"noisy_margin": "drawn_prob", "noisy_lead": "", "noisy_score": ""}
"""Replacements of features that only `match` traces hold; "" = none."""

REPORT_SHARE = 0.2
"""Share of the prompts that is held out from fitting and selection."""


@dataclass(frozen=True)
class Plan:
    """What is fitted; see `train` for the fields.

    Raises:
        InputError: an unknown rule, a value out of range, or a combination that cannot be fitted.
        PolicyError: an unknown feature, or a threshold that the rule cannot have.
    """

    head: HeadEstimator
    rule: str = "derived"
    threshold: float | None = None
    features: tuple[str, ...] = FEATURES
    name: str = ""
    seed: int = 0
    folds: int = FOLDS
    cross_fit: bool = True
    passes: int | None = None
    hidden: tuple[str, ...] = ()
    report_share: float = 0.0

    def __post_init__(self) -> None:
        check_rule(self.rule, self.threshold)
        for name in self.features:
            feature(name)
        check_limits(folds=self.folds, passes=self.passes, seed=self.seed, report_share=self.report_share)
        if not self.name:
            object.__setattr__(self, "name", "tree" if self.rule == "gain" else self.head.form)
        if self.rule != "gain":
            return
        if self.threshold is not None or self.hidden:
            raise InputError("--rule gain: expected no threshold and no hidden states")
        if self.head.hidden:
            raise InputError(
                f"--head: {self.head.form} reads hidden states; with --rule gain choose logistic, tokens, mlp or xgboost"
            )
        if not self.cross_fit:
            raise InputError("--no-cross-fit: the rule gain always fits a head for each fold; leave it out")

    @property
    def is_tuned(self) -> bool:
        """Whether the rule depends on replayed rates."""
        return self.rule in ("derived", "batch", "gain") or self.threshold is None

    @property
    def published_thresholds(self) -> tuple[float, ...]:
        """The thresholds that were published with the head, if it is used under its own rule."""
        return self.head.thresholds if self.rule == self.head.rule else ()


def make_rule(kind: str, threshold: float) -> Rule:
    """Return the rule of a policy for chains; derived rules and `batch` are solved later and begin as a derived rule."""
    return Threshold(kind, threshold) if kind in THRESHOLD_RULES else Derived([threshold], 1)


def check_rule(kind: str, threshold: float | None = None) -> None:
    """Raise an error for an unknown rule or a threshold that it cannot have."""
    if kind not in RULES:
        known = f"{', '.join(RULES[:-1])} or {RULES[-1]}"
        raise InputError(f"--rule: expected {known}, not {kind!r}{close_match(kind, RULES)}")
    if threshold is not None and kind == "batch":
        raise InputError("--threshold: the rule batch has none, it weighs tokens against seconds")
    if threshold is not None and kind in THRESHOLD_RULES:
        Threshold(kind, threshold)


def default_features(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return `FEATURES`, and `temperature` for traces of several temperatures."""
    more = ("temperature",) if len(temperatures(traces)) > 1 else ()
    return without_noise((*FEATURES, *more), traces[0].header)


def tree_features(head: HeadEstimator) -> tuple[str, ...]:
    """Return the default features of a head for trees."""
    names = head.default_features(TREE_FEATURES)
    reads_tokens = bool(set(names) & set(TOKEN_FEATURES))
    return tuple(name for name in names if not (reads_tokens and name in IMPLIED_BY_TOKENS))


def without_noise(names: Sequence[str], header: Header) -> tuple[str, ...]:
    """Return the names, with those of noisy scores replaced or omitted if the traces were recorded without noise."""
    replaced = [name if header.verification == "match" else WITHOUT_NOISE.get(name, name) for name in names]
    return tuple(dict.fromkeys(name for name in replaced if name))


def split_report(arrays: TraceArrays, share: float, seed: int) -> tuple[TraceArrays, TraceArrays | None]:
    """Return the prompts to train on, and the report prompts; None if `share` is 0.

    Args:
        arrays: training traces.
        share: of the prompts, chosen by a hash of their text.
        seed: of the hash.

    Raises:
        TraceError: too few prompts for the split.
    """
    if share == 0:
        return arrays, None
    # A different hash than that of the folds: otherwise all report prompts would come from one end of their order.
    rest, report = split_prompts(arrays, share, seed + 1)
    return arrays.subset(rest), arrays.subset(report)


def training_prompts(
    arrays: TraceArrays, folds: Folds, report: TraceArrays | None = None, mixed: TraceArrays | None = None
) -> dict[str, list[str]]:
    """Return the prompts of each set (`TrainingMetadata.prompts`).

    Args:
        arrays: the prompts to train on.
        folds: of them; the saved head is fitted on all but the first.
        report: the report prompts.
        mixed: a trace that the head is fitted on instead.
    """
    select = {arrays.clusters[s] for s in folds.sequences(0)}
    fit = {arrays.clusters[s] for s in folds.sequences(0, inside=False)}
    if mixed is not None:
        select, fit = select | fit, set(mixed.clusters) - select
    sets = {"fit": sorted(fit), "select": sorted(select - fit)}
    return sets if report is None else sets | {"report": sorted(set(report.clusters))}
