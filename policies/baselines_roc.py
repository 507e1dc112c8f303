"""Hugging Face's confidence threshold as it adapts: fitted to the accept bits of the text so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .baselines_adaptive import tells
from .baselines_scores import check_number, check_whole
from .contract import DraftStep, RoundOutcome, State, StopPolicy


def recorded(seen: Tensor, depth: int, values: Tensor, alive: Tensor) -> Tensor:
    """Return `seen` [S, K] with the largest of `values` [S, B] of the branches alive at this depth; infinite = not asked."""
    best = torch.where(alive, values, -torch.inf).amax(1)
    column = torch.where(alive.any(1), best, seen[:, depth - 1])
    return torch.cat([seen[:, : depth - 1], column[:, None], seen[:, depth:]], 1)


def accept_bits(seen: Tensor, outcome: RoundOutcome) -> tuple[Tensor, Tensor]:
    """Return [S, K] bool: the depths whose outcome is known and that were asked about, and whether each was accepted.

    Known are the accepted ones and, where not all that was verified was accepted, the first rejected one.
    """
    depth = torch.arange(1, seen.shape[1] + 1, device=seen.device)
    accepted = depth <= outcome.accepted[:, None]
    rejected = (depth == outcome.accepted[:, None] + 1) & (depth <= outcome.verified[:, None])
    return (accepted | rejected) & seen.isfinite() & tells(outcome)[:, None], accepted


@dataclass(frozen=True)
class RocState:
    """Of `Roc`: [S] thresholds, [S, K] probabilities of this round, and [S, M] samples of the text, `count` [S] of them."""

    threshold: Tensor
    seen: Tensor
    probs: Tensor
    labels: Tensor
    count: Tensor


@dataclass(frozen=True)
class RocOne:
    """The same of one stream in plain numbers; `samples` are (probability, accepted)."""

    threshold: float
    seen: tuple[float, ...] = ()
    samples: tuple[tuple[float, bool], ...] = ()


class Roc(StopPolicy):
    """The confidence rule with a threshold that is fitted to the text so far.

    Hugging Face's default (transformers 5.23, `ConfidenceCriteria`, `AssistedCandidateGenerator.update_candidate_strategy`):
    q(x_j) of the accepted tokens (1) and of each first rejected one (0) are kept for the whole text; from 6 samples of both
    kinds on, the threshold is the one with the least false positive rate + 3 times the false negative rate. It starts at 0.4,
    with at most 20 tokens a round. The token at the last depth, which no policy is asked about, is not among the samples.
    In a tree the best branch of a depth stands for it.
    """

    features = ("drawn_prob",)

    def __init__(self, threshold: float = 0.4, weight: float = 3.0, samples: int = 6, max_depth: int = 20) -> None:
        self.threshold = check_number("roc", "threshold", threshold, 0.0, 1.0)
        self.weight = check_number("roc", "weight", weight, 0.0)
        self.samples = check_whole("roc", "samples", samples)
        self.max_depth = check_whole("roc", "max_depth", max_depth)
        self.name = f"roc:{threshold:g}"

    def start(self, streams: int, key: Tensor) -> State:
        """Return the state of fresh texts."""
        like = torch.full((streams,), self.threshold, dtype=torch.float32, device=key.device)
        none = like.new_zeros(streams, 0)
        return RocState(like, self._unseen(like), none, none.bool(), torch.zeros_like(key))

    def _unseen(self, like: Tensor) -> Tensor:
        return like.new_full((len(like), self.max_depth), torch.inf)

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the branches whose token is likely enough, and remember how likely."""
        prob = step.features[..., 0]
        seen = recorded(state.seen, step.depth, prob, step.alive)
        return step.alive & (prob >= state.threshold[:, None]), RocState(
            state.threshold, seen, state.probs, state.labels, state.count
        )

    def keep_one(self, depth: int, features: Sequence[float], state: State) -> tuple[bool, State]:
        """Decide for one row; see `StopPolicy.keep_one`."""
        one = state if isinstance(state, RocOne) else RocOne(float(state.threshold))
        return features[0] >= one.threshold, RocOne(one.threshold, (*one.seen, features[0]), one.samples)

    def _observe_one(self, outcome: RoundOutcome, state: RocOne) -> RocOne:
        """Take the round in as `observe` does, in plain numbers."""
        accepted, verified = int(outcome.accepted), int(outcome.verified)
        if bool(outcome.cut) or not bool(outcome.active):
            return RocOne(state.threshold, (), state.samples)
        known = state.seen[: min(accepted + 1, verified)]
        samples = (*state.samples, *((prob, j < accepted) for j, prob in enumerate(known)))
        positives = sum(good for _, good in samples)
        negatives = len(samples) - positives
        if len(samples) < self.samples or not positives or not negatives:
            return RocOne(state.threshold, (), samples)
        best, least, true, false = state.threshold, math.inf, 0, 0
        ordered = sorted(samples, reverse=True)
        for at, (prob, good) in enumerate(ordered):
            true, false = true + good, false + (not good)
            if at + 1 < len(ordered) and ordered[at + 1][0] == prob:
                continue
            cost = false / negatives + self.weight * (1.0 - true / positives)
            if cost < least:
                best, least = prob, cost
        return RocOne(best, (), samples)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with the round's samples and the threshold fitted to all."""
        if isinstance(state, RocOne):
            return self._observe_one(outcome, state)
        known, accepted = accept_bits(state.seen, outcome)
        place = state.count[:, None] + known.long().cumsum(1) - 1
        count = state.count + known.sum(1)
        width = max(int(count.max()), state.probs.shape[1])
        probs, labels = (
            torch.nn.functional.pad(old, (0, width + 1 - old.shape[1])) for old in (state.probs, state.labels)
        )  # the column beyond all takes what is not known
        place = torch.where(known, place, width)
        probs = probs.scatter(1, place, state.seen)[:, :width]
        labels = labels.scatter(1, place, accepted)[:, :width]
        threshold = self._fitted(probs, labels, count, state.threshold)
        return RocState(threshold, self._unseen(threshold), probs, labels, count)

    def _fitted(self, probs: Tensor, labels: Tensor, count: Tensor, threshold: Tensor) -> Tensor:
        """Return [S], the sample value of the least cost; the largest of several."""
        if not probs.shape[1]:
            return threshold
        there = torch.arange(probs.shape[1], device=probs.device) < count[:, None]
        score, order = torch.where(there, probs, -torch.inf).sort(1, descending=True)
        there = there.gather(1, order)
        good = labels.gather(1, order) & there
        true, false = good.double().cumsum(1), (there & ~good).double().cumsum(1)
        positives, negatives = true[:, -1:], false[:, -1:]
        cost = false / negatives.clamp_min(1.0) + self.weight * (1.0 - true / positives.clamp_min(1.0))
        last = torch.cat([score[:, 1:] != score[:, :-1], torch.ones_like(there[:, :1])], 1)  # of equal samples
        best = torch.where(there & last, cost, torch.inf).argmin(1, keepdim=True)
        enough = (count >= self.samples) & (positives[:, 0] > 0) & (negatives[:, 0] > 0)
        return torch.where(enough, score.gather(1, best)[:, 0], threshold)
