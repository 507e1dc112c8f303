"""Hugging Face's confidence threshold as it adapts: fitted to the accept bits of the text so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..builtins import builtin
from ..contract import DraftStep, RoundOutcome, State, StopPolicy
from ..kernels import on_first_use
from ..typing import Array
from .scores import check_number, check_whole

kernels = on_first_use("baselines.roc")


@dataclass(frozen=True, slots=True)
class RocState:
    """Of `Roc`.

    Attributes:
        threshold: [S] float32.
        seen: [S, K] float32, the likeliest drawn token's probability at each depth of this round; infinite = not asked.
        probs, labels: [S, M] samples of the text in falling order, and whether each was accepted.
        count: [S] int64, how many of the M there are.
    """

    threshold: Array
    seen: Array
    probs: Array
    labels: Array
    count: Array


@builtin("roc", "threshold", "roc:0.4 is confidence with a threshold fitted to the text so far")
class Roc(StopPolicy):
    """The confidence rule with a threshold that is fitted to the text so far.

    Hugging Face's default (transformers 5.23, `ConfidenceCriteria`, `AssistedCandidateGenerator.update_candidate_strategy`):
    q(x_j) of the accepted tokens (1) and of each first rejected one (0) are kept for the whole text; from 6 samples of both
    kinds on, the threshold is the one with the least false positive rate + 3 times the false negative rate. It starts at 0.4,
    with at most 20 tokens a round. The token at the last depth, which no policy is asked about, is not among the samples.
    In a tree the best branch of a depth stands for it.
    """

    reads_seconds: ClassVar[bool] = False
    features = ("drawn_prob",)

    def __init__(self, threshold: float = 0.4, weight: float = 3.0, samples: int = 6, max_depth: int = 20) -> None:
        self.threshold = check_number("roc", "threshold", threshold, 0.0, 1.0)
        self.weight = check_number("roc", "weight", weight, 0.0)
        self.samples = check_whole("roc", "samples", samples)
        self.max_depth = check_whole("roc", "max_depth", max_depth)
        self.name = f"roc:{threshold:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of fresh texts."""
        threshold = np.full(streams, self.threshold, dtype=np.float32)
        probs = np.zeros((streams, 0), dtype=np.float32)
        return RocState(
            threshold, self._unseen(streams), probs, probs.astype(np.bool_), np.zeros(streams, dtype=np.int64)
        )

    def _unseen(self, streams: int) -> Array:
        return np.full((streams, self.max_depth), np.inf, dtype=np.float32)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches whose token is likely enough, and remember how likely."""
        kept, seen = np.empty_like(step.alive), np.empty_like(state.seen)
        kernels().keep_likely(step.features, step.alive, step.depth, state.threshold, state.seen, kept, seen)
        return kept, RocState(state.threshold, seen, state.probs, state.labels, state.count)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with the round's samples and the threshold fitted to all."""
        streams, room = state.probs.shape
        # Twice what is needed now, so that most rounds find room.
        needed = int(state.count.max(initial=0)) + self.max_depth
        room = room if room >= needed else 2 * needed
        probs, labels = np.zeros((streams, room), dtype=np.float32), np.zeros((streams, room), dtype=np.bool_)
        threshold, count = np.empty_like(state.threshold), np.empty_like(state.count)
        told = outcome.active, outcome.cut, outcome.accepted, outcome.verified
        before = state.threshold, state.seen, state.probs, state.labels, state.count
        kernels().fit_threshold(*told, self.weight, self.samples, *before, threshold, probs, labels, count)
        return RocState(threshold, self._unseen(streams), probs, labels, count)
