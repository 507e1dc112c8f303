"""Published rules whose level follows how the rounds before went: Hugging Face's heuristic, AdaEDL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .baselines_scores import check_number, check_whole
from .contract import DraftStep, RoundOutcome, State, StopPolicy


def tells(outcome: RoundOutcome) -> Tensor:
    """Return [S] bool, the streams whose round says something about acceptance."""
    return outcome.active & ~outcome.cut & (outcome.verified > 0)


class HeuristicTransient(StopPolicy):
    """Draft K tokens; K grows by `up` after a round that was accepted whole, else it shrinks by `down`, to 1 at least.

    Hugging Face's `num_assistant_tokens_schedule="heuristic_transient"` (transformers 5.23, `AssistedCandidateGenerator.
    update_candidate_strategy`): +2 and -1, from 20 tokens. K starts anew with each text, and never passes `max_depth`;
    rounds that an end of text or a limit cut do not count.
    """

    _called = "heuristic-transient"

    def __init__(self, start: int = 20, up: float = 2, down: float = 1, max_depth: int = 20) -> None:
        self.begin = check_whole(self._called, "start", start)
        self.up = check_number(self._called, "up", up, 0.0)
        self.down = check_number(self._called, "down", down, 0.0)
        self.max_depth = check_whole(self._called, "max_depth", max_depth)
        self.name = f"{self._called}:{start}"

    def start(self, streams: int, key: Tensor) -> State:
        """Return K of each stream."""
        return torch.full((streams,), float(min(self.begin, self.max_depth)), device=key.device)

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep every branch above K."""
        return step.alive & (step.depth < state)[:, None], state

    def keep_one(self, depth: int, features: Sequence[float], state: State) -> tuple[bool, State]:
        """Decide for one row; see `StopPolicy.keep_one`."""
        return depth < float(state), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return K for the next round."""
        moved = torch.where(outcome.accepted == outcome.verified, state + self.up, state - self.down)
        return torch.where(tells(outcome), moved.clamp(1.0, float(self.max_depth)), state)


class Heuristic(HeuristicTransient):
    """The same with a K that passes from text to text: `num_assistant_tokens_schedule="heuristic"`."""

    carries: ClassVar[bool] = True
    _called = "heuristic"


class AdaEDL(StopPolicy):
    """Draft on while the bound 1 - sqrt(gamma H_j) on the acceptance probability is at least lambda, which adapts.

    AdaEDL (arXiv 2410.18351): gamma = 0.2. After each round, with r a running share of accepted tokens,
    r <- b1 r + (1 - b1) accepted / drafted and lambda <- b2 lambda + (1 - b2) (lambda +- eps), + where r <= alpha. The
    constants are those of the update that it takes over (self-speculative decoding, arXiv 2309.08168, and its script): alpha
    0.9, b1 0.5, b2 0.9, eps 0.01, r = 0 at first; so is the first lambda, 0.6, for which no source of its own was found.
    """

    features = ("entropy",)

    def __init__(
        self,
        start: float = 0.6,
        gamma: float = 0.2,
        alpha: float = 0.9,
        eps: float = 0.01,
        b1: float = 0.5,
        b2: float = 0.9,
        max_depth: int = 20,
    ) -> None:
        self.begin = check_number("adaedl", "start", start, 0.0, 1.0)
        self.gamma = check_number("adaedl", "gamma", gamma, 1e-6)
        self.alpha, self.eps, self.b1, self.b2 = (
            check_number("adaedl", name, value, 0.0, 1.0)
            for name, value in (("alpha", alpha), ("eps", eps), ("b1", b1), ("b2", b2))
        )
        self.max_depth = check_whole("adaedl", "max_depth", max_depth)
        self.name = f"adaedl:{start:g}"

    def start(self, streams: int, key: Tensor) -> State:
        """Return (lambda, r, the largest entropy to draft on from) of each stream."""
        level = torch.full((streams,), self.begin, dtype=torch.float64, device=key.device)
        return level, torch.zeros_like(level), self._most(level)

    def _most(self, level: Tensor) -> Tensor:
        """Return [S] float32, the entropy at which the bound is lambda."""
        return ((1.0 - level) ** 2 / self.gamma).float()

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep the branches whose bound is high enough."""
        return step.alive & (step.features[..., 0] <= state[2][:, None]), state

    def keep_one(self, depth: int, features: Sequence[float], state: State) -> tuple[bool, State]:
        """Decide for one row; see `StopPolicy.keep_one`."""
        return features[0] <= float(state[2]), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with lambda moved."""
        level, rate, _ = state
        now = self.b1 * rate + (1.0 - self.b1) * outcome.accepted.double() / outcome.verified.clamp_min(1)
        aim = torch.where(now <= self.alpha, level + self.eps, level - self.eps)
        moved = (self.b2 * level + (1.0 - self.b2) * aim).clamp(0.0, 1.0)
        counts = tells(outcome)
        level = torch.where(counts, moved, level)
        return level, torch.where(counts, now, rate), self._most(level)
