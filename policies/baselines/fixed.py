"""Stop rules that need no training, each with its published defaults."""

from __future__ import annotations

from ..builtins import builtin
from ..contract import DraftStep, State, StopPolicy
from ..typing import Array
from .scores import AtLeast, check_number, check_whole, float32


@builtin("fixed", "length", "fixed:4 drafts 4 tokens a round; fixed:0 is plain decoding")
class FixedLength(StopPolicy):
    """Draft the same number of tokens each round; 0 is plain decoding (Leviathan et al. 2023, arXiv 2211.17192).

    It is never asked: below its length there is nothing to decide, and at its length drafting ends.
    """

    def __init__(self, length: int = 4) -> None:
        self.max_depth = self.first = check_whole("fixed", "length", length, 0)
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
        self.threshold = check_number("confidence", "threshold", threshold, 0.0, 1.0)
        self.level = float32(self.threshold)
        self.max_depth = check_whole("confidence", "max_depth", max_depth)
        self.name = f"confidence:{threshold:g}"
