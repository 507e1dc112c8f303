"""The search of `train(tune=N)`: heads, hyper-parameters, rules and policy specs compared by replayed throughput.

An optuna study. Every trial is fitted on some prompts and replayed on the others, in folds grouped by prompt; its value is
the tokens of all folds over their seconds. The first trials are all candidates with their default parameters; then optuna's
TPE sampler (Bergstra et al. 2011) suggests candidates and parameters. A trial below the median of the earlier ones after its
first fold is pruned.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sklearn.base import clone
from sklearn.model_selection import GroupKFold

from ...decode.profile import add_decisions
from ...policies.arguments import check_limits
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import InputError, SpecstopError
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ...policies.registry import load_policy
from ..replay.arrays import TraceArrays
from ..replay.run import replay
from .plan import Plan
from .rules import fixed_grid

TUNE_FOLDS = 3

STARTUP = 4
"""Trials before the first one that may be pruned."""


class PolicySpace:
    """A policy spec with ranges: `name?x=0.1..0.9` (numbers between; integers if both ends are) or `name?x=1|2|4`.

    Raises:
        InputError: an invalid range.
    """

    def __init__(self, spec: str) -> None:
        self.name, _, query = spec.partition("?")
        self.spec = spec
        self.fixed: dict[str, str] = {}
        self.choices: dict[str, list[str]] = {}
        self.ranges: dict[str, tuple[float, float]] = {}
        for part in filter(None, query.split("&")):
            key, equals, value = part.partition("=")
            if not equals:
                raise InputError(f"--policy: expected key=value after the question mark, not {part!r}")
            if "|" in value:
                self.choices[key] = value.split("|")
            elif ".." in value:
                self.ranges[key] = _range(key, value)
            else:
                self.fixed[key] = value

    def suggest(self, trial: optuna.Trial) -> str:
        """Return a spec without ranges."""
        values: dict[str, Any] = dict(self.fixed)
        for key, choices in self.choices.items():
            values[key] = trial.suggest_categorical(f"{self.spec} {key}", choices)
        for key, (low, high) in self.ranges.items():
            suggest: Any = trial.suggest_int if isinstance(low, int) else trial.suggest_float
            values[key] = suggest(f"{self.spec} {key}", low, high)
        texts = (f"{key}={v:.4g}" if isinstance(v, float) else f"{key}={v}" for key, v in values.items())
        query = "&".join(texts)
        return f"{self.name}?{query}" if query else self.name


def _range(key: str, text: str) -> tuple[float, float]:
    low, _, high = text.partition("..")
    is_integer = all(part.lstrip("-").isdigit() for part in (low, high))
    try:
        first, last = (int(low), int(high)) if is_integer else (float(low), float(high))
    except ValueError:
        raise InputError(f"--policy: expected {key}=number..number or {key}=a|b|c, not {text!r}") from None
    if not (math.isfinite(first) and math.isfinite(last) and first < last):
        raise InputError(f"--policy: expected {key}=low..high, low below high, not {text!r}")
    return first, last


def search(
    plans: Sequence[Plan],
    arrays: TraceArrays,
    profile: Profile,
    count: int,
    fit: Callable[[Plan, TraceArrays], LearnedPolicy],
    policies: Sequence[str] = (),
    storage: str | Path | None = None,
    folds: int = TUNE_FOLDS,
    progress: Progress = silent,
) -> tuple[Plan, list[dict[str, Any]]]:
    """Run trials; return the plan of the fastest head with its hyper-parameters, and all trials by rate, as rows of JSON.

    Args:
        plans: candidates, each a head with its features and a rule.
        arrays: training prompts, without report prompts.
        profile: what rounds cost.
        count: number of trials.
        fit: trains the policy of a plan on prompts (`run.train_arrays`).
        policies: specs with ranges, which are candidates too.
        storage: journal file that keeps the trials; a search of the same candidates on the same traces continues from it.
        folds: parts of the prompts that are left out in turn.
        progress: see `Progress`.

    Raises:
        InputError: no trials, no trial of a head that could be run, or the file is not a journal of optuna.
    """
    check_limits(tune=count, seed=plans[0].seed)
    objective = _Objective(plans, [PolicySpace(spec) for spec in policies], arrays, profile, fit, folds)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        journal = None if storage is None else optuna.storages.JournalStorage(JournalFileBackend(str(storage)))
        study = optuna.create_study(
            storage=journal, study_name=objective.digest(), direction="maximize", load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
        )  # fmt: skip
    except (ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--storage: {storage} is not a journal of optuna ({reason}); choose another file") from None
    before = len(_ended(study))
    study.sampler = optuna.samplers.TPESampler(seed=plans[0].seed + before)  # a continued search draws other trials
    for candidate in objective.candidates:
        study.enqueue_trial({"candidate": candidate, "default": True}, skip_if_exists=True)
    progress("tune", before, count)
    if before < count:
        study.optimize(
            objective, n_trials=count - before, catch=(SpecstopError,),
            callbacks=[lambda study, trial: progress("tune", len(_ended(study)), count)],
        )  # fmt: skip
    progress("tune", count, count)

    def by_rate(trial: optuna.trial.FrozenTrial) -> tuple[bool, float]:
        row = trial.user_attrs["row"]
        return row["folds"] == folds, row["tokens_per_s"]  # the rate of a pruned trial is of one fold: these come last

    # Equal parameters are measured once.
    trials = sorted((trial for trial in _ended(study) if "row" in trial.user_attrs), key=by_rate, reverse=True)
    rows = [{"trial": number, **trial.user_attrs["row"]} for number, trial in enumerate(trials, 1)]
    heads = [trial for trial in trials if trial.user_attrs["row"]["rule"] and "error" not in trial.user_attrs["row"]]
    if not heads:
        reason = next((row["error"] for row in rows if "error" in row), "no head among them")
        raise InputError(f"--tune: no trial could be run: {reason}")
    return objective.plan(heads[0].params["candidate"], heads[0].user_attrs["params"]), rows


def _ended(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


class _Objective:
    """Measures a trial on prompts left out: tokens per second over all folds."""

    def __init__(
        self, plans: Sequence[Plan], spaces: Sequence[PolicySpace], arrays: TraceArrays, profile: Profile,
        fit: Callable[[Plan, TraceArrays], LearnedPolicy], folds: int,
    ) -> None:  # fmt: skip
        self.candidates: dict[str, Plan | PolicySpace] = {
            **{f"{number}: {plan.head.form}, {plan.rule}": plan for number, plan in enumerate(plans)},
            **{space.spec: space for space in spaces},
        }
        self.arrays, self.profile, self.fit = arrays, profile, fit
        self.folds = group_folds(arrays, folds)
        self.grids = [fixed_grid(arrays.subset(out), profile) for _, out in self.folds]

    def digest(self) -> str:
        """Return a name of the study that differs for other candidates, traces, profiles and seeds."""
        read = (
            {name: repr(candidate) for name, candidate in self.candidates.items() if isinstance(candidate, Plan)},
            [*self.candidates], self.arrays.header.to_json(), self.arrays.clusters, self.profile.to_dict(), len(self.folds),
        )  # fmt: skip
        return hashlib.sha256(json.dumps(read, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def plan(self, candidate: str, params: Mapping[str, Any]) -> Plan:
        """Return the plan of a candidate with hyper-parameters."""
        plan = self.candidates[candidate]
        assert isinstance(plan, Plan)
        return dataclasses.replace(plan, head=clone(plan.head).set_params(**params))

    def __call__(self, trial: optuna.Trial) -> float:
        """Measure a trial; keep its row of the table in optuna's record of it."""
        name = trial.suggest_categorical("candidate", [*self.candidates])
        candidate, params = self.candidates[name], {}
        if isinstance(candidate, PolicySpace):
            spec = candidate.suggest(trial)
            row: dict[str, Any] = {"policy": candidate.name, "rule": None}
            shown = spec.partition("?")[2].replace("&", ", ")
        else:
            # The default parameters are one of the choices.
            if candidate.head.space and not trial.suggest_categorical("default", (True, False)):
                params = candidate.head.search_space(trial)
            row = {"policy": candidate.head.form, "rule": candidate.rule}
            shown = ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in params.items())
        if any(trial.params == other.params for other in trial.study.get_trials(states=(TrialState.COMPLETE,))):
            raise optuna.TrialPruned
        row |= {"parameters": shown or None, "tokens_per_s": 0.0, "ratio_to_best_fixed": 0.0, "folds": 0}
        trial.set_user_attr("params", params)
        tokens, seconds, fixed_tokens, fixed_seconds = 0.0, 0.0, 0.0, np.zeros(len(self.grids[0]))
        try:
            for number, ((kept, out), grid) in enumerate(zip(self.folds, self.grids, strict=True)):
                if isinstance(candidate, PolicySpace):
                    policy: StopPolicy = load_policy(spec).limited(min(self.arrays.depth, self.profile.max_depth))
                else:
                    # A trial needs a ranking, not the last percent: one head and one pass.
                    plan = dataclasses.replace(self.plan(name, params), cross_fit=False, passes=1, report_share=0.0)
                    policy = self.fit(plan, self.arrays.subset(kept))
                header = self.arrays.header
                profile = add_decisions(self.profile, [policy], header.vocabulary, header.hidden)
                played = replay(self.arrays.subset(out), policy, profile)
                tokens, seconds = tokens + float(played.tokens.sum()), seconds + float(played.seconds.sum())
                fixed_seconds += [
                    float(fixed.seconds.sum()) for fixed in grid
                ]  # by length; the best of all folds counts
                fixed_tokens += float(grid[0].tokens.sum())
                rate = tokens / seconds
                row |= {
                    "tokens_per_s": rate, "folds": number + 1,
                    "ratio_to_best_fixed": rate * float(fixed_seconds.min()) / fixed_tokens,
                }  # fmt: skip
                if number == 0:
                    trial.report(rate, 0)
                    if trial.should_prune():
                        raise optuna.TrialPruned
        except SpecstopError as error:
            row["error"] = error.command_line
            raise
        finally:
            trial.set_user_attr("row", row)
        return rate


def group_folds(arrays: TraceArrays, folds: int) -> list[tuple[list[int], list[int]]]:
    """Return (fit, left out) sequences of each fold, with all texts of a prompt in one of them.

    Raises:
        InputError: fewer prompts than folds.
    """
    prompts = len(set(arrays.clusters))
    if not 2 <= folds <= prompts:
        raise InputError(f"--tune: expected 2 to {prompts} folds, as there are {prompts} prompts, not {folds}")
    splits = GroupKFold(folds).split(np.zeros(arrays.sequences), groups=np.asarray(arrays.clusters))
    return [(fit.tolist(), out.tolist()) for fit, out in splits]
