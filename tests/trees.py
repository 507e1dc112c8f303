"""Small tree policies with random weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specstop.policies.features import feature
from specstop.policies.heads import build_head
from specstop.policies.learned import PathCalibrator, TreeGain
from specstop.policies.tree_rules import TreeRule

FEATURES = ("mean_accepted", "top1", "drawn_prob", "noisy_margin", "noisy_lead", "branch_rank")
FREE = ("top1", "entropy", "branch_rank", "depth", "mean_accepted")
"""Features that do not depend on the drawn token: with these `rejection` lets a policy leave tokens out."""

BELOW = ((3,), (2, 1, 0), (2, 1, 0), (1, 0, 0), (1,), (0,))
"""Children by depth and branch of the tree parents:-1,-1,-1,0,0,1,3,3,4,6,9."""


def make_tree_policy(
    features: Sequence[str] = FEATURES, depth: int = 5, first: int = 1, rate: float = 120.0, verify_s: float = 4e-4,
    floor: float = 0.0,
) -> TreeGain:  # fmt: skip
    """Return a policy whose answers depend on all of its `features`; `depth` is K, `verify_s` the seconds of a node."""
    generator = torch.Generator().manual_seed(5)
    width = len(features) + sum(feature(name).is_probability for name in features)
    tensors = {
        "mean": 0.3 * torch.rand(width, generator=generator),
        "scale": 0.7 + torch.rand(width, generator=generator),
        "weight": 0.8 * torch.randn(3, width, generator=generator),
        "bias": torch.tensor([0.6, 0.4, 0.5]),
    }
    weights = {name: values.numpy() for name, values in tensors.items()}
    shifts = 0.3 * torch.randn(depth + 1, 3, generator=generator)
    maps = [
        PathCalibrator(torch.cat([0.9 + 0.05 * at + torch.zeros(depth + 1, 1), 0.1 * shifts[:, :1], shifts], 1).numpy())
        for at in range(2)
    ]
    rule = TreeRule(
        rate, 1.1e-3, [1.0e-3, 1.2e-3, 1.4e-3], [4e-3 + verify_s * n for n in range(12)],
        [0.7 - 0.03 * d for d in range(depth)], [(-1.5, 0.2), (-2.2, 0.1)], BELOW[: depth + 1], first, 0.8, floor=floor,
    )  # fmt: skip
    return TreeGain("tree", features, build_head("logistic", features, weights), *maps, rule, depth)
