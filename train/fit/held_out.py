"""Figures of a trained policy on report prompts, which influenced nothing in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...policies.heads.base import Head
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ..heads.calibration import Scored, auc, log_loss, survival, survival_scores
from ..heads.crossfit import FoldHeads, Folds, calibrated_accept, held_out_outputs, labelled_rows
from ..heads.rows import Visits, split_prompts, visits
from ..replay.run import replay
from ..replay.traces.arrays import TraceArrays
from .tuning.rates import fixed_grid

REPORT_SHARE = 0.2
"""Share of the prompts that is held out from fitting and selection."""


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
    # Another hash than that of the folds: otherwise the report prompts would all come from one end of their order.
    rest, report = split_prompts(arrays, share, seed + 1)
    return arrays.subset(rest), arrays.subset(report)


def training_prompts(
    arrays: TraceArrays, folds: Folds, report: TraceArrays | None = None, mixed: TraceArrays | None = None
) -> dict[str, list[str]]:
    """Return the prompts of each set (`Facts.prompts`).

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


def held_out_speed(policy: LearnedPolicy, report: TraceArrays, profile: Profile) -> dict[str, float]:
    """Return the replayed rate on report prompts, and that of the best fixed length there."""
    rate = replay(report, policy, profile).rate
    best = max(one.rate for one in fixed_grid(report, profile))
    return {
        "held_out_tokens_per_s": rate,
        "held_out_best_fixed_tokens_per_s": best,
        "held_out_ratio_to_best_fixed": rate / best,
    }


def head_scores(
    policy: LearnedPolicy, head: Head, report: TraceArrays, profile: Profile, seed: int = 0
) -> Mapping[str, Any]:
    """Return AUC and log loss of both outputs, and the calibration of survival by depth, on report prompts.

    Args:
        policy: with its calibration; figures are of the rounds that it plays.
        head: of the policy.
        report: prompts that influenced nothing.
        profile: what rounds cost.
        seed: of the simulation behind `ece_perfect`.
    """
    if report.only_positions:
        visited = Visits.once((~report.cut).nonzero()[:, 0])
    else:
        visited = visits(report, [replay(report, policy, profile)])
    alone = FoldHeads((head,), Folds(torch.zeros(report.sequences, dtype=torch.int64), 1), {}, 0)
    outputs = held_out_outputs(alone, report, policy.features, visited)
    if not len(outputs.length):
        return {}
    metrics: dict[str, Any] = {"held_out_rounds": len(outputs.length)}
    for rows, calibrator in zip(labelled_rows(outputs), (policy.accept, policy.next), strict=True):
        if len(rows.labels):
            constant = np.full(len(rows.labels), rows.labels.mean())
            metrics |= {
                f"{rows.name}_auc": auc(rows.logits, rows.labels),
                f"{rows.name}_log_loss": log_loss(calibrator(rows.logits), rows.labels),
                f"{rows.name}_log_loss_constant": log_loss(constant, rows.labels),
            }
    predicted = survival(calibrated_accept(policy.accept, outputs), policy.survival)
    scored = Scored(predicted, outputs.length, outputs.temperature, outputs.drawn)
    return {**metrics, "reliability": survival_scores(scored, seed=seed)}


def counts(prompts: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the number of prompts in each set."""
    return {f"{name}_prompts": len(names) for name, names in prompts.items()}
