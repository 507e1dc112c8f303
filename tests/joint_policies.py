"""Policies that compare the streams of a batch, with costs that rise linearly and in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from specstop.policies.batch_rules import BatchStop, for_batches
from specstop.policies.contract import Array, StopPolicy
from specstop.policies.costs import CostTable
from specstop.policies.features import feature
from specstop.policies.heads import build_head
from specstop.policies.heads.base import Head
from specstop.policies.learned import Calibrator, LearnedPolicy, TrainingMetadata
from specstop.policies.profile import Profile
from specstop.policies.published.adaptive_verification import AdaptiveVerification
from specstop.policies.published.load import LoadLength
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.published.tetris import Tetris
from specstop.policies.rules import Derived

MOST = 3
LINEAR = tuple(1.0 + 0.08 * n for n in range(16))
STEPPED = tuple(1.0 + 0.9 * (n >= 3) + 0.9 * (n >= 5) for n in range(16))
"""Seconds of verifying n drafted tokens, n = 0, 1, ..., of all streams of a batch together."""

COSTS = {"linear": LINEAR, "stepped": STEPPED}


def synthetic_profile(verify_s: Sequence[float] = LINEAR, draft_s: float = 0.02) -> Profile:
    """Return a profile of these costs, equal at all contexts."""
    sides = (CostTable(at, (draft_s, draft_s), 0.0, tuple(verify_s)) for at in (10.0, 1000.0))
    return Profile(*sides, 0.0, 0.0, (0.0, 0.0))


def linear_head(names: tuple[str, ...], weight: Array, bias: Sequence[float] = (0.0, 0.0, 0.0)) -> Head:
    """Return a logistic head on features and log-odds [W] that are not scaled, from [3, W] weights."""
    count = np.shape(weight)[1]
    tensors = {"mean": np.zeros(count), "scale": np.ones(count), "weight": weight, "bias": bias}
    return build_head("logistic", names, {name: np.array(values, np.float32) for name, values in tensors.items()})


def batch_policy(
    costs: str = "linear", send: str = "best", names: Sequence[str] = ("top1", "mean_accepted"), depth: int = MOST
) -> BatchStop:
    """Return a policy under the rule `batch` with predictions that increase with the largest probability."""
    columns = len(names) + sum(feature(name).is_probability for name in names)
    weight = np.zeros((3, columns))
    weight[:2, 0], weight[2, -1] = 3.0, 0.4
    head = linear_head(tuple(names), weight, (-1.0, -1.5, 0.4))
    facts = TrainingMetadata(1.0, acceptance=(0.6,) * depth, profile=synthetic_profile(COSTS[costs]).to_dict())
    maps = Calibrator(), Calibrator()
    return for_batches(LearnedPolicy("mine", names, head, *maps, Derived([0.1] * depth), depth, facts), send)


JOINT: dict[str, Callable[[], StopPolicy]] = {
    "load": partial(LoadLength, "1:3,2:2,3:1"),
    "tetris": partial(Tetris, 1, 2),
    **{
        f"smartspec {name}": partial(SmartSpec, profile=synthetic_profile(COSTS[name]), max_depth=MOST)
        for name in COSTS
    },
    **{
        f"adaptive {name}": partial(AdaptiveVerification, MOST, profile=synthetic_profile(COSTS[name]))
        for name in COSTS
    },
    **{
        f"batch {send} {costs}": partial(batch_policy, costs, send, names)
        for costs in COSTS
        for send, names in (("best", ("top1", "mean_accepted")), ("all", ("drawn_prob", "mean_accepted")))
    },
}
"""One policy of each kind. Of those that omit drawn tokens, all but TETRIS read only PRE features."""
