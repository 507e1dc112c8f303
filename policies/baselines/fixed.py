"""Stop rules that need no training, each with its published defaults."""

from __future__ import annotations

from ..builtins import builtin
from ..contract import Array, DraftStep, State, StopPolicy
from ..errors import PolicyError
from .scores import AtLeast, float32


@builtin("fixed", "length", "fixed:4 drafts 4 tokens a round; fixed:0 is plain decoding")
class FixedLength(StopPolicy):
    """Draft the same number of tokens each round; 0 is plain decoding (Leviathan et al. 2023, arXiv 2211.17192).

    It is never asked: below its length there is nothing to decide, and at its length drafting ends.
    """

    def __init__(self, length: int = 4) -> None:
        if not isinstance(length, int) or length < 0:
            raise PolicyError(f"fixed: expected a whole length of 0 or more, not {length}")
        self.max_depth = self.first = length
        self.name = f"fixed:{length}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep every branch above the length."""
        return step.alive & (step.depth < self.max_depth), state


@builtin("confidence", "threshold", "confidence:0.4 stops below that draft probability")
class Confidence(AtLeast):
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
        self.level = float32(threshold)
        self.max_depth = max_depth
        self.name = f"confidence:{threshold:g}"
