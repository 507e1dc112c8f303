"""The speed of a trained policy on prompts that nothing of it was fitted on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...policies.latency.profile import Profile
from ...policies.learned.policy import LearnedPolicy
from ..heads.crossfit import Calibrated, FoldHeads, calibrate, held_out_outputs
from ..heads.rows import Visits
from ..replay.run import replay
from ..replay.traces.arrays import TraceArrays
from .tuning.rates import fixed_grid


def held_out_speed(played: Sequence[tuple[LearnedPolicy, TraceArrays]], profile: Profile) -> dict[str, float]:
    """Return the replayed rate on held-out prompts and that of the best fixed length there; nothing where there are none.

    Args:
        played: prompts in parts, and the policy that plays each of them.
        profile: what rounds cost.
    """
    if not played:
        return {}
    mine = [replay(arrays, policy, profile) for policy, arrays in played]
    grids = [fixed_grid(arrays, profile) for _, arrays in played]
    rate, *fixed = (
        float(sum(float(one.tokens.sum()) for one in of) / sum(float(one.seconds.sum()) for one in of))
        for of in (mine, *zip(*grids, strict=True))
    )
    return {
        "held_out_tokens_per_s": rate,
        "held_out_best_fixed_tokens_per_s": max(fixed),
        "held_out_ratio_to_best_fixed": rate / max(fixed),
    }


def fitted_without(
    policy: LearnedPolicy, fitted: FoldHeads, calibrated: Calibrated, arrays: TraceArrays, visited: Visits
) -> Iterator[tuple[LearnedPolicy, TraceArrays]]:
    """Yield the prompts of the first fold, each part with the policy as it would be calibrated without them.

    What is kept is calibrated on all prompts that some head had not seen, these among them.

    Args:
        policy: whose head was fitted without the first fold.
        fitted: the heads of all folds; where there is the first alone, one half of its prompts serves the other, and nothing
            is yielded if it has one prompt.
        calibrated: as the policy is.
        arrays: traces.
        visited: the rounds that it was calibrated on.
    """
    held, owner = fitted.folds.sequences(0), arrays.owner[visited.row]
    parts = [held]
    if len(fitted.heads) == 1:
        names = sorted({arrays.prompt_ids[sequence] for sequence in held})
        parts = [[s for s in held if names.index(arrays.prompt_ids[s]) % 2 == side] for side in (0, 1)]
        if len(names) == 1:  # with nothing to calibrate on but itself
            return
    for part in parts:
        others = visited.part(~torch.isin(owner, torch.tensor(part)))
        again = calibrate(held_out_outputs(fitted, arrays, policy.features, others), like=calibrated)
        made = policy.head, again.accept, again.next, policy.rule, policy.max_depth, policy.facts, again.tables
        yield type(policy)(policy.name, policy.features, *made), arrays.subset(part)
