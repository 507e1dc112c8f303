"""SVIP: a bound on the entropy of the draft."""

from __future__ import annotations

import numpy as np

from ..arguments import validate_int, validate_number
from ..contract import Array, DraftStep, State, StopPolicy


class EntropyBound(StopPolicy):
    """Draft while the entropy of q_j, in nats at temperature 1, is at most a level.

    SVIP (arXiv 2411.18462, eq. 6) stops after x_j if sqrt(c H_j) > h. The released script has c = 0.15 and h = 0.3, that is
    a level of h^2 / c = 0.6 nats, and 1 to 40 tokens. AdaEDL is the same rule with a level that adapts.
    """

    features = ("entropy",)

    def __init__(self, level: float = 0.6, max_depth: int = 40) -> None:
        self.level = float(np.float32(validate_number("entropy", "level", level, 0.0)))
        self.max_depth = validate_int("entropy", "max_depth", max_depth)
        self.name = f"entropy:{level:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches with an entropy that is low enough."""
        return step.alive & (step.features[:, :, 0] <= self.level), state
