"""`train --tune`: heads, their hyper-parameters, rules and policy specs compared by replayed throughput, prompts left out.

Every trial is fitted on some prompts and replayed on the others, in folds grouped by prompt; what counts is the tokens of all
folds over their seconds. Trials are drawn by scikit-learn's `ParameterSampler`, the first of each head with its own defaults.
A trial that is clearly behind after the first fold is not carried on, so that a budget reaches further (successive halving).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import loguniform
from sklearn.model_selection import GroupKFold, ParameterSampler

from ....collect.schema import Header
from ....collect.store.folder import Trace
from ....decode.profile import add_decisions
from ....policies.contract import StopPolicy
from ....policies.errors import InputError, SpecstopError
from ....policies.latency.profile import Profile
from ....policies.limits import check_limits
from ....policies.progress import Progress, shown, silent
from ....policies.storage.registry import load_policy
from ...heads.fitting import HEAD_KINDS, FitOptions
from ...heads.head_specs import form, read_vectors, usual_features
from ...heads.kinds.tokens import BUCKETS
from ...heads.rows import label_columns
from ...replay.run import replay
from ...replay.traces.arrays import TraceArrays
from ...replay.traces.concatenate import joined_arrays, temperatures
from ..fit_rule import check_rule
from ..run import FEATURES, Plan, check_plan, default_features, train_arrays, without_noise
from ..trained import Trained, claimed
from .rates import fixed_grid

SPACES: dict[str, dict[str, Any]] = {
    "logistic": {"C": loguniform(1e-3, 1e2)},
    "tokens": {"C": loguniform(1e-2, 1.0), "buckets": [0, BUCKETS]},
    "mlp": {
        "width": [16, 32, 64, 128],
        "layers": [1, 2, 3],
        "learning_rate": loguniform(5e-4, 1e-2),
        "weight_decay": loguniform(1e-5, 1e-1),
    },
    "xgboost": {
        "max_depth": [2, 3, 4, 5, 6],
        "trees": [50, 100, 150, 300],
        "eta": loguniform(0.03, 0.3),
        "min_child_weight": [5, 20, 50, 200],
        "lambda": loguniform(0.1, 30.0),
    },
    "resnet": {
        "width": [32, 64, 128],
        "blocks": [1, 2, 3],
        "dropout": [0.0, 0.1, 0.3],
        "learning_rate": loguniform(5e-4, 1e-2),
        "weight_decay": loguniform(1e-5, 1e-1),
    },
    "specdec": {"blocks": [1, 2, 3, 4], "learning_rate": loguniform(2e-4, 1e-2)},
}
"""Hyper-parameters that are searched, by kind of head; another kind has its defaults tried under each rule."""

RULE_CHOICES = ("derived", "survival", "step")
CV_FOLDS = 3
BEHIND = 0.98
"""Share of the best rate on the first fold below which a trial ends there."""


@dataclass(frozen=True)
class Trial:
    """One setting and how it replays on prompts left out.

    Attributes:
        name: the head, or the policy's spec.
        rule: of a head; "" for a spec.
        params: hyper-parameters, or parameters of the spec.
        rate: tokens per second over the folds done.
        ratio: to the best fixed length, chosen on the same folds.
        folds: done; fewer than the others where the trial was behind.
        error: why it could not be run, or "".
    """

    name: str
    rule: str
    params: Mapping[str, Any]
    rate: float = 0.0
    ratio: float = 0.0
    folds: int = 0
    error: str = ""


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
        return [
            {
                "trial": at,
                "policy": trial.name,
                "rule": trial.rule or None,
                "parameters": ", ".join(f"{k}={_short(v)}" for k, v in trial.params.items()) or None,
                "tokens_per_s": trial.rate,
                "ratio_to_best_fixed": trial.ratio,
                "folds": trial.folds,
                **({"error": trial.error} if trial.error else {}),
            }
            for at, trial in enumerate(self.trials, 1)
        ]


@dataclass(frozen=True)
class SearchOptions:
    """What is searched.

    Attributes:
        trials: of heads; each spec adds as many of its own, or as many as it has.
        heads, rules: to choose from.
        specs: of policies, plugins included, with ranges: `name?x=0.1..0.9` or `name?x=1|2|4`.
        folds: of the cross-validation, grouped by prompt.
    """

    trials: int
    heads: tuple[str, ...] = ("logistic", "tokens", "mlp", "xgboost")
    rules: tuple[str, ...] = RULE_CHOICES
    specs: tuple[str, ...] = field(default=())
    folds: int = CV_FOLDS


def train_best(
    traces: Trace | Sequence[Trace],
    profile: Profile,
    options: SearchOptions,
    *,
    out: str | Path | None = None,
    features: Sequence[str] | None = None,
    name: str | None = None,
    seed: int = 0,
    fit: FitOptions | None = None,
    overwrite: bool = False,
    progress: Progress = shown,
) -> tuple[Trained, Search]:
    """Search, then train the best head under its best rule on all prompts; its metrics have the table of trials.

    Args:
        traces: as of `train`.
        profile: what rounds cost.
        options: what is searched.
        out: the policy folder to write; None keeps the policy in memory.
        features: that all heads read, but those that were published with their own; the tokens head reads tokens besides.
        name: of the policy; by default that of the best head.
        seed: of draws, splits and fits.
        fit: how heads are fitted.
        overwrite: replace what is in `out`.
        progress: see `Progress`.
    """
    several = [traces] if isinstance(traces, Trace) else list(traces)
    for head in options.heads:
        check_plan(Plan(head, features=tuple(features or FEATURES)))
    folder = None if out is None else claimed(out, several, profile, fit, overwrite=overwrite)
    names = tuple(features) if features else default_features(several)
    plan = Plan("", name=name or "", features=names, seed=seed, fit=fit or FitOptions())
    asked = [form(head) for head in options.heads]
    kept = {v for head in options.heads for v in read_vectors(head, several, None)}
    usual = [n for head in options.heads for n in usual_features(head, names)]
    read = dict.fromkeys([*names, *without_noise(usual, several[0].header)])
    plan = dataclasses.replace(plan, vectors=tuple(sorted(kept)))
    extra = label_columns([trace.header for trace in several], any(one.soft for one in asked))
    arrays = joined_arrays(several, tuple(read), plan.vectors, extra)
    sampled_at = temperatures(several)
    found = search(plan, arrays, profile, sampled_at, options, progress)
    sources = [str(trace.folder) for trace in several]
    trained = train_arrays(
        found.plan, arrays, profile, sampled_at, sources, folder, progress, more={"trials": found.rows()}
    )  # fmt: skip
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
    trials = options.trials
    check_limits(tune=trials, tune_folds=options.folds, seed=plan.seed)
    for rule in options.rules:
        check_rule(rule)
    jobs = head_trials(options.heads, options.rules, trials, plan.seed)
    for at, spec in enumerate(options.specs):
        jobs += spec_trials(spec, trials, plan.seed + at + 1)
    parts = group_folds(arrays, options.folds)
    grids = [fixed_grid(arrays.subset(out), profile) for _, out in parts]
    done: list[Trial] = []
    lead = 0.0
    for at, job in enumerate(jobs):
        progress("tune", at, len(jobs))
        trial, first = _run(job, plan, arrays, profile, sampled_at, parts, grids, lead)
        lead = max(lead, first)
        done.append(trial)
    progress("tune", len(jobs), len(jobs))
    done.sort(key=lambda trial: (trial.folds == len(parts), trial.rate), reverse=True)
    ran = [trial for trial in done if trial.rule and not trial.error]
    if not ran:
        reason = next((trial.error for trial in done if trial.error), "no head among them")
        raise InputError(f"--tune: no trial could be run: {reason}")
    return Search(tuple(done), planned(plan, ran[0], arrays.header), len(parts))


def planned(plan: Plan, trial: Trial, header: Header) -> Plan:
    """Return the plan with the head, rule and hyper-parameters of a trial."""
    name = plan.name if plan.name != plan.head else trial.name
    fit = dataclasses.replace(plan.fit, params={**plan.fit.params, **trial.params})
    asked = form(trial.name)
    features = without_noise(usual_features(trial.name, plan.features), header)
    vectors = plan.vectors if asked.any_vectors else asked.vectors
    return dataclasses.replace(
        plan, head=trial.name, rule=trial.rule, threshold=None, name=name, fit=fit, features=features, vectors=vectors
    )


def group_folds(arrays: TraceArrays, folds: int) -> list[tuple[list[int], list[int]]]:
    """Return (fit, left out) sequences of each fold, all texts of a prompt on one side."""
    prompts = len(set(arrays.prompt_ids))
    if not 2 <= folds <= prompts:
        raise InputError(f"--tune: expected 2 to {prompts} folds, as there are {prompts} prompts, not {folds}")
    splits = GroupKFold(folds).split(np.zeros(arrays.sequences), groups=np.asarray(arrays.prompt_ids))
    return [(fit.tolist(), out.tolist()) for fit, out in splits]


def head_trials(heads: Sequence[str], rules: Sequence[str], trials: int, seed: int) -> list[Trial]:
    """Return the trials of heads: the defaults of each under each rule in turn, then drawn ones."""
    unknown = [head for head in heads if head not in HEAD_KINDS]
    if unknown:
        raise InputError(f"--head: expected some of {', '.join(HEAD_KINDS)}, not {unknown[0]!r}")
    jobs = [Trial(head, rule, {}) for rule in rules for head in heads][:trials]
    for at in range(trials - len(jobs)):
        head = heads[at % len(heads)]
        drawn = next(iter(ParameterSampler({"rule": list(rules), **SPACES.get(head, {})}, 1, random_state=seed + at)))
        rule = str(drawn.pop("rule"))
        jobs.append(Trial(head, rule, {name: _plain(value) for name, value in drawn.items()}))
    return jobs


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def spec_trials(spec: str, trials: int, seed: int) -> list[Trial]:
    """Return trials of a policy spec whose parameters may be ranges: `a..b` (numbers between) or `a|b|c` (one of them).

    Raises:
        InputError: a range that is none.
    """
    name, _, query = spec.partition("?")
    fixed, space = [], {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"--policy: expected key=value after the question mark, not {part!r}")
        if "|" in value:
            space[key] = value.split("|")
        elif ".." in value:
            space[key] = _between(key, value, trials)
        else:
            fixed.append(part)
    if not space:
        return [Trial(spec, "", {})]
    most = min(trials, math.prod(len(values) for values in space.values()))
    drawn = ParameterSampler(space, most, random_state=seed)
    base = "&".join(fixed)
    return [Trial(f"{name}?{base}" if base else name, "", dict(choice)) for choice in drawn]


def _between(key: str, text: str, count: int) -> list[str]:
    low, _, high = text.partition("..")
    try:
        first, last = float(low), float(high)
    except ValueError:
        raise InputError(f"--policy: expected {key}=number..number or {key}=a|b|c, not {text!r}") from None
    if not math.isfinite(first) or not math.isfinite(last) or first >= last:
        raise InputError(f"--policy: expected {key}=low..high, low below high, not {text!r}")
    if all(part.lstrip("-").isdigit() for part in (low, high)):
        return [str(value) for value in range(int(low), int(high) + 1)]
    return [f"{value:.4g}" for value in np.linspace(first, last, max(2, count))]


def spec_of(trial: Trial) -> str:
    """Return the spec of a trial of a policy."""
    if not trial.params:
        return trial.name
    joint = "&" if "?" in trial.name else "?"
    return trial.name + joint + "&".join(f"{key}={value}" for key, value in trial.params.items())


def _run(
    job: Trial, plan: Plan, arrays: TraceArrays, profile: Profile, sampled_at: Sequence[float], parts: Any, grids: Any,
    lead: float,
) -> tuple[Trial, float]:  # fmt: skip
    """Return the trial with its rate, and the rate on the first fold."""
    totals, ratios, first = np.zeros(2), np.zeros(len(grids[0])), 0.0
    tokens, done = 0.0, 0
    try:
        for (fit, out), grid in zip(parts, grids, strict=True):
            held = arrays.subset(out)
            policy, costs = _trained(job, plan, arrays, fit, profile, sampled_at)
            played = replay(held, policy, costs)
            totals += (float(played.tokens.sum()), float(played.seconds.sum()))
            ratios += [float(fixed.seconds.sum()) for fixed in grid]
            tokens += float(grid[0].tokens.sum())
            done += 1
            first = first or played.rate
            if done == 1 and first < BEHIND * lead:
                break
    except SpecstopError as error:
        return dataclasses.replace(job, error=str(error)), 0.0
    rate = float(totals[0] / totals[1])
    best_fixed = tokens / float(ratios.min())
    return dataclasses.replace(job, rate=rate, ratio=rate / best_fixed, folds=done), first


def _trained(
    job: Trial, plan: Plan, arrays: TraceArrays, fit: Sequence[int], profile: Profile, sampled_at: Sequence[float]
) -> tuple[StopPolicy, Profile]:
    """Return the policy of a trial, fitted without the prompts left out, and the profile with its decisions."""
    depth = min(arrays.depth, profile.max_depth)
    if not job.rule:
        policy: StopPolicy = load_policy(spec_of(job)).limited(depth)
        return policy, add_decisions(profile, [policy], arrays.header.vocabulary, arrays.header.vectors)
    quick = dataclasses.replace(planned(plan, job, arrays.header), cross_fit=False, passes=1)
    quick = dataclasses.replace(quick, fit=dataclasses.replace(quick.fit, checkpoints=None, logger=None, resume=False))
    check_plan(quick)
    trained = train_arrays(quick, arrays.subset(list(fit)), profile, sampled_at)
    return trained.policy, add_decisions(profile, [trained.policy], arrays.header.vocabulary, arrays.header.vectors)
