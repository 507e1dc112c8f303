"""What `train` fits: its options, a `Plan` for each head and rule, and the three disjoint sets of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...collect.schema import Header
from ...collect.store import Trace
from ...policies.arguments import as_list, check_limits
from ...policies.errors import InputError, close_match
from ...policies.features import TOKEN_FEATURES, feature
from ...policies.rules import THRESHOLD_RULES, Derived, Rule, Threshold
from ..heads import NO_PARAMS, head_class, make_head
from ..heads.base import HeadEstimator, engine_features
from ..heads.crossfit import FOLDS, Folds
from ..heads.rows import split_prompts
from ..replay.arrays import TraceArrays, temperatures

RULES = ("derived", *THRESHOLD_RULES, "batch", "gain")

DECISIONS = ("stop", "route", "both")

TUNED_HEADS = ("logistic", "tokens", "mlp", "xgboost")
TUNED_RULES = ("derived", "survival", "step")

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


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `train`.

    Attributes:
        head: an estimator, or the name of one (`heads.HEADS`); with `tune` several. Default: logistic, or `TUNED_HEADS`.
        rule: "derived" (look-ahead, no threshold), "survival", "step", "any", "batch" for batches (`policies.batch_rules`) or
            "gain" for trees (`tree_rules`); with `tune` several. Default: the one that the head was published with
            (`HeadEstimator.rule`), or the derived one, or `TUNED_RULES`.
        threshold: of survival, step and any; None = the one that replays fastest, of the published ones if there are any.
        features: scalar features; by default those that every trace of chains holds, or those that the head was
            published with.
        hidden: hidden states; by default those of the published head, or for a head that takes any all that are recorded.
        name: of the policy; by default the head's.
        seed: of split, fit and search.
        folds: parts that the training prompts are split into; the saved head is fitted on all but the first.
        report_share: share of the prompts that all held-out figures come from; 0 = none, without such figures.
        cross_fit: fit a head for each fold, so that calibration rests on all prompts; else on the first fold alone.
        passes: number of fits. From the second on, heads are fitted on the rounds that the previous policy visits. None = the
            head's default.
        params, trainer: of heads that are given by name (`heads.make_head`).
        mixed: a trace of `collect --mix` that the head is fitted on instead, as SpecDec++'s is. The other traces then serve
            for calibration and the rule.
        host: the engine that the policy will run in (`heads.base.ENGINES`): it then reads only what that engine has.
        nodes: with rule "gain", sizes of the sub-trees that are tried, of which the fastest is kept; none = as recorded.
        tune: number of trials of a search over heads, hyper-parameters and rules (`tune.search`).
        storage: journal file of optuna that keeps the trials; a search continues from it.
        decide: "stop", when to stop drafting, of several drafters the first, or the one after an @ ("stop@suffix"); "route",
            which of several drafters drafts, with fixed lengths; or "both".

    Raises:
        InputError: a value out of range, or options that cannot be combined.
    """

    head: str | HeadEstimator | Sequence[str | HeadEstimator] | None = None
    rule: str | Sequence[str] | None = None
    threshold: float | None = None
    features: Sequence[str] | None = None
    hidden: Sequence[str] | None = None
    name: str | None = None
    seed: int = 0
    folds: int = FOLDS
    report_share: float = REPORT_SHARE
    cross_fit: bool = True
    passes: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    mixed: Trace | str | Path | None = None
    host: str | None = None
    nodes: Sequence[int] = ()
    tune: int | None = None
    storage: str | Path | None = None
    decide: str = "stop"

    def __post_init__(self) -> None:
        check_limits(
            folds=self.folds, passes=self.passes, seed=self.seed, report_share=self.report_share, tune=self.tune
        )
        if self.nodes and (self.rules != ["gain"] or min(self.nodes) < 1):
            raise InputError("--nodes: expected numbers of 1 or more, of the trees to try with --rule gain")
        if self.tune is None and (self.storage is not None or len(self.heads) > 1 or len(self.rules) > 1):
            raise InputError(
                "--tune: expected a number of trials, to compare several heads or rules, or with --storage"
            )
        excluded = (self.mixed, self.host, self.tune, self.threshold, self.hidden)
        if "gain" in self.rules and (not self.cross_fit or any(value is not None for value in excluded)):
            raise InputError("--rule gain: leave out --mixed, --for, --tune, --threshold, --hidden and cross_fit=False")
        decision, at, drafter = self.decide.partition("@")
        if decision not in DECISIONS or (at and (decision != "stop" or not drafter)):
            raise InputError(f"--decide: expected {', '.join(DECISIONS)} or stop@DRAFTER, not {self.decide!r}")
        if decision != "stop" and (any(excluded) or self.rule not in (None, "derived") or len(self.heads) > 1):
            raise InputError(
                "--decide: leave out --rule, --threshold, --hidden, --mixed, --for and --tune, and give one --head, to learn "
                "which drafter drafts"
            )
        if self.tune is not None and (self.threshold is not None or self.hidden or self.mixed is not None):
            raise InputError("--tune: leave out --threshold, --hidden and --mixed; a search chooses thresholds itself")

    @property
    def heads(self) -> list[str | HeadEstimator]:
        """All heads to fit."""
        if self.head:
            return as_list(self.head, HeadEstimator)
        return ["logistic"] if self.tune is None else [*TUNED_HEADS]

    @property
    def rules(self) -> list[str | None]:
        """All rules to use; None = the head's."""
        if self.rule:
            return [*as_list(self.rule)]
        return [None] if self.tune is None else [*TUNED_RULES]


