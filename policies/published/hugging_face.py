"""Hugging Face's assisted generation: its schedules of the draft length, and its confidence threshold that adapts."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..arguments import validate_int, validate_number
from ..contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from ..kernels.compiled import copy_row, kernel, kernel_part, known_depths


@kernel("void(b1[::1], b1[::1], i8[::1], i8[::1], f8, f8, f8, f4[::1])")
def update_lengths(
    active: Any, cut: Any, accepted: Any, verified: Any, up: float, down: float, longest: float, lengths: Any
) -> None:
    """Update the lengths [S] after a round: up if all was accepted, else down."""
    for s in range(lengths.shape[0]):
        if known_depths(active[s], cut[s], accepted[s], verified[s]):
            # In float32 like the stored state, so that storing it between rounds changes nothing.
            moved = lengths[s] + np.float32(up) if accepted[s] == verified[s] else lengths[s] - np.float32(down)
            lengths[s] = min(max(moved, 1.0), longest)


class HeuristicTransient(StopPolicy):
    """Draft K tokens; K grows by `up` after a round in which all were accepted, else it shrinks by `down`, to 1 at least.

    `num_assistant_tokens_schedule="heuristic_transient"` (transformers 5.23, `AssistedCandidateGenerator.
    update_candidate_strategy`): +2 and -1, from 20 tokens. K is reset for each text and never exceeds `max_depth`.
    """

    reads_seconds: ClassVar[bool] = False
    _kind: ClassVar[str] = "heuristic-transient"

    def __init__(self, start: int = 20, up: float = 2, down: float = 1, max_depth: int = 20) -> None:
        self.first_length = validate_int(self._kind, "start", start)
        self.up, self.down = (validate_number(self._kind, k, v, 0.0) for k, v in (("up", up), ("down", down)))
        self.max_depth = validate_int(self._kind, "max_depth", max_depth)
        self.name = f"{self._kind}:{start}"

    def start(self, streams: int, keys: Array) -> State:
        """Return K of each stream."""
        return np.full(streams, min(self.first_length, self.max_depth), dtype=np.float32)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep every branch above K."""
        return step.alive & (state > step.depth)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return K for the next round."""
        lengths, known = state.copy(), (outcome.active, outcome.cut, outcome.accepted, outcome.verified)
        update_lengths(*known, self.up, self.down, float(self.max_depth), lengths)
        return lengths


class Heuristic(HeuristicTransient):
    """`HeuristicTransient` with a K that passes from text to text: `num_assistant_tokens_schedule="heuristic"`."""

    carries: ClassVar[bool] = True
    _kind = "heuristic"


@kernel("void(f4[:,:,::1], b1[:,::1], i8, f4[::1], f4[:,::1], b1[:,::1])")
def keep_likely(features: Any, alive: Any, depth: int, threshold: Any, seen: Any, kept: Any) -> None:
    """Write the branches [S, B] that reach the threshold [S], and the largest feature of each stream to `seen` [S, K]."""
    for s in range(alive.shape[0]):
        seen[s, depth - 1] = -np.inf
        for b in range(alive.shape[1]):
            kept[s, b] = alive[s, b] and features[s, b, 0] >= threshold[s]
            if alive[s, b]:
                seen[s, depth - 1] = max(seen[s, depth - 1], features[s, b, 0])


@kernel_part
def _best_threshold(samples: Any, weight: Any, default: Any) -> Any:
    """Return the sample with the least false positive rate + weight * false negative rate; the largest of several."""
    count, positives = samples.shape[0], 0.0
    for i in range(count):
        positives += samples[i, 1]
    negatives = count - positives
    if positives == 0.0 or negatives == 0.0:  # there is no curve
        return default
    # Samples descend, so the threshold samples[i] accepts those up to i: `true` of them right, i + 1 - true wrong. The
    # infinite threshold of scikit-learn's curve costs `weight`: at 3 it never wins, as the lowest sample costs 1.
    best, least, true = default, np.inf, 0.0
    for i in range(count):
        true += samples[i, 1]
        cost = (i + 1 - true) / negatives + weight * (1.0 - true / positives)
        is_point = i + 1 == count or samples[i + 1, 0] != samples[i, 0]  # equal samples are one point of the curve
        if is_point and cost < least:
            best, least = samples[i, 0], cost
    return best


@kernel("void(b1[::1], b1[::1], i8[::1], i8[::1], f8, i8, f4[:,::1], f4[:,:,::1], i8[::1], f4[::1])")
def fit_threshold(
    active: Any, cut: Any, accepted: Any, verified: Any, weight: float, min_samples: int, seen: Any, samples: Any,
    count: Any, threshold: Any,
) -> None:  # fmt: skip
    """Insert a round's samples `seen` into those of the text, and fit the threshold; see `Roc`."""
    for s in range(threshold.shape[0]):
        for j in range(min(known_depths(active[s], cut[s], accepted[s], verified[s]), seen.shape[1])):
            if seen[s, j] == -np.inf:
                continue
            at = count[s]  # inserting a few samples into a sorted list is faster than sorting
            while at > 0 and samples[s, at - 1, 0] < seen[s, j]:
                copy_row(samples[s, at - 1], samples[s, at])
                at -= 1
            samples[s, at, 0], samples[s, at, 1] = seen[s, j], 1.0 if j < accepted[s] else 0.0
            count[s] += 1
        if count[s] >= min_samples:
            threshold[s] = _best_threshold(samples[s, : count[s]], weight, threshold[s])


