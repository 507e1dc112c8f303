"""Fitted continuation value: when to stop drafting, by backward regression on traces of full depth.

From one anchor everything is known in hindsight: the draft to depth K, what of it the target accepts, and what each length
would have cost to the end of the text (`CostToGo`). So for depth j = K-1, ..., 0: the gain of drafting on is what stopping
here takes, less what going on and then deciding as well as one can takes, decisions paid for; regress it on what a policy
sees at depth j, and draft on where the regression says above 0 (Longstaff and Schwartz 2001, for American options).
Predictions that decide are always of trees that have not seen the prompt. Then the whole is done again with the cost-to-go
under this very policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....policies.features import CHAIN_FEATURES, HISTORY_FEATURES, TOKEN_FEATURES
from ....policies.profile import Profile
from ...heads.continuation import ValueRows, boost
from ...heads.crossfit import Folds, prompt_folds
from ...replay.bounds.cost_to_go import CostToGo
from ...replay.traces.arrays import TraceArrays, seen_features

STAGE_TREES = 60
ROUNDS = 2
"""Of policy iteration, for the estimate of what can be reached."""

FOLDS = 4
LATEST = 3
"""Latest first decision that is tried."""

UNVISITED = 0.2
"""Weight of an anchor that the policy does not visit, against 1 for each time that it does."""


@dataclass(frozen=True)
class Stages:
    """Optimal stopping on a trace, decided by models that have not seen the prompt.

    Attributes:
        gain: [N, K] tokens that drafting on from depth j saved in hindsight, deciding from j + 1 on.
        value: [N, K] what was predicted of it.
        first: the first decision that pays best.
        lengths, asked: [N] the length of a round from each anchor, and how often it was decided on.
        seconds: [S] of the texts under these rounds.
        rate: tokens per second of them.
    """

    gain: Tensor
    value: Tensor
    first: int
    lengths: Tensor
    asked: Tensor
    seconds: Tensor
    rate: float


def backward(
    costs: CostToGo, seen: Tensor, folds: Folds, weight: Tensor, value: Tensor, price: float, seed: int = 0,
    firsts: Sequence[int] = tuple(range(LATEST + 1)),
) -> Stages:  # fmt: skip
    """Regress the gain of drafting on, from the deepest decision to the first.

    Args:
        costs: of the trace.
        seen: [N, K + 1, F] what is seen from each anchor at each depth.
        folds: of the prompts.
        weight: [N] of the anchors.
        value: [N + 1] cost-to-go in seconds after the round (`CostToGo.value`).
        price: of decisions.
        seed: of the trees.
        firsts: first decisions to choose from.
    """
    arrays, deepest = costs.arrays, costs.depth
    stop = costs.outcomes(value)
    # Differences in seconds become tokens at the rate of the policy whose cost-to-go `value` is.
    rho = float(arrays.text_tokens.sum() / (value[arrays.offset].sum() + 1e-12))
    fold, cut = folds.of[costs.arrays.owner], arrays.cut
    gain, predicted = (torch.zeros(len(cut), deepest) for _ in range(2))
    # At each j: the length of a round that goes on from j, deciding from j + 1 on, and how often it is decided on after j.
    length, asked = costs.bound.clone(), torch.zeros(len(cut))
    best: tuple[float, int, Tensor, Tensor, Tensor] | None = None
    for j in range(deepest - 1, -1, -1):
        open_ = costs.bound > j
        later = stop.gather(1, length[:, None])[:, 0] + price * asked  # what opens a round's decisions is spent by now
        gain[:, j] = (rho * (stop[:, j] - later)).float()
        # Cut rounds say little about stopping: they are decided on, not fitted on.
        for one in range(folds.count):
            use, mine = open_ & ~cut & (fold != one), open_ & (fold == one)
            if bool(use.any()) and bool(mine.any()):
                model = boost(seen[use, j], gain[use, j], weight[use], seed, STAGE_TREES)
                predicted[mine, j] = scored(model, seen[mine, j])
        on = predicted[:, j] > 0
        length = torch.where(open_ & ~on, j, length)
        asked = torch.where(open_, torch.where(on, asked, 0.0) + 1.0, 0.0)  # once here, and later only if it goes on
        # Rounds decided from depth j on are complete here: what comes before is drafted without a decision.
        if j in firsts:
            seconds = costs.play(length, price * asked.numpy()).seconds
            if best is None or float(seconds.sum()) < best[0]:
                best = float(seconds.sum()), j, length, asked, seconds
    assert best is not None
    total, first, length, asked, seconds = best
    return Stages(gain, predicted, first, length, asked, seconds, float(arrays.text_tokens.sum()) / total)


def scored(model: object, x: Tensor) -> Tensor:
    """Return [M] tokens that a booster of `boost` predicts."""
    import xgboost as xgb

    assert isinstance(model, xgb.Booster)
    return torch.from_numpy(model.predict(xgb.DMatrix(x.numpy()))) - 0.5  # the shift of `boost`'s labels


def asked_rows(costs: CostToGo, first: int) -> tuple[Tensor, Tensor]:
    """Return [M] anchors and [M] depths that can be asked at from depth `first` on, those of cut rounds left out."""
    depth = torch.arange(costs.depth)[None]
    open_ = (costs.bound[:, None] > depth) & (depth >= first) & ~costs.arrays.cut[:, None]
    at, j = open_.nonzero(as_tuple=True)
    return at, j


def value_rows(stages: Stages, costs: CostToGo, seen: Tensor, visits: Tensor) -> ValueRows:
    """Return the rows that a deployed head is fitted on: all depths that can be asked at, by how often they are.

    Args:
        stages: labels, and how far each round goes.
        costs: of the trace.
        seen: [N, K + 1, F].
        visits: [N] bool, whether the policy visits.
    """
    reached = stages.lengths[:, None] >= torch.arange(costs.depth)
    # Twice: anchors that the policy passes over count less, and so do depths that its rounds do not reach.
    weight = visits[:, None].float().clamp_min(UNVISITED) * torch.where(reached, 1.0, UNVISITED)
    at, j = asked_rows(costs, stages.first)
    return ValueRows(seen[at, j], j, stages.gain[at, j], weight[at, j].float())


@dataclass(frozen=True)
class Achievable:
    """What the best policy on all scalars would do, decisions for nothing: a limit for any that is fitted on as much.

    Attributes:
        seconds: [S] of the texts.
        rate: tokens per second.
        lengths: [N] of the round from each anchor.
    """

    seconds: Tensor
    rate: float
    lengths: Tensor


def achievable_estimate(
    arrays: TraceArrays,
    profile: Profile,
    features: Sequence[str] | None = None,
    extra: Tensor | None = None,
    seed: int = 0,
) -> Achievable:
    """Estimate what could be reached on a trace by a policy that knows all recorded scalars and decides for nothing.

    The best cross-fitted continuation value: each prompt is decided on by models of the other ones. It is an estimate from
    below of what these features hold, since more prompts would fit better models; and hidden states are not among them.

    Args:
        arrays: the trace that is reported on.
        profile: what rounds cost.
        features: scalars; by default all that the trace has, with those of the depth before, and HISTORY.
        extra: [N, K + 1, E] more columns, such as outputs of other heads.
        seed: of folds and trees.
    """
    costs = CostToGo(arrays, profile)
    names = tuple(features) if features is not None else recorded_scalars(arrays)
    folds = prompt_folds(arrays, FOLDS, seed)
    length, played = costs.fixed()
    lengths = torch.full_like(costs.bound, length)
    best: Stages | None = None
    for _ in range(ROUNDS):  # the fastest counts
        seen = seen_features(arrays, names, torch.arange(len(lengths)), played.history)
        if features is None:  # the depth before, which a policy may remember
            seen = torch.cat([seen, torch.nn.functional.pad(seen[:, :-1], (0, 0, 1, 0))], -1)
        if extra is not None:
            seen = torch.cat([seen, extra], -1)
        weight = played.visits.float().clamp_min(UNVISITED)
        stages = backward(costs, seen, folds, weight, costs.value(lengths), 0.0, seed)
        # The next turn's cost-to-go and HISTORY features are those of this policy.
        lengths, played = stages.lengths, costs.play(stages.lengths)
        if best is None or stages.rate > best.rate:
            best = stages
    assert best is not None
    return Achievable(best.seconds, best.rate, best.lengths)


def recorded_scalars(arrays: TraceArrays) -> tuple[str, ...]:
    """Return all scalars that a policy could have read on this trace: recorded ones and HISTORY."""
    have = arrays.columns
    node = [name for name in CHAIN_FEATURES if name in have and name != "depth"]
    anchor = [name for name in arrays.header.anchor_features if name in have and name not in TOKEN_FEATURES]
    return (*anchor, *node, *HISTORY_FEATURES, "depth")
