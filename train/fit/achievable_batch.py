"""What a policy of batches could reach that knows all recorded scalars: the rule `batch` on cross-fitted chances.

As the achievable estimate of single streams (`continuation.values`) it decides for nothing, unless a price is given, and each
prompt by models of the other ones. So it is an estimate from below of what these features hold, and hidden states are not
among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.batch_rules import BatchStop, for_batches
from ...policies.contract import Array
from ...policies.features import DRAFT_HIDDEN, HISTORY_FEATURES, TARGET_HIDDEN
from ...policies.heads.base import NO_HIDDEN, Head, Hidden
from ...policies.learned import LearnedPolicy, TrainingMetadata
from ...policies.profile import Profile
from ...policies.rules import BatchRule, Derived
from ..heads import make_head
from ..heads.crossfit import calibrate, fit_folds, held_out_outputs, prompt_folds
from ..heads.rows import Visits, conditional_acceptance
from ..replay.traces.arrays import TraceArrays
from .continuation.values import FOLDS, recorded_scalars
from .rates import Part
from .tuning.batches import settle_batch, solved_rates

NAME = "achievable estimate"


class PrecomputedHead(Head):
    """A head whose scores were computed before, for every anchor and depth: the trace holds them as hidden states."""

    kind = "precomputed"
    sizes: Mapping[str, int] = {TARGET_HIDDEN: 2, DRAFT_HIDDEN: 2}

    def __init__(self) -> None:
        self._tensors = {}

    def scores(self, features: Array, depth: int, hidden: Hidden = NO_HIDDEN) -> Array:
        """See `Head`."""
        return hidden[DRAFT_HIDDEN if depth else TARGET_HIDDEN].astype(np.float64)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Logits of accept and next in the place of recorded hidden states, [N, 2] of anchors or [N, K, 2] of nodes."""

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
    """Return a trace that holds cross-fitted chances of acceptance as well, and the policy of batches that decides by them.

    Args:
        arrays: the dense trace of chains that is reported on.
        profile: what rounds cost, with batches.
        seed: of folds and trees.
        price: of its decisions; rates, and sizes at which nothing is decided, are then settled on the very texts that are
            reported on, so that it decides nowhere where that does not pay. None = they cost nothing.
    """
    # The header forgets recorded hidden states, too: `check_sizes` would hold the two scores below to the models' widths.
    bare = dataclasses.replace(arrays, hidden={}, header=dataclasses.replace(arrays.header, hidden={}))
    names = tuple(name for name in recorded_scalars(arrays) if name not in HISTORY_FEATURES)
    every = Visits.once(torch.arange(len(arrays.accepted)))
    visited = every.part(~arrays.cut)
    fitted = fit_folds(bare, prompt_folds(arrays, FOLDS, seed), names, visited, make_head("xgboost"), seed=seed)
    calibrated = calibrate(held_out_outputs(fitted, bare, names, visited))
    # [N, K + 1, 2]: every fold has a head, so that no anchor is left out and rows stay in order.
    logits = torch.from_numpy(held_out_outputs(fitted, bare, names, every).logits)
    hidden: dict[str, Any] = {TARGET_HIDDEN: _Scores(logits[:, 0]), DRAFT_HIDDEN: _Scores(logits[:, 1:])}
    known = dataclasses.replace(bare, hidden=hidden)
    acceptance = conditional_acceptance(arrays, visited)
    metadata = TrainingMetadata(
        verification=arrays.header.verification, acceptance=acceptance, profile=profile.record(NAME)
    )
    depth = min(arrays.depth, profile.max_depth)
    policy = LearnedPolicy(
        NAME, (), PrecomputedHead(), calibrated.accept, calibrated.next, Derived([0.0] * depth, 1), depth, metadata,
        calibrated.survival,
    )  # fmt: skip
    # Any rule serves until here: `for_batches` puts its own in its place.
    made = for_batches(policy)
    if price is not None:
        return known, settle_batch(made, [Part(known)], profile.with_decisions({made.cost_name: price}))
    rates = solved_rates(made, [Part(known)], profile)  # decisions are free
    return known, for_batches(made, rule=BatchRule(made.rule.send, rates))
