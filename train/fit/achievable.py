"""The achievable estimate: throughput of the best cross-fitted policy on all recorded scalars, decisions free.

For single streams: fitted continuation value. From one anchor everything is known in hindsight: the draft to depth K, which
of its tokens the target accepts, and what each length would have cost to the end of the text (`CostToGo`). For depth
j = K-1, ..., 0, the gain of continuing is the cost of stopping here, less the cost of continuing and then deciding
optimally. It is regressed on what a policy sees at depth j; the policy continues where the regression is above 0 (Longstaff
and Schwartz 2001, for American options). Trees that decide have never seen the prompt. Then all is repeated with the
cost-to-go under this policy.

For batches: the rule `batch` on cross-fitted acceptance probabilities.

Both are estimates from below of what the features hold, because more prompts would fit better models. Hidden states are not
among the features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xgboost as xgb
from torch import Tensor

from ...policies.batch_rules import BatchStop, for_batches
from ...policies.contract import Array
from ...policies.features import CHAIN_FEATURES, DRAFT_HIDDEN, HISTORY_FEATURES, TARGET_HIDDEN, TOKEN_FEATURES
from ...policies.heads.base import NO_HIDDEN, Head, Hidden
from ...policies.learned import LearnedPolicy, TrainingMetadata
from ...policies.profile import Profile
from ...policies.rules import BatchRule, Derived
from ..heads import make_head
from ..heads.crossfit import Folds, calibrate, fit_folds, held_out_outputs, prompt_folds
from ..heads.rows import Visits, conditional_acceptance
from ..replay.bounds.cost_to_go import CostToGo
from ..replay.traces.arrays import TraceArrays, seen_features
from .batch_rules import settle_batch, solve_batch_rates
from .rules import Part

NAME = "achievable estimate"

TREES = {"max_depth": 4, "eta": 0.1, "min_child_weight": 40.0, "subsample": 0.8, "lambda": 5.0}
TREE_COUNT = 60
CLIP = 6.0
"""Tokens at which a label is cut: a text that runs on for long says little about the next one."""

ITERATIONS = 2
FOLDS = 4

LATEST = 3
"""Latest first decision that is tried."""

UNVISITED = 0.2
"""Weight of an anchor that the policy does not visit, against 1 for a visited one."""


@dataclass(frozen=True)
class Achievable:
    """Optimal stopping on a trace, decided by models that have not seen the prompt.

    With free decisions it is a limit for policies that are fitted on as many prompts.

    Attributes:
        seconds: [S] of the texts.
        rate: tokens per second.
        lengths, decisions: [N] the length of the round from each anchor, and the number of its decisions.
    """

    seconds: Tensor
    rate: float
    lengths: Tensor
    decisions: Tensor


def backward(
    costs: CostToGo, seen: Tensor, folds: Folds, weight: Tensor, value: Tensor, price: float, seed: int = 0,
    firsts: Sequence[int] = tuple(range(LATEST + 1)),
) -> Achievable:  # fmt: skip
    """Regress the gain of continuing, from the deepest decision to the first; return the fastest first decision's rounds.

    Args:
        costs: of the trace.
        seen: [N, K + 1, F] what is seen from each anchor at each depth.
        folds: of the prompts.
        weight: [N] of the anchors.
        value: [N + 1] cost-to-go in seconds after the round (`CostToGo.value`).
        price: seconds of a decision.
        seed: of the trees.
        firsts: first decisions to choose from.
    """
    arrays = costs.arrays
    stop = costs.outcomes(value)  # [N, K + 1]
    # Differences in seconds become tokens at the rate of the policy that has the cost-to-go `value`.
    rho = float(arrays.text_tokens.sum() / (value[arrays.offset].sum() + 1e-12))
    fold, cut = folds.of[arrays.owner], arrays.cut
    # At each j: the length of a round that continues from j and decides from j + 1 on, and its decisions after j.
    length, decisions = costs.bound.clone(), torch.zeros(len(cut))
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for j in range(costs.depth - 1, -1, -1):
        is_open = costs.bound > j
        later = stop.gather(1, length[:, None])[:, 0] + price * decisions
        gain = (rho * (stop[:, j] - later)).float()
        predicted = torch.zeros(len(cut))
        # Cut rounds say little about stopping: they are decided, but not fitted on.
        for one in range(folds.count):
            use, own = is_open & ~cut & (fold != one), is_open & (fold == one)
            if bool(use.any()) and bool(own.any()):
                predicted[own] = _boosted(seen[use, j], gain[use], weight[use], seen[own, j], seed)
        continues = predicted > 0
        length = torch.where(is_open & ~continues, j, length)
        decisions = torch.where(is_open, torch.where(continues, decisions, 0.0) + 1.0, 0.0)
        # Rounds that decide from depth j on are complete now: what comes before is drafted without a decision.
        if j in firsts:
            seconds = costs.play(length, price * decisions.numpy()).seconds
            if best is None or float(seconds.sum()) < float(best[2].sum()):
                best = length, decisions, seconds
    assert best is not None
    length, decisions, seconds = best
    return Achievable(seconds, float(arrays.text_tokens.sum() / seconds.sum()), length, decisions)


def _boosted(x: Tensor, gain: Tensor, weight: Tensor, new: Tensor, seed: int) -> Tensor:
    """Return [M] predictions for rows `new` [M, F] by boosted regression trees fitted on rows x."""
    options = {**TREES, "objective": "reg:squarederror", "base_score": 0.0, "tree_method": "hist", "seed": seed,
               "nthread": torch.get_num_threads()}  # fmt: skip
    matrix = xgb.DMatrix(x.numpy(), gain.clamp(-CLIP, CLIP).numpy(), weight=weight.numpy())
    return torch.from_numpy(
        xgb.train(options, matrix, TREE_COUNT, verbose_eval=False).predict(xgb.DMatrix(new.numpy()))
    )


def achievable_estimate(
    arrays: TraceArrays,
    profile: Profile,
    features: Sequence[str] | None = None,
    extra: Tensor | None = None,
    seed: int = 0,
) -> Achievable:
    """Estimate what a policy that knows all recorded scalars could reach on a trace if decisions were free.

    Args:
        arrays: the trace that is reported on.
        profile: what rounds cost.
        features: scalars; by default all in the trace, those of the depth before, and HISTORY.
        extra: [N, K + 1, E] more columns, such as outputs of other heads.
        seed: of folds and trees.
    """
    costs = CostToGo(arrays, profile)
    names = tuple(features) if features is not None else recorded_scalars(arrays)
    folds = prompt_folds(arrays, FOLDS, seed)
    length, played = costs.fixed()
    lengths = torch.full_like(costs.bound, length)
    best: Achievable | None = None
    for _ in range(ITERATIONS):
        seen = seen_features(arrays, names, torch.arange(len(lengths)), played.history)
        if features is None:  # also the depth before, which a policy may remember
            seen = torch.cat([seen, torch.nn.functional.pad(seen[:, :-1], (0, 0, 1, 0))], -1)
        if extra is not None:
            seen = torch.cat([seen, extra], -1)
        weight = played.visits.float().clamp_min(UNVISITED)
        found = backward(costs, seen, folds, weight, costs.value(lengths), 0.0, seed)
        # The next iteration uses the cost-to-go and HISTORY features of this policy.
        lengths, played = found.lengths, costs.play(found.lengths)
        best = found if best is None or found.rate > best.rate else best
    assert best is not None
    return best


def recorded_scalars(arrays: TraceArrays) -> tuple[str, ...]:
    """Return all scalars that a policy can read on this trace: the recorded ones and HISTORY."""
    columns = arrays.columns
    node = [name for name in CHAIN_FEATURES if name in columns and name != "depth"]
    anchor = [name for name in arrays.header.anchor_features if name in columns and name not in TOKEN_FEATURES]
    return (*anchor, *node, *HISTORY_FEATURES, "depth")


# Batches


class PrecomputedHead(Head):
    """A head with scores of every anchor and depth that were computed before; the trace holds them as hidden states."""

    kind = "precomputed"
    sizes: Mapping[str, int] = {TARGET_HIDDEN: 2, DRAFT_HIDDEN: 2}

    def __init__(self) -> None:
        self._tensors = {}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """See `Head`."""
        return hidden[DRAFT_HIDDEN if depth else TARGET_HIDDEN].astype(np.float64)


@dataclass(frozen=True)
class _Scores:
    """Logits of accept and next as recorded hidden states: [N, 2] of anchors or [N, K, 2] of nodes."""

    values: Tensor
    width: int = 2

    @property
    def of_nodes(self) -> bool:
        return self.values.dim() == 3

    def at(self, row: Tensor, node: Tensor | None = None) -> Tensor:
        return self.values[row, node] if self.of_nodes else self.values[row]


def achievable_in_batches(
    arrays: TraceArrays, profile: Profile, seed: int = 0, price: float | None = None
) -> tuple[TraceArrays, BatchStop]:
    """Return a trace with cross-fitted acceptance probabilities, and the policy of batches that decides by them.

    Args:
        arrays: the dense trace of chains that is reported on.
        profile: what rounds cost, with batches.
        seed: of folds and trees.
        price: seconds of a decision. Rates and sizes without decisions are then chosen on the reported texts, so that it
            decides only where that pays. None = decisions are free.
    """
    # The header forgets recorded hidden states too: `check_sizes` would compare the two scores with the models' widths.
    bare = dataclasses.replace(arrays, hidden={}, header=dataclasses.replace(arrays.header, hidden={}))
    names = tuple(name for name in recorded_scalars(arrays) if name not in HISTORY_FEATURES)
    every = Visits.once(torch.arange(len(arrays.accepted)))
    visited = every.part(~arrays.cut)
    fitted = fit_folds(bare, prompt_folds(arrays, FOLDS, seed), names, visited, make_head("xgboost"), seed=seed)
    calibrated = calibrate(held_out_outputs(fitted, bare, names, visited))
    # [N, K + 1, 2]: every fold has a head, so no anchor is missing and rows stay in order.
    logits = torch.from_numpy(held_out_outputs(fitted, bare, names, every).logits)
    hidden: dict[str, Any] = {TARGET_HIDDEN: _Scores(logits[:, 0]), DRAFT_HIDDEN: _Scores(logits[:, 1:])}
    scored = dataclasses.replace(bare, hidden=hidden)
    metadata = TrainingMetadata(
        verification=arrays.header.verification,
        acceptance=conditional_acceptance(arrays, visited),
        profile=profile.record(NAME),
    )
    depth = min(arrays.depth, profile.max_depth)
    # `for_batches` replaces the rule.
    policy = LearnedPolicy(
        NAME, (), PrecomputedHead(), calibrated.accept, calibrated.next, Derived([0.0] * depth, 1), depth, metadata,
        calibrated.survival,
    )  # fmt: skip
    stop = for_batches(policy)
    if price is not None:
        return scored, settle_batch(stop, [Part(scored)], profile.with_decisions({stop.cost_name: price}))
    rates = [(size, times) for size, (_, times) in solve_batch_rates(stop, [Part(scored)], profile).items()]
    return scored, for_batches(stop, rule=BatchRule(stop.rule.send, rates))
