"""AdaEDL: a lower bound on the acceptance probability by the entropy, with an adaptive threshold."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .. import Array, DraftStep, RoundOutcome, State, StopPolicy, validate_int, validate_number


class AdaEDL(StopPolicy):
    """Draft while the bound 1 - sqrt(gamma H_j) on the acceptance probability is at least an adaptive lambda.

    AdaEDL (arXiv 2410.18351): gamma = 0.2. After each round, with r a running acceptance rate,
    r <- b1 r + (1 - b1) accepted / drafted and lambda <- b2 lambda + (1 - b2) (lambda +- eps), + if r <= alpha. The update
    and its constants are those of self-speculative decoding (arXiv 2309.08168 and its script): alpha 0.9, b1 0.5, b2 0.9,
    eps 0.01, r = 0 at first. The papers do not state the first lambda; the default 0.6 is ours.

    The state is (lambda, r, (1 - lambda)^2 / gamma), the last one the largest entropy that passes.
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
        shares = {"start": start, "alpha": alpha, "eps": eps, "b1": b1, "b2": b2}
        self.first_level, *self._constants = (validate_number("adaedl", k, v, 0.0, 1.0) for k, v in shares.items())
        self.gamma = validate_number("adaedl", "gamma", gamma, 1e-6)
        self.max_depth = validate_int("adaedl", "max_depth", max_depth)
        self.name = f"adaedl:{start:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the first state."""
        return self._state(np.full(streams, self.first_level), np.zeros(streams))

    def _state(self, level: Array, rate: Array) -> State:
        return level, rate, ((1.0 - level) ** 2 / self.gamma).astype(np.float32)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches with an entropy that is low enough."""
        return step.alive & (step.features[:, :, 0] <= state[2][:, None]), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with lambda updated."""
        (alpha, eps, b1, b2), (level, rate, _) = self._constants, state
        known = outcome.active & ~outcome.cut & (outcome.verified > 0)
        latest = b1 * rate + (1.0 - b1) * outcome.accepted / np.maximum(outcome.verified, 1)
        target = level + np.where(latest <= alpha, eps, -eps)
        moved = np.minimum(np.maximum(b2 * level + (1.0 - b2) * target, 0.0), 1.0)
        return self._state(np.where(known, moved, level), np.where(known, latest, rate))