class Roc(StopPolicy):
    """The confidence rule with a threshold that is fitted to the text so far.

    Hugging Face's default (transformers 5.23, `ConfidenceCriteria`, `AssistedCandidateGenerator.update_candidate_strategy`):
    q(x_j) of the accepted tokens (1) and of each first rejected one (0) are samples, for the whole text. From 6 samples of
    both classes on, the threshold is the one with the least false positive rate + 3 times the false negative rate. It starts
    at 0.4, with at most 20 tokens a round. The token at the last depth, for which no policy is called, is not a sample. In a
    tree, a depth counts as its best branch.

    The state is (threshold [S] float32; largest probability by depth of this round [S, K] float32, -infinity if not called;
    samples of the text in descending order [S, M, 2] float32, a probability and whether it was accepted; their number [S]).
    """

    reads_seconds: ClassVar[bool] = False
    features = ("drawn_prob",)

    def __init__(self, threshold: float = 0.4, weight: float = 3.0, samples: int = 6, max_depth: int = 20) -> None:
        self.threshold = validate_number("roc", "threshold", threshold, 0.0, 1.0)
        self.weight = validate_number("roc", "weight", weight, 0.0)
        self.samples = validate_int("roc", "samples", samples)
        self.max_depth = validate_int("roc", "max_depth", max_depth)
        self.name = f"roc:{threshold:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of new texts."""
        seen = np.full((streams, self.max_depth), -np.inf, np.float32)
        samples, count = np.zeros((streams, 0, 2), np.float32), np.zeros(streams, np.int64)
        return np.full(streams, self.threshold, np.float32), seen, samples, count

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches with a token that is likely enough, and store the largest probability."""
        threshold, seen, samples, count = state
        kept, seen = np.empty_like(step.alive), seen.copy()
        keep_likely(step.features, step.alive, step.depth, threshold, seen, kept)
        return kept, (threshold, seen, samples, count)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with the round's samples and the threshold fitted to all."""
        threshold, seen, samples, count = state
        threshold, count, more = threshold.copy(), count.copy(), np.zeros((len(count), self.max_depth, 2), np.float32)
        samples = np.concatenate((samples[:, : count.max(initial=0)], more), 1)
        known = outcome.active, outcome.cut, outcome.accepted, outcome.verified
        fit_threshold(*known, self.weight, self.samples, seen, samples, count, threshold)
        return threshold, np.full_like(seen, -np.inf), samples, count
