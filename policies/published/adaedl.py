"""AdaEDL: a lower bound on the acceptance probability by the entropy, with an adaptive threshold."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..arguments import validate_int, validate_number
from ..contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from ..kernels.compiled import kernel, known_depths


@kernel("void(b1[::1], b1[::1], i8[::1], i8[::1], f8[::1], f8[:,::1], f4[::1])")
def update(active: Any, cut: Any, accepted: Any, verified: Any, constants: Any, rates: Any, max_entropy: Any) -> None:
    """Update lambda and r [S, 2] and the largest entropy [S] after a round; `constants`: alpha, eps, b1, b2, gamma."""
    alpha, eps, b1, b2, gamma = constants[0], constants[1], constants[2], constants[3], constants[4]
    for s in range(rates.shape[0]):
        if known_depths(active[s], cut[s], accepted[s], verified[s]):
            level, rate = rates[s, 0], b1 * rates[s, 1] + (1.0 - b1) * accepted[s] / verified[s]
            target = level + eps if rate <= alpha else level - eps
            level = min(max(b2 * level + (1.0 - b2) * target, 0.0), 1.0)
            rates[s, 0], rates[s, 1], max_entropy[s] = level, rate, (1.0 - level) * (1.0 - level) / gamma


class AdaEDL(StopPolicy):
    """Draft while the bound 1 - sqrt(gamma H_j) on the acceptance probability is at least an adaptive lambda.

    AdaEDL (arXiv 2410.18351): gamma = 0.2. After each round, with r a running acceptance rate,
    r <- b1 r + (1 - b1) accepted / drafted and lambda <- b2 lambda + (1 - b2) (lambda +- eps), + if r <= alpha. The update
    and its constants are those of self-speculative decoding (arXiv 2309.08168 and its script): alpha 0.9, b1 0.5, b2 0.9,
    eps 0.01, r = 0 at first. The papers do not state the first lambda; the default 0.6 is ours.

    The state is (lambda and r [S, 2], (1 - lambda)^2 / gamma [S]), the last one the largest entropy that passes.
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
        self.first_level, *rest = (validate_number("adaedl", k, v, 0.0, 1.0) for k, v in shares.items())
        self.gamma = validate_number("adaedl", "gamma", gamma, 1e-6)
        self._constants = np.array([*rest, self.gamma])
        self.max_depth = validate_int("adaedl", "max_depth", max_depth)
        self.name = f"adaedl:{start:g}"

    def start(self, streams: int, keys: Array) -> State:
        """Return the first state."""
        rates = np.tile((self.first_level, 0.0), (streams, 1))
        return rates, ((1.0 - rates[:, 0]) ** 2 / self.gamma).astype(np.float32)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches with an entropy that is low enough."""
        return step.alive & (step.features[:, :, 0] <= state[1][:, None]), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with lambda updated."""
        rates, max_entropy = (values.copy() for values in state)
        known = outcome.active, outcome.cut, outcome.accepted, outcome.verified
        update(*known, self._constants, rates, max_entropy)
        return rates, max_entropy
