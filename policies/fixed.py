"""Rules that need no training: a fixed length, and a threshold on one feature."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arguments import validate_int, validate_number
from .contract import Array, DraftStep, State, StopPolicy


class FixedLength(StopPolicy):
    """Draft the same number of tokens each round; 0 is plain decoding (Leviathan et al. 2023, arXiv 2211.17192).

    It is never called: drafting reaches `first` without a decision and ends at `max_depth`.
    """

    def __init__(self, length: int = 4) -> None:
        self.max_depth = self.first = validate_int("fixed", "length", length, 0)
        self.name = f"fixed:{length}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep every branch above the length."""
        return step.alive & (step.depth < self.max_depth), state


def fixed_lengths(depth: int, drafters: Sequence[str]) -> list[FixedLength]:
    """Return plain decoding, then every length 1..`depth`, by drafter if there are several."""
    policies = [FixedLength(0)]
    for drafter in drafters:
        for length in range(1, depth + 1):
            policy = FixedLength(length)
            if len(drafters) > 1:
                policy.drafter, policy.name = drafter, f"{policy.name}@{drafter}"
            policies.append(policy)
    return policies


class FeatureThreshold(StopPolicy):
    """Draft while the policy's one feature is at least `level`; subclasses set `features`.

    Attributes:
        threshold: 0 to 1.
        level: the threshold as float32.
    """

    level: float

    def __init__(self, name: str, threshold: float, max_depth: int) -> None:
        self.threshold = validate_number(name, "threshold", threshold, 0.0, 1.0)
        self.level = float(np.float32(self.threshold))
        self.max_depth = validate_int(name, "max_depth", max_depth)
        self.name = f"{name}:{threshold:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that reach the level."""
        return step.alive & (step.features[:, :, 0] >= self.level), state


class Confidence(FeatureThreshold):
    """Stop after the first drawn token with a probability under the draft below a threshold.

    Hugging Face's `ConfidenceCriteria` (transformers 5.23): threshold 0.4, 1 to 20 tokens.
    """

    features = ("drawn_prob",)

    def __init__(self, threshold: float = 0.4, max_depth: int = 20) -> None:
        super().__init__("confidence", threshold, max_depth)
