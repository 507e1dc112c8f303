"""The search of `train(tune=N)`: heads, hyper-parameters and rules compared by replayed throughput.

An optuna study. Every trial is fitted on some prompts and replayed on the others, in folds grouped by prompt; its value is
the tokens of all folds over their seconds. The first trials are all candidates with their default parameters; then optuna's
TPE sampler (Bergstra et al. 2011) suggests candidates and parameters. A trial below the median of the earlier ones after its
first fold is pruned.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
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
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import InputError, SpecstopError
from ...policies.profile import Profile
from ..replay.arrays import TraceArrays
from ..replay.run import replay
from .plan import Plan
from .rules import fixed_grid

TUNE_FOLDS = 3

STARTUP = 4
"""Trials before the first one that may be pruned."""


Fit = Callable[[Plan, TraceArrays, Profile], StopPolicy]


def search(
    plans: Sequence[Plan],
    arrays: TraceArrays,
    profile: Profile,
    fit: Fit,
    folds: int = TUNE_FOLDS,
    progress: Progress = silent,
) -> tuple[Plan, list[dict[str, Any]]]:
    """Run trials; return the plan of the fastest one with its hyper-parameters, and all trials by rate, as rows of JSON.

    Args:
        plans: candidates, each a head with its features and a rule, with the number of trials and the journal in the options.
        arrays: training prompts, without report prompts.
        profile: what rounds cost.
        fit: returns the policy of a plan.
        folds: parts of the prompts that are left out in turn.
        progress: see `Progress`.

    Raises:
        InputError: fewer prompts than folds, no trial that could be run, or the journal is not one of optuna.
    """
    options = plans[0].options
    count, storage = options.tune or 1, options.storage
    objective = _Objective(plans, arrays, profile, fit, folds)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if storage is not None:
        check_journal(Path(storage))
    try:
        journal = None if storage is None else optuna.storages.JournalStorage(JournalFileBackend(str(storage)))
        study = optuna.create_study(
            storage=journal, study_name=objective.digest(), direction="maximize", load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
        )  # fmt: skip
    except (ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"--storage: optuna cannot use {storage} as its journal ({reason}); choose another file"
        ) from None
    before = len(_ended(study))
    study.sampler = optuna.samplers.TPESampler(seed=options.seed + before)  # a continued search draws other trials
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
    if not trials or "error" in rows[0]:
        raise InputError(f"--tune: no trial could be run: {next((row['error'] for row in rows), 'all were pruned')}")
    return objective.plan(trials[0].params["candidate"], trials[0].user_attrs["params"]), rows


def check_journal(path: Path) -> None:
    """Raise `InputError` if a file exists that is not a journal of optuna, which would append to it before reading it."""
    if not path.exists():
        return
    try:
        with path.open(encoding="utf-8") as file:
            is_journal = all(isinstance(json.loads(line)["op_code"], int) for line in file)
    except (OSError, ValueError, TypeError, LookupError):
        is_journal = False
    if not is_journal:
        raise InputError(f"--storage: expected a journal of optuna or a new file, got {path}; choose another file")


def _ended(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


class _Objective:
    """Measures a trial on prompts left out: tokens per second over all folds."""

    def __init__(self, plans: Sequence[Plan], arrays: TraceArrays, profile: Profile, fit: Fit, folds: int) -> None:
        self.candidates = {f"{number}: {plan.head.form}, {plan.rule}": plan for number, plan in enumerate(plans)}
        self.arrays, self.profile, self.fit = arrays, profile, fit
        prompts = len(set(arrays.clusters))
        if prompts < folds:
            raise InputError(f"--tune: expected at least {folds} prompts, one for each fold, got {prompts}")
        splits = GroupKFold(folds).split(np.zeros(arrays.sequences), groups=np.asarray(arrays.clusters))
        self.folds = [tuple(arrays.subset(side.tolist()) for side in split) for split in splits]
        self.grids = [fixed_grid(held_out, profile) for _, held_out in self.folds]

    def digest(self) -> str:
        """Return a name of the study that differs for other candidates, traces, profiles and seeds."""
        plans = {
            name: [repr(plan.head), plan.rule, plan.features, plan.hidden, plan.options.seed, plan.options.folds]
            for name, plan in self.candidates.items()
        }
        inputs = (plans, self.arrays.header.to_json(), self.arrays.clusters, self.profile.to_dict(), len(self.folds))
        return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def plan(self, candidate: str, params: Mapping[str, Any]) -> Plan:
        """Return the plan of a candidate with hyper-parameters."""
        plan = self.candidates[candidate]
        return dataclasses.replace(plan, head=clone(plan.head).set_params(**params))

    def __call__(self, trial: optuna.Trial) -> float:
        """Measure a trial; keep its row of the table in optuna's record of it."""
        name, params = trial.suggest_categorical("candidate", [*self.candidates]), {}
        candidate = self.candidates[name]
        # The default parameters are one of the choices.
        if candidate.head.space and not trial.suggest_categorical("default", (True, False)):
            params = candidate.head.search_space(trial)
        if any(trial.params == other.params for other in trial.study.get_trials(states=(TrialState.COMPLETE,))):
            raise optuna.TrialPruned
        texts = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in params.items())
        row: dict[str, Any] = {
            "policy": candidate.head.form,
            "rule": candidate.rule,
            "parameters": ", ".join(texts) or None,
        }
        row |= {"tokens_per_s": 0.0, "ratio_to_best_fixed": 0.0, "folds": 0}
        trial.set_user_attr("params", params)
        # A trial needs a ranking, not the last percent: one head and one pass.
        options = dataclasses.replace(candidate.options, cross_fit=False, passes=1, report_share=0.0)
        plan = dataclasses.replace(self.plan(name, params), options=options)
        tokens, seconds, fixed_tokens, fixed_seconds = 0.0, 0.0, 0.0, np.zeros(len(self.grids[0]))
        try:
            for number, ((training, held_out), grid) in enumerate(zip(self.folds, self.grids, strict=True)):
                policy = self.fit(plan, training, self.profile)
                header = self.arrays.header
                profile = add_decisions(self.profile, [policy], header.vocabulary, header.hidden)
                played = replay(held_out, policy, profile)
                tokens, seconds = tokens + float(played.tokens.sum()), seconds + float(played.seconds.sum())
                fixed_tokens += float(grid[0].tokens.sum())
                # By length; the best of all folds counts.
                fixed_seconds += [float(fixed.seconds.sum()) for fixed in grid]
                rate = tokens / seconds
                ratio = rate * float(fixed_seconds.min()) / fixed_tokens
                row |= {"tokens_per_s": rate, "folds": number + 1, "ratio_to_best_fixed": ratio}
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
