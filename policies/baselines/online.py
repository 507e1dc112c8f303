"""A logistic model of acceptance on one feature of the draft, learned from the accept bits while decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..builtins import builtin
from ..contract import DraftStep, RoundOutcome, State, StopPolicy
from ..kernels import on_first_use
from ..typing import Array
from .scores import check_number, check_whole

kernels = on_first_use("baselines.online")


@dataclass(frozen=True, slots=True)
class OnlineState:
    """Of `Online`, all float64.

    Attributes:
        weights: [S, 2] slope and intercept.
        precision: [S, 3] what they rest on: of the slope, of both, of the intercept.
        seen: [S, K] the best log-odds at each depth of this round; infinite = not asked.
        survival: [S, B] S_j of the branches of the last depth.
    """

    weights: Array
    precision: Array
    seen: Array
    survival: Array


@builtin("online", "threshold", "online:0.4 stops below that survival, learned while decoding")
class Online(StopPolicy):
    """Draft on while S_j, the product of the modelled acceptance probabilities, is at least a threshold.

    P(x_j accepted) = sigmoid(w z + b) with z = logit(max q_j), as vLLM learns it for any drafter (vLLM #52228): one PRE
    feature, hence lossless. It starts from w = 1, b = 0 and takes one Newton step a round on the accept bits of that round:
    precision <- decay precision + sum p (1 - p) (z, 1)(z, 1)', weights <- weights + precision^-1 sum (accepted - p) (z, 1).
    The coefficients pass from text to text. vLLM spends them on the token budget of a batch; alone, that is a threshold on
    S_j. In a tree the best branch of a depth stands for it. vLLM's rate, prior and decay were not found; these are ours.

    Attributes:
        level: the threshold, or [S, 1] float64 where each stream has its own.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("top1",)
    carries: ClassVar[bool] = True
    level: float | Array

    def __init__(self, threshold: float = 0.4, prior: float = 20.0, decay: float = 0.999, max_depth: int = 20) -> None:
        self.level = self.threshold = check_number("online", "threshold", threshold, 0.0, 1.0)
        self.prior = check_number("online", "prior", prior, 1e-3)
        self.decay = check_number("online", "decay", decay, 0.0, 1.0)
        self.max_depth = check_whole("online", "max_depth", max_depth)
        self.name = f"online:{threshold:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams that have seen nothing."""
        # sigmoid(logit(max q)) = max q: to begin with the draft is taken at its word.
        weights = np.tile((1.0, 0.0), (streams, 1))
        precision = np.tile((self.prior, 0.0, self.prior), (streams, 1))
        return OnlineState(weights, precision, self._unseen(streams), np.ones((streams, 1)))

    def _unseen(self, streams: int) -> Array:
        return np.full((streams, self.max_depth), np.inf)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that survive well enough, and remember what was seen."""
        survival, seen, begins = np.empty(step.alive.shape), np.empty_like(state.seen), step.depth <= self.first
        asked = step.features, step.alive, step.parent, step.depth
        kernels().survive(*asked, begins, state.weights, state.survival, state.seen, survival, seen)
        return step.alive & (survival >= self.level), OnlineState(state.weights, state.precision, seen, survival)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state after a Newton step on the round's accept bits."""
        weights, precision = np.empty_like(state.weights), np.empty_like(state.precision)
        told = outcome.active, outcome.cut, outcome.accepted, outcome.verified
        before = state.weights, state.precision, state.seen
        kernels().take_step(*told, self.decay, *before, weights, precision)
        return OnlineState(weights, precision, self._unseen(len(weights)), state.survival)
