"""C2T: prune the nodes of a tree by a confidence."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..arguments import validate_int, validate_number
from ..contract import Array, DraftStep, State, StopPolicy


class C2T(StopPolicy):
    """Keep the nodes with sigmoid(log P - `entropy` H - `slope` d + `bias`) >= 1/2: joint probability P, entropy H, depth d.

    C2T (arXiv 2502.13652, sec. 3) trains a two-layer network on these three inputs. This policy is a single unit with weights
    set by hand. It does not verify other nodes, so it is for `match` verification, and for temperature 0.
    """

    features = ("path_logprob", "entropy")
    trims: ClassVar[bool] = True

    def __init__(self, bias: float = 2.0, entropy: float = 0.3, slope: float = 0.0, max_depth: int = 20) -> None:
        weights = {"bias": bias, "entropy": entropy, "slope": slope}
        self.bias, self.entropy, self.slope = (validate_number("c2t", k, v, -100.0) for k, v in weights.items())
        self.max_depth = validate_int("c2t", "max_depth", max_depth)
        self.name = f"c2t:{bias:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the nodes with a logit of 0 or more."""
        features = step.features.astype(np.float64)
        confident = features[:, :, 0] - self.entropy * features[:, :, 1] >= self.slope * step.depth - self.bias
        return step.alive & confident, state
