"""`train --tune`: heads, their hyper-parameters, rules and policy specs compared by replayed throughput, prompts left out.

Every trial is fitted on some prompts and replayed on the others, in folds grouped by prompt; what counts is the tokens of all
folds over their seconds. Heads are drawn by optuna's TPE sampler, each with its own defaults first; a trial of a head that is
below the median of those before it after the first fold is not carried on. With a work folder the search is kept in a file
there, from which `--resume` goes on, and its pictures beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.model_selection import GroupKFold

from ....collect.schema import Header
from ....collect.store.folder import Trace
from ....decode.profile import add_decisions
from ....policies.arguments import check_limits
from ....policies.contract import StopPolicy
from ....policies.display import Progress, shown, silent
from ....policies.errors import InputError, SpecstopError
from ....policies.profile import Profile
from ....policies.registry import load_policy
from ...heads import NO_PARAMS, head_class, make_head
from ...heads.base import HeadEstimator
from ...heads.rows import label_columns
from ...replay.run import Replayed, replay
from ...replay.traces.arrays import TraceArrays
from ...replay.traces.checking import check_whole
from ...replay.traces.concatenate import joined_arrays, temperatures
from ..fit_rule import check_rule
from ..held_out import REPORT_SHARE, split_report
from ..plan import FEATURES, Plan, check_plan, default_features, without_noise
from ..run import train_arrays
from ..trained import Trained, claimed
from .rates import fixed_grid
from .study import Space, Study
from .trials import HeadSpace, SpecSpace, Trial, spec_of

RULE_CHOICES = ("derived", "survival", "step")
CV_FOLDS = 3


@dataclass(frozen=True)
class Search:
    """All trials, the best first, and the plan of the best head among them."""

    trials: tuple[Trial, ...]
    plan: Plan
    folds: int

    @property
    def best(self) -> Trial:
        """The fastest of those that ran on all folds."""
        return self.trials[0]

    def rows(self) -> list[dict[str, Any]]:
        """Return the trials as plain JSON rows."""
        return [trial.row(at) for at, trial in enumerate(self.trials, 1)]


@dataclass(frozen=True)
class SearchOptions:
    """What is searched.

    Attributes:
        trials: of heads; each spec adds as many of its own, or as many as it has.
        heads, rules: to choose from.
        specs: of policies, plugins included, with ranges: `name?x=0.1..0.9` or `name?x=1|2|4`.
        folds: of the cross-validation, grouped by prompt.
        params, trainer: of heads that have such parameters (`heads.make_head`).
        work: folder that keeps the trials and their pictures; None keeps nothing.
        resume: go on from the trials there.
    """

    trials: int
    heads: tuple[str, ...] = ("logistic", "tokens", "mlp", "xgboost")
    rules: tuple[str, ...] = RULE_CHOICES
    specs: tuple[str, ...] = field(default=())
    folds: int = CV_FOLDS
    params: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    work: Path | None = None
    resume: bool = False

    def estimator(self, head: str, params: Mapping[str, Any] = NO_PARAMS) -> HeadEstimator:
        """Return a head with the parameters of all heads, as far as it has them, and its own."""
        known = head_class(head).param_names()
        shared = {key: value for key, value in self.params.items() if key in known}
        return make_head(head, {**shared, **params}, self.trainer if "trainer" in known else NO_PARAMS)


def train_best(
    traces: Trace | Sequence[Trace],
    profile: Profile,
    options: SearchOptions,
    *,
    out: str | Path | None = None,
    features: Sequence[str] | None = None,
    name: str | None = None,
    seed: int = 0,
    report_share: float = REPORT_SHARE,
    overwrite: bool = False,
    progress: Progress = shown,
) -> tuple[Trained, Search]:
    """Search, then train the best head under its best rule; its metrics have the table of trials.

    Trials never see the report prompts.

    Args:
        traces: as of `train`.
        profile: what rounds cost.
        options: what is searched.
        out: the policy folder to write; None keeps the policy in memory.
        features: that all heads read, but those that were published with their own; the tokens head reads tokens besides.
        name: of the policy; by default that of the best head.
        seed: of draws, splits and fits.
        report_share: see `train`.
        overwrite: replace what is in `out`.
        progress: see `Progress`.
    """
    opened = [traces] if isinstance(traces, Trace) else list(traces)
    asked = [options.estimator(head) for head in options.heads]
    for head in asked:
        check_plan(Plan(head, features=tuple(features or FEATURES)))
    folder = None if out is None else claimed(out, opened, profile, options.work, overwrite=overwrite)
    names = tuple(features) if features else default_features(opened)
    check_limits(report_share=report_share)
    plan = Plan(name=name or "", features=names, seed=seed)
    kept = {v for head in asked for v in head.hidden_states(opened)}
    usual = [n for head in asked for n in head.default_features(names)]
    read = dict.fromkeys([*names, *without_noise(usual, opened[0].header)])
    plan = dataclasses.replace(plan, hidden=tuple(sorted(kept)))
    extra = label_columns([trace.header for trace in opened], any(one.soft for one in asked))
    arrays = joined_arrays(opened, tuple(read), plan.hidden, extra)
    check_whole(arrays, "leave out --tune and give --rule survival, step or any with a --threshold")
    sampled_at = temperatures(opened)
    found = search(plan, split_report(arrays, report_share, seed)[0], profile, sampled_at, options, progress)
    sources = [str(trace.folder) for trace in opened]
    plan = dataclasses.replace(found.plan, report_share=report_share)
    trained = train_arrays(plan, arrays, profile, sampled_at, sources, folder, progress, more={"trials": found.rows()})
    return trained, found


def search(
    plan: Plan,
    arrays: TraceArrays,
    profile: Profile,
    sampled_at: Sequence[float],
    options: SearchOptions,
    progress: Progress = silent,
) -> Search:
    """Try settings and return them by rate.

    Args:
        plan: what all trials of heads share: features, seed, fitting.
        arrays: training traces.
        profile: what rounds cost.
        sampled_at: temperatures of the traces.
        options: what is searched.
        progress: see `Progress`.

    Raises:
        InputError: no trials, or none that could be run.
    """
    check_limits(tune=options.trials, tune_folds=options.folds, seed=plan.seed)
    for rule in options.rules:
        check_rule(rule)
    spaces: dict[str, Space] = {"heads": HeadSpace(options.heads, options.rules, options.trials)} | {
        spec: SpecSpace.parse(spec, options.trials) for spec in options.specs
    }
    parts = group_folds(arrays, options.folds)
    grids = [fixed_grid(arrays.subset(out), profile) for _, out in parts]
    validation = CrossValidation(plan, arrays, profile, sampled_at, parts, grids, options)
    done: list[Trial] = []
    total = sum(space.count for space in spaces.values())
    progress("tune", 0, total)
    for name, space in spaces.items():
        study = Study(f"{name} {validation.digest(space.choices)}", space, plan.seed, options.work, options.resume)
        study.run(validation.measure, space.count, functools.partial(_told, progress, len(done), total))
        done += study.trials()
        study.draw()
    # Trials that were given up have the rate of one fold, which is not comparable: they come last.
    done.sort(key=lambda trial: (trial.folds == len(parts), trial.rate), reverse=True)
    ran = [trial for trial in done if trial.rule and not trial.error]
    if not ran:
        reason = next((trial.error for trial in done if trial.error), "no head among them")
        raise InputError(f"--tune: no trial could be run: {reason}")
    return Search(tuple(done), planned(plan, ran[0], arrays.header, options), options.folds)


def _told(progress: Progress, before: int, total: int, ended: int) -> None:
    progress("tune", before + ended, total)


def planned(plan: Plan, trial: Trial, header: Header, options: SearchOptions) -> Plan:
    """Return the plan with the head, rule and hyper-parameters of a trial."""
    head = options.estimator(trial.name, trial.params)
    features = without_noise(head.default_features(plan.features), header)
    hidden = plan.hidden if head.any_hidden else head.hidden
    return dataclasses.replace(
        plan, head=head, rule=trial.rule, threshold=None, name=plan.name or trial.name, features=features, hidden=hidden
    )


def group_folds(arrays: TraceArrays, folds: int) -> list[tuple[list[int], list[int]]]:
    """Return (fit, left out) sequences of each fold, all texts of a prompt on one side."""
    prompts = len(set(arrays.clusters))
    if not 2 <= folds <= prompts:
        raise InputError(f"--tune: expected 2 to {prompts} folds, as there are {prompts} prompts, not {folds}")
    splits = GroupKFold(folds).split(np.zeros(arrays.sequences), groups=np.asarray(arrays.clusters))
    return [(fit.tolist(), out.tolist()) for fit, out in splits]


@dataclass(frozen=True)
class CrossValidation:
    """Measures trials on prompts left out.

    Attributes:
        plan: what all trials of heads share.
        arrays, profile, sampled_at: training traces, what rounds cost, temperatures of the traces.
        parts: (fit, left out) sequences of each fold.
        options: of the search.
        grids: the fixed lengths replayed on what each fold leaves out.
    """

    plan: Plan
    arrays: TraceArrays
    profile: Profile
    sampled_at: Sequence[float]
    parts: Sequence[tuple[list[int], list[int]]]
    grids: Sequence[Sequence[Replayed]]
    options: SearchOptions

    def digest(self, choices: Mapping[str, Sequence[Any]]) -> str:
        """Return what tells this search from one among other choices, on other traces, or fitted otherwise."""
        read = (
            self.arrays.header.to_json(), self.arrays.clusters, int(self.arrays.text_tokens.sum()),
            self.profile.to_dict(), self.plan.features, self.plan.seed, dict(self.options.params), len(self.parts), choices,
        )  # fmt: skip
        return hashlib.sha256(json.dumps(read, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def measure(self, job: Trial, behind: Callable[[float], bool]) -> Trial:
        """Return the trial with its rate over the folds; it ends after the first where `behind` says so of its rate there."""
        tokens, seconds, fixed_tokens = 0.0, 0.0, 0.0
        fixed_seconds = np.zeros(len(self.grids[0]))
        done = 0
        try:
            for (fit, out), grid in zip(self.parts, self.grids, strict=True):
                policy, costs = self._policy(job, fit)
                played = replay(self.arrays.subset(out), policy, costs)
                tokens, seconds = tokens + float(played.tokens.sum()), seconds + float(played.seconds.sum())
                fixed_seconds += [float(fixed.seconds.sum()) for fixed in grid]  # by length; best over all folds
                fixed_tokens += float(grid[0].tokens.sum())
                done += 1
                if done == 1 and behind(played.rate):
                    break
        except SpecstopError as error:
            return dataclasses.replace(job, error=error.command_line)
        rate = tokens / seconds
        best_fixed = fixed_tokens / float(fixed_seconds.min())
        return dataclasses.replace(job, rate=rate, ratio=rate / best_fixed, folds=done)

    def _policy(self, job: Trial, fit: Sequence[int]) -> tuple[StopPolicy, Profile]:
        """Return the policy of a trial, fitted on some sequences, and the profile with its decisions."""
        arrays, profile, header = self.arrays, self.profile, self.arrays.header
        if not job.rule:
            policy: StopPolicy = load_policy(spec_of(job)).limited(min(arrays.depth, profile.max_depth))
            return policy, add_decisions(profile, [policy], header.vocabulary, header.hidden)
        # A trial needs a ranking, not the last percent: one head on one pass.
        quick = dataclasses.replace(planned(self.plan, job, header, self.options), cross_fit=False, passes=1)
        check_plan(quick)
        trained = train_arrays(quick, arrays.subset(list(fit)), profile, self.sampled_at)
        return trained.policy, add_decisions(profile, [trained.policy], header.vocabulary, header.hidden)
