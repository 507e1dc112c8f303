"""Published rules whose level follows how the rounds before went: Hugging Face's heuristic, AdaEDL."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..builtins import builtin
from ..contract import DraftStep, RoundOutcome, State, StopPolicy
from ..kernels import on_first_use
from ..typing import Array
from .scores import check_number, check_whole

kernels = on_first_use("baselines.adaptive")


@builtin("heuristic-transient", "start", "heuristic-transient:20 starts anew with each text")
class HeuristicTransient(StopPolicy):
    """Draft K tokens; K grows by `up` after a round that was accepted whole, else it shrinks by `down`, to 1 at least.

    Hugging Face's `num_assistant_tokens_schedule="heuristic_transient"` (transformers 5.23, `AssistedCandidateGenerator.
    update_candidate_strategy`): +2 and -1, from 20 tokens. K starts anew with each text, and never passes `max_depth`;
    rounds that an end of text or a limit cut do not count.
    """

    reads_seconds: ClassVar[bool] = False
    _called = "heuristic-transient"

    def __init__(self, start: int = 20, up: float = 2, down: float = 1, max_depth: int = 20) -> None:
        self.begin = check_whole(self._called, "start", start)
        self.up = check_number(self._called, "up", up, 0.0)
        self.down = check_number(self._called, "down", down, 0.0)
        self.max_depth = check_whole(self._called, "max_depth", max_depth)
        self.name = f"{self._called}:{start}"

    def start(self, streams: int, keys: Array) -> State:
        """Return K of each stream."""
        return np.full(streams, min(self.begin, self.max_depth), dtype=np.float32)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep every branch above K."""
        return step.alive & (state > step.depth)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return K for the next round."""
        after = np.empty_like(state)
        told = outcome.active, outcome.cut, outcome.accepted, outcome.verified
        kernels().move_length(*told, self.up, self.down, float(self.max_depth), state, after)
        return after


@builtin("heuristic", "start", "heuristic:20 drafts 2 more after full acceptance, else 1 less")
class Heuristic(HeuristicTransient):
    """The same with a K that passes from text to text: `num_assistant_tokens_schedule="heuristic"`."""

    carries: ClassVar[bool] = True
    _called = "heuristic"


@builtin("adaedl", "start", "adaedl:0.6 stops by an entropy bound that adapts from there")
class AdaEDL(StopPolicy):
    """Draft on while the bound 1 - sqrt(gamma H_j) on the acceptance probability is at least lambda, which adapts.

    AdaEDL (arXiv 2410.18351): gamma = 0.2. After each round, with r a running share of accepted tokens,
    r <- b1 r + (1 - b1) accepted / drafted and lambda <- b2 lambda + (1 - b2) (lambda +- eps), + where r <= alpha. The
    constants are those of the update that it takes over (self-speculative decoding, arXiv 2309.08168, and its script): alpha
    0.9, b1 0.5, b2 0.9, eps 0.01, r = 0 at first; so is the first lambda, 0.6, for which no source of its own was found.
    """

    reads_seconds: ClassVar[bool] = False
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

    def start(self, streams: int, keys: Array) -> State:
        """Return (lambda, r, the largest entropy to draft on from) of each stream."""
        # 1 - sqrt(gamma H) >= lambda iff H <= (1 - lambda)^2 / gamma: SVIP's rule, with a level that is kept as an entropy.
        level = np.full(streams, self.begin)
        return level, np.zeros(streams), ((1.0 - level) ** 2 / self.gamma).astype(np.float32)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches whose bound is high enough."""
        return step.alive & (step.features[:, :, 0] <= state[2][:, None]), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with lambda moved."""
        level, rate, most = (np.empty_like(values) for values in state)
        told = outcome.active, outcome.cut, outcome.accepted, outcome.verified
        constants = np.array((self.alpha, self.eps, self.b1, self.b2, self.gamma))
        kernels().move_level(*told, constants, state[0], state[1], level, rate, most)
        return level, rate, most
