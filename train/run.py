"""`train`: traces in, a policy folder out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..collect.store import Trace
from ..decode.profile import add_decisions
from ..policies.calibration import Calibrator
from ..policies.costs import Profile
from ..policies.errors import InputError, TraceError, close_match
from ..policies.features import feature
from ..policies.files import refuse_full
from ..policies.folder import load_policy_folder, save_policy
from ..policies.heads import Head
from ..policies.learned import Facts, LearnedPolicy
from ..policies.progress import Progress, silent
from ..policies.rules import Derived, Rule, Threshold
from .calibrate import auc, fit_calibrator, log_loss
from .data import TraceArrays, trace_arrays
from .fitting import HEAD_KINDS, FitTask, fitter
from .replay import Replayed, replay
from .rows import FitRows, conditional_acceptance, fit_rows, split_prompts, visits
from .tune import best_of, fixed_grid, solve_rate

FEATURES = ("mean_accepted", "mean_full", "last_accepted", "top1", "noisy_margin", "depth")
"""What heads read unless told otherwise: few, because on a small pair every microsecond of a decision counts."""

HELD_OUT = 0.25
REFERENCES = 5


@dataclass(frozen=True)
class Trained:
    """A trained policy and how its head does on held-out prompts.

    Attributes:
        policy: ready to use.
        path: its folder, or None.
        metrics: rows, log loss and AUC of both outputs, calibration kinds, replayed rate and best fixed rate.
    """

    policy: LearnedPolicy
    path: Path | None
    metrics: dict[str, Any]


def train(
    traces: Trace,
    profile: Profile,
    *,
    head: str = "logistic",
    out: str | Path | None = None,
    rule: str = "derived",
    threshold: float = 0.5,
    features: Sequence[str] | None = None,
    name: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Trained:
    """Fit a stop head on traces, calibrate it on held-out prompts, and give it a stop rule.

    Args:
        traces: from `collect`.
        profile: what rounds cost; the derived rule is solved for it.
        head: "logistic", "mlp" or "xgboost".
        out: the policy folder to write; None keeps the policy in memory.
        rule: "derived" (look-ahead, no threshold), "survival" or "step".
        threshold: of the latter two.
        features: scalar features; by default those that every trace of chains holds.
        name: of the policy; by default the head's.
        seed: of split and fit.
        overwrite: replace what is in `out`.
        progress: see `Progress`.

    Raises:
        InputError: an unknown head or rule, or a folder that is not empty.
        TraceError: the traces lack a feature or have too few prompts.
    """
    if head not in HEAD_KINDS:
        raise InputError(
            f"--head: unknown head {head!r}{close_match(head, HEAD_KINDS)}; expected {', '.join(HEAD_KINDS)}"
        )
    if rule not in ("derived", "survival", "step"):
        raise InputError(f"--rule: expected derived, survival or step, not {rule!r}")
    names = tuple(features or FEATURES)
    for wanted in names:
        feature(wanted)
    folder = refuse_full(Path(out), overwrite=overwrite) if out is not None else None
    arrays = trace_arrays(traces, names)
    if profile.max_depth < arrays.depth:
        raise TraceError(
            f"the profile ends at depth {profile.max_depth}, the trace at {arrays.depth}; measure it deeper"
        )
    fit_side, held_side = (arrays.subset(side) for side in split_prompts(arrays, HELD_OUT, seed))
    seen, seen_held = (visits(side, _reference(side, profile)) for side in (fit_side, held_side))
    rows, held = fit_rows(fit_side, names, seen), fit_rows(held_side, names, seen_held)
    if len(rows) == 0 or not bool(rows.drawn.any()) or len(held) == 0:
        raise TraceError("--traces: no row has a label; collect more prompts or longer texts")
    progress(f"train {head}", 0, 1)
    fitted, files = fitter(head)(FitTask(rows, held, names, seed, progress))
    progress(f"train {head}", 1, 1)
    accept, following, metrics = _calibrate(fitted, held)
    acceptance = conditional_acceptance(fit_side, seen)
    policy = LearnedPolicy(name or head, names, fitted, accept, following, _start_rule(rule, threshold), arrays.depth)
    profile = add_decisions(profile, [policy], traces.header.vocabulary)
    rate = 0.0
    if rule == "derived":
        policy, rate = solve_rate(policy, fit_side, profile, acceptance)
    metrics |= {"prompts": arrays.sequences, "rows": len(rows)}
    metrics |= _held_out_speed(policy, held_side, profile)
    policy.facts = Facts(
        temperature=traces.header.temperature,
        verification=traces.header.verification,
        label=traces.header.label,
        pair=dict(traces.header.pair),
        rho=rate,
        acceptance=acceptance,
        profile=profile.to_dict(),
        provenance={"traces": str(traces.folder), "seed": seed, "specstop": version("specstop")},
        metrics=metrics,
    )
    return Trained(policy, save_policy(policy, folder, files) if folder is not None else None, metrics)


def settle(path: str | Path, traces: Trace, profile: Profile) -> LearnedPolicy:
    """Solve the derived rule of a saved policy again, for another profile, and save it in place.

    `train` estimates what a decision costs where the profile does not say; a policy that has run in the loop is settled
    for what its decisions cost there.

    Args:
        path: the policy folder.
        traces: training traces.
        profile: what rounds cost, this policy's decisions included.
    """
    policy = load_policy_folder(path)
    if policy.rule.kind != "derived":
        return policy
    settled, rate = solve_rate(policy, trace_arrays(traces, policy.features), profile, policy.facts.acceptance)
    settled.facts = dataclasses.replace(policy.facts, rho=rate, profile=profile.to_dict())
    save_policy(settled, path, {file.name: file.read_bytes() for file in Path(path).glob("*.ubj")})
    return settled


def _reference(arrays: TraceArrays, profile: Profile) -> list[Replayed]:
    """Return the replays whose visits heads are fitted on: fixed lengths from just below the best one upwards."""
    grid = fixed_grid(arrays, profile)
    best = grid.index(best_of(grid))
    return grid[max(1, best - 1) : max(1, best - 1) + REFERENCES]


def _calibrate(head: Head, held: FitRows) -> tuple[Calibrator, Calibrator, dict[str, Any]]:
    """Fit both calibrators on held-out rows; return them and the metrics of the outputs."""
    later, opening = head.logits(held.features, 1), head.logits(held.features, 0)
    accept, following = torch.where((held.depth == 0)[:, None], opening, later).unbind(-1)
    metrics: dict[str, Any] = {}
    maps = []
    outputs: tuple[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor], ...] = (
        ("accept", accept, held.accepted, held.drawn),
        ("next", following, held.followed, held.followed_known),
    )
    for label, logits, truth, use in outputs:
        calibrator = fit_calibrator(logits[use], truth[use])
        maps.append(calibrator)
        base = truth[use].double().mean().expand(int(use.sum()))
        metrics |= {
            f"{label}_auc": auc(logits[use], truth[use]),
            f"{label}_log_loss": log_loss(calibrator(logits[use]), truth[use]),
            f"{label}_log_loss_constant": log_loss(base, truth[use]),
            f"{label}_calibration": calibrator.kind,
        }
    return maps[0], maps[1], metrics


def _start_rule(rule: str, threshold: float) -> Rule:
    # Dinkelbach's iteration replaces the thresholds of the derived rule before they are used.
    return Derived([0.0]) if rule == "derived" else Threshold(rule, threshold)


def _held_out_speed(policy: LearnedPolicy, held: TraceArrays, profile: Profile) -> dict[str, float]:
    """Return the replayed rate on held-out prompts and that of the best fixed length there."""
    best = best_of(fixed_grid(held, profile))
    rate = replay(held, policy, profile).rate
    return {
        "held_out_tokens_per_s": rate,
        "held_out_best_fixed_tokens_per_s": best.rate,
        "held_out_ratio_to_best_fixed": rate / best.rate,
    }
