"""What is collected of one text: its anchors, what is read of each, and how the draft proposes there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...decode.models.pair import Pair
from ...decode.topology import Topology
from ...decode.verify.sampling import UNCHANGED, SamplingParams
from ...policies.features import CHAIN_FEATURES, FEATURES, TREE_FEATURES, Kind
from .given_text import DrawsAt
from .proposals import BestScores, GivenText, Proposer, keyed_draws

PRE_FEATURES = tuple(name for name in TREE_FEATURES if FEATURES[name].kind is Kind.PRE)
assert TREE_FEATURES[: len(PRE_FEATURES)] == CHAIN_FEATURES[: len(PRE_FEATURES)] == PRE_FEATURES
"""Names of what belongs to a row, whatever is drawn from it; they come first at every node."""

BYTES_PER_SCORE = 48
"""Peak bytes per row and token of vocabulary while features are computed (logits, noise, scores, softmax)."""


@dataclass(frozen=True)
class Anchors:
    """The anchors of one text: `anchor` tokens of it are committed when the round starts.

    Attributes:
        text: prompt and generated ids.
        prompt: length of the prompt.
        anchor: [n] int64, rising, from 1 on.
        key: of the stream.
        noise: [L, V] that the generated tokens were drawn with, where it is at hand.
        draw: number of the draw, of those given the text.
    """

    text: list[int]
    prompt: int
    anchor: Tensor
    key: int
    noise: Tensor | None = None
    draw: int = 0


@dataclass(frozen=True)
class Job:
    """What is unrolled.

    Attributes:
        pair: whose draft.
        shape: drafted after each place.
        features: recorded at each node.
        temperature: of the sampling.
        memory_bytes: budget for rows as wide as the vocabulary.
        shaping: what else changes the distribution that is sampled from.
        hidden: H of the draft's hidden states, to keep them as well; 0 = not.
        verification: under which rounds are to be replayed.
        exact_off_text: of block verification: the target reads the candidates off the text too.
        draws: the random choices of (stream key, number of the draw), given the text.
    """

    pair: Pair
    shape: Topology
    features: tuple[str, ...]
    temperature: float
    memory_bytes: int
    shaping: SamplingParams = UNCHANGED
    hidden: int = 0
    verification: str = "match"
    exact_off_text: bool = True
    draws: Callable[[int, int], DrawsAt] = keyed_draws

    @property
    def given_text(self) -> bool:
        """Whether candidates are drawn given the text."""
        return self.temperature > 0 and self.verification not in ("match", "point")

    def proposer(self, anchors: Anchors, first: int, count: int) -> Proposer:
        """Return what proposes at `count` places of a text from the one on that follows `first` generated tokens."""
        start = anchors.prompt + first
        if self.given_text:
            rows = max(8, self.memory_bytes // (BYTES_PER_SCORE * self.pair.vocabulary))
            choices = self.draws(anchors.key, anchors.draw)
            return GivenText(self.verification, choices, start, rows, self.exact_off_text)
        noisy = self.temperature > 0 and self.verification == "match"  # `point` drafts greedily at any temperature
        places = count + self.shape.deepest  # the last place's candidates stand that much further on
        # Noise that is not kept is drawn anew for every forward. What the text was drawn with is in memory in any case.
        fits = places * self.pair.vocabulary * BYTES_PER_SCORE <= self.memory_bytes or anchors.noise is not None
        noise = None if anchors.noise is None else anchors.noise[first:]
        return BestScores(self.pair, anchors.key if noisy else None, start, places if fits else 0, noise)
