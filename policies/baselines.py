"""Stop rules that need no training, each with its published defaults."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .contract import DraftStep, State, StopPolicy
from .errors import PolicyError


class FixedLength(StopPolicy):
    """Draft the same number of tokens each round; 0 is plain decoding (Leviathan et al. 2023, arXiv 2211.17192).

    It is never asked: below its length there is nothing to decide, and at its length drafting ends.
    """

    def __init__(self, length: int = 4) -> None:
        if not isinstance(length, int) or length < 0:
            raise PolicyError(f"fixed: expected a whole length of 0 or more, not {length}")
        self.max_depth = self.first = length
        self.name = f"fixed:{length}"

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep every branch above the length."""
        return step.alive & (step.depth < self.max_depth), state


class Confidence(StopPolicy):
    """Stop after the first drawn token whose probability under the draft is below a threshold.

    The rule of Hugging Face's assisted generation (`ConfidenceCriteria`, transformers 5.23), whose defaults are a
    threshold of 0.4, at most 20 tokens, and at least one.
    """

    features = ("drawn_prob",)

    def __init__(self, threshold: float = 0.4, max_depth: int = 20) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise PolicyError(f"confidence: expected a threshold between 0 and 1, not {threshold}")
        if not isinstance(max_depth, int) or max_depth < 1:
            raise PolicyError(f"confidence: expected a whole max_depth of 1 or more, not {max_depth}")
        self.threshold = threshold
        self._least = float(np.float32(threshold))  # as a float32 tensor compares with it
        self.max_depth = max_depth
        self.name = f"confidence:{threshold:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the branches whose token is likely enough."""
        return step.alive & (step.features[..., 0] >= self.threshold), state

    def keep_one(self, depth: int, features: Sequence[float], state: State) -> tuple[bool, State]:
        """Decide for one row; see `StopPolicy.keep_one`."""
        return features[0] >= self._least, state
