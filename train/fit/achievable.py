"""The achievable estimate: throughput of the best cross-fitted policy on all recorded scalars, decisions free.

Acceptance probabilities of every anchor and depth come from boosted trees that were fitted without the prompt. The derived
rule, or for batches the rule `batch`, decides by them. Its few settings are chosen on the reported texts. The estimate is a
lower bound of the value of all features: more prompts would fit better models, and hidden states are not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.batch_rules import BatchStop, for_batches
from ...policies.contract import Array
from ...policies.features import CHAIN_FEATURES, DRAFT_HIDDEN, HISTORY_FEATURES, TARGET_HIDDEN, TOKEN_FEATURES
from ...policies.heads.base import NO_HIDDEN, Head, Hidden
from ...policies.learned import LearnedPolicy, TrainingMetadata
from ...policies.profile import Profile
from ...policies.rules import BatchRule, Derived
from ..heads import make_head
from ..heads.calibration import calibrate
from ..heads.crossfit import fit_folds, held_out_outputs, prompt_folds
from ..heads.rows import Visits, conditional_acceptance
from ..replay.arrays import TraceArrays
from ..replay.rounds import Rounds
from ..replay.run import replay
from .batch_rules import solve_batch_rates
from .rules import Part, best_of, fixed_grid, solve_derived

NAME = "achievable estimate"
FOLDS = 4

ITERATIONS = 2
"""Fits, because HISTORY features depend on the rounds of the policy."""


def achievable_estimate(arrays: TraceArrays, profile: Profile, seed: int = 0) -> Rounds:
    """Return the replay of a policy that knows all recorded scalars and decides for free.

    Args:
        arrays: the dense trace of chains that is reported on.
        profile: what rounds cost.
        seed: of folds and trees.
    """
    free = profile.with_decisions({NAME: 0.0})
    played = [best_of(fixed_grid(arrays, profile))]
    names = (*recorded_scalars(arrays), *HISTORY_FEATURES)
    for _ in range(ITERATIONS):
        scored, policy = _cross_fitted(arrays, profile, names, _history(arrays, played[-1]), seed)
        solved, _ = solve_derived(policy, scored, free, policy.metadata.acceptance)
        played.append(replay(scored, solved, free))
    return best_of(played[1:])


def achievable_in_batches(arrays: TraceArrays, profile: Profile, seed: int = 0) -> tuple[TraceArrays, BatchStop]:
    """Return a trace with cross-fitted acceptance probabilities, and the policy of batches that decides by them.

    Args:
        arrays: the dense trace of chains that is reported on.
        profile: what rounds cost, with batches.
        seed: of folds and trees.
    """
    every = torch.zeros(len(arrays.accepted), len(HISTORY_FEATURES))
    scored, policy = _cross_fitted(arrays, profile, recorded_scalars(arrays), every, seed)
    stop = for_batches(policy)
    rates = [(size, times) for size, (_, times) in solve_batch_rates(stop, [Part(scored)], profile).items()]
    return scored, for_batches(stop, rule=BatchRule(stop.rule.send, rates))


def recorded_scalars(arrays: TraceArrays) -> tuple[str, ...]:
    """Return all scalars of this trace that a policy can read, and the depth."""
    columns = arrays.columns
    node = [name for name in CHAIN_FEATURES if name in columns and name != "depth"]
    anchor = [name for name in arrays.header.anchor_features if name in columns and name not in TOKEN_FEATURES]
    return (*anchor, *node, "depth")


def _history(arrays: TraceArrays, played: Rounds) -> Tensor:
    """Return [N, 4], the HISTORY features at each anchor; inside a round, those of the round."""
    assert played.history is not None
    row = arrays.offset[played.sequence] + played.anchor - arrays.first_anchor[played.sequence]
    history = torch.zeros(len(arrays.accepted), played.history.shape[1])
    history[row] = played.history
    begins = torch.zeros(len(history), dtype=torch.int64)
    begins[row] = row
    return history[begins.cummax(0).values]  # each text begins with a round


def _cross_fitted(
    arrays: TraceArrays, profile: Profile, names: Sequence[str], history: Tensor, seed: int
) -> tuple[TraceArrays, LearnedPolicy]:
    """Return the trace with the scores of heads that were fitted without the prompts, and a policy that reads them."""
    # The header forgets recorded hidden states too: `check_sizes` would compare the two scores with the models' widths.
    bare = dataclasses.replace(arrays, hidden={}, header=dataclasses.replace(arrays.header, hidden={}))
    every = Visits(torch.arange(len(arrays.accepted)), history)
    visited = every.part(~arrays.cut)
    fitted = fit_folds(bare, prompt_folds(arrays, FOLDS, seed), names, visited, make_head("xgboost"), seed=seed)
    calibrated = calibrate(held_out_outputs(fitted, bare, names, visited))
    # [N, K + 1, 2]: every fold has a head, so no anchor is missing and rows stay in order.
    logits = torch.from_numpy(held_out_outputs(fitted, bare, names, every).logits)
    hidden: dict[str, Any] = {TARGET_HIDDEN: _Scores(logits[:, 0]), DRAFT_HIDDEN: _Scores(logits[:, 1:])}
    metadata = TrainingMetadata(
        verification=arrays.header.verification,
        acceptance=conditional_acceptance(arrays, visited),
        profile=profile.record(NAME),
    )
    depth = min(arrays.depth, profile.max_depth)
    policy = LearnedPolicy(
        NAME, (), PrecomputedHead(), calibrated.accept, calibrated.next, Derived([0.0] * depth, 1), depth, metadata,
        calibrated.survival,
    )  # fmt: skip
    return dataclasses.replace(bare, hidden=hidden), policy


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
