"""A logistic model of acceptance on one feature of the draft, learned from the accept bits while decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .baselines_roc import accept_bits, recorded
from .baselines_scores import check_number, check_whole
from .contract import DraftStep, RoundOutcome, State, StopPolicy

_EDGE = 1e-3  # of the largest probability: log-odds stay within +-7, so that no token outweighs hundreds


@dataclass(frozen=True)
class OnlineState:
    """Of `Online`: [S, 2] slope and intercept, [S, 2, 2] what they rest on, [S, K] log-odds of this round, S_j by branch."""

    weights: Tensor
    precision: Tensor
    seen: Tensor
    survival: Tensor


@dataclass(frozen=True)
class OnlineOne:
    """The same of one stream in plain numbers: (slope, intercept), (ww, wb, bb) of the precision, log-odds, S_j."""

    weights: tuple[float, float]
    precision: tuple[float, float, float]
    seen: tuple[float, ...] = ()
    survival: float = 1.0


class Online(StopPolicy):
    """Draft on while S_j, the product of the modelled acceptance probabilities, is at least a threshold.

    P(x_j accepted) = sigmoid(w z + b) with z = logit(max q_j), as vLLM learns it for any drafter (vLLM #52228): one PRE
    feature, hence lossless. It starts from w = 1, b = 0 and takes one Newton step a round on the accept bits of that round:
    precision <- decay precision + sum p (1 - p) (z, 1)(z, 1)', weights <- weights + precision^-1 sum (accepted - p) (z, 1).
    The coefficients pass from text to text. vLLM spends them on the token budget of a batch; alone, that is a threshold on
    S_j. In a tree the best branch of a depth stands for it. vLLM's rate, prior and decay were not found; these are ours.
    """

    features = ("top1",)
    carries: ClassVar[bool] = True

    def __init__(self, threshold: float = 0.4, prior: float = 20.0, decay: float = 0.999, max_depth: int = 20) -> None:
        self.threshold = check_number("online", "threshold", threshold, 0.0, 1.0)
        self.prior = check_number("online", "prior", prior, 1e-3)
        self.decay = check_number("online", "decay", decay, 0.0, 1.0)
        self.max_depth = check_whole("online", "max_depth", max_depth)
        self.name = f"online:{threshold:g}"

    def start(self, streams: int, key: Tensor) -> State:
        """Return the state of streams that have seen nothing."""
        weights = torch.tensor([[1.0, 0.0]], dtype=torch.float64, device=key.device).repeat(streams, 1)
        precision = self.prior * torch.eye(2, dtype=torch.float64, device=key.device).repeat(streams, 1, 1)
        seen = torch.full((streams, self.max_depth), torch.inf, dtype=torch.float64, device=key.device)
        return OnlineState(weights, precision, seen, weights[:, :1])

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the branches that survive well enough, and remember what was seen."""
        odds = torch.logit(step.features[..., 0].double(), eps=_EDGE)
        weights = state.weights[:, None]
        survival = torch.sigmoid(weights[..., 0] * odds + weights[..., 1])
        if step.depth > self.first:
            survival = survival * state.survival.gather(1, step.parent)
        seen = recorded(state.seen, step.depth, odds, step.alive)
        return step.alive & (survival >= self.threshold), replace(state, seen=seen, survival=survival)

    def keep_one(self, depth: int, features: Sequence[float], state: State) -> tuple[bool, State]:
        """Decide for one row; see `StopPolicy.keep_one`."""
        one = state if isinstance(state, OnlineOne) else self._one(state)
        prob = min(max(features[0], _EDGE), 1.0 - _EDGE)
        odds = math.log(prob / (1.0 - prob))
        survival = _sigmoid(one.weights[0] * odds + one.weights[1])
        if depth > self.first:
            survival *= one.survival
        return survival >= self.threshold, OnlineOne(one.weights, one.precision, (*one.seen, odds), survival)

    @staticmethod
    def _one(state: OnlineState) -> OnlineOne:
        (a, b), (_, d) = state.precision[0].tolist()
        slope, level = state.weights[0].tolist()
        return OnlineOne((slope, level), (a, b, d))

    def _observe_one(self, outcome: RoundOutcome, state: OnlineOne) -> OnlineOne:
        """Take the Newton step of `observe` in plain numbers."""
        accepted, verified = int(outcome.accepted), int(outcome.verified)
        seen = state.seen[: min(accepted + 1, verified)]
        if not seen or bool(outcome.cut) or not bool(outcome.active):
            return OnlineOne(state.weights, state.precision)
        (slope, level), (a, b, d) = state.weights, (self.decay * x for x in state.precision)
        to_slope = to_level = 0.0
        for j, odds in enumerate(seen):
            chance = _sigmoid(slope * odds + level)
            error, spread = (j < accepted) - chance, chance * (1.0 - chance)
            a, b, d = a + spread * odds * odds, b + spread * odds, d + spread
            to_slope, to_level = to_slope + error * odds, to_level + error
        size = a * d - b * b
        moved = ((d * to_slope - b * to_level) / size, (a * to_level - b * to_slope) / size)
        return OnlineOne((slope + moved[0], level + moved[1]), (a, b, d))

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state after a Newton step on the round's accept bits."""
        if isinstance(state, OnlineOne):
            return self._observe_one(outcome, state)
        known, accepted = accept_bits(state.seen, outcome)
        odds = torch.where(known, state.seen, 0.0)
        basis = torch.stack([odds, torch.ones_like(odds)], -1)  # [S, K, 2]
        chance = torch.sigmoid((basis * state.weights[:, None]).sum(-1))
        error = torch.where(known, accepted.double() - chance, 0.0)
        spread = torch.where(known, chance * (1.0 - chance), 0.0)
        news = ((spread[..., None] * basis)[..., None] * basis[..., None, :]).sum(1)
        some = known.any(1)
        precision = torch.where(some[:, None, None], self.decay * state.precision + news, state.precision)
        (a, b), (c, d) = (row.unbind(-1) for row in precision.unbind(1))
        slope, level = (error[..., None] * basis).sum(1).unbind(-1)
        size = a * d - b * c
        moved = torch.stack([d * slope - b * level, a * level - c * slope], -1) / size[:, None]
        weights = torch.where(some[:, None], state.weights + moved, state.weights)
        return OnlineState(weights, precision, torch.full_like(state.seen, torch.inf), state.survival)


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