@dataclass(frozen=True)
class Plan:
    """One head under one rule.

    Attributes:
        head: not fitted.
        rule: of `RULES`.
        features, hidden: what the head reads.
        name: of the policy.
        options: the others.

    Raises:
        InputError: an unknown rule, or a head without it.
        PolicyError: an unknown feature, or a threshold that the rule cannot have.
    """

    head: HeadEstimator
    rule: str = "derived"
    features: tuple[str, ...] = FEATURES
    hidden: tuple[str, ...] = ()
    name: str = ""
    options: TrainOptions = TrainOptions()

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            names = f"{', '.join(RULES[:-1])} or {RULES[-1]}"
            raise InputError(f"--rule: expected {names}, not {self.rule!r}{close_match(self.rule, RULES)}")
        if self.options.threshold is not None and self.rule == "batch":
            raise InputError("--threshold: the rule batch has none, it weighs tokens against seconds")
        if self.options.threshold is not None:
            make_rule(self.rule, self.options.threshold)
        for name in self.features:
            feature(name)
        if self.rule == "gain" and self.head.hidden:
            raise InputError(
                f"--head: {self.head.form} reads hidden states; with --rule gain choose logistic, tokens, mlp or xgboost"
            )
        if not self.name:
            object.__setattr__(self, "name", "tree" if self.rule == "gain" else self.head.form)

    @property
    def is_tuned(self) -> bool:
        """Whether the rule depends on replayed rates."""
        return self.rule in ("derived", "batch", "gain") or self.options.threshold is None

    @property
    def published_thresholds(self) -> tuple[float, ...]:
        """The thresholds that were published with the head, if it is used under its own rule."""
        return self.head.thresholds if self.rule == self.head.rule else ()


def make_plans(options: TrainOptions, traces: Sequence[Trace]) -> list[Plan]:
    """Return a plan for each combination of a rule and a head.

    Raises:
        InputError: a head or rule is unknown, or there are several traces with the rule gain.
        TraceError: the traces lack a feature.
    """
    if "gain" in options.rules and len(traces) != 1:
        raise InputError(f"--rule gain: expected one trace of trees, got {len(traces)} traces")
    features = None if options.features is None else as_list(options.features)
    requested = None if options.hidden is None else as_list(options.hidden)
    defaults, plans = default_features(traces), []
    for rule, kind in itertools.product(options.rules, options.heads):
        head = head_of(options, kind) if isinstance(kind, str) else kind
        hidden: tuple[str, ...] = ()
        if rule == "gain":
            names = tuple(features or tree_features(head))
        elif options.host is not None:
            names = engine_features(options.host, traces, type(head), features, defaults, requested or ())
        else:
            names = tuple(features or without_noise(head.default_features(defaults), traces[0].header))
            hidden = head.hidden_states(traces, requested)
        name = options.name or ("" if rule == "gain" else kind if isinstance(kind, str) else head.form)
        plans.append(Plan(head, rule or head.rule or "derived", names, hidden, name, options))
    return plans


def head_of(options: TrainOptions, kind: str) -> HeadEstimator:
    """Return the head of a name, not fitted. Of several heads each receives the parameters that it has."""
    params, trainer = options.params, options.trainer
    if len(options.heads) > 1:
        names = head_class(kind).param_names()
        params = {key: value for key, value in params.items() if key in names}
        trainer = trainer if "trainer" in names else NO_PARAMS
    return make_head(kind, params, trainer)


def make_rule(kind: str, threshold: float) -> Rule:
    """Return the rule of a policy for chains; derived rules and `batch` are solved later and begin as a derived rule."""
    return Threshold(kind, threshold) if kind in THRESHOLD_RULES else Derived([threshold], 1)


def default_features(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return `FEATURES`, and `temperature` for traces of several temperatures."""
    names = (*FEATURES, "temperature") if len(temperatures(traces)) > 1 else FEATURES
    return without_noise(names, traces[0].header)


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
