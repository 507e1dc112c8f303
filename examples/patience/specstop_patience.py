"""Stop drafting after a few unlikely tokens, not at the first."""

import numpy as np
from specstop.policies import DraftStep, PolicyError, StopPolicy


class Patience(StopPolicy):
    """Draft on until `chances` tokens of the round had a draft probability below `threshold`."""

    features = ("drawn_prob",)

    def __init__(self, chances: int = 2, threshold: float = 0.4, max_depth: int = 20) -> None:
        if chances < 1:
            raise PolicyError(f"patience: expected 1 chance or more, not {chances}")
        self.chances, self.threshold, self.max_depth = chances, threshold, max_depth
        self.name = f"patience:{chances}"

    def keep(self, step: DraftStep, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Count the unlikely tokens on each branch; the count is the state."""
        unlikely = (step.features[..., 0] < self.threshold).astype(np.int64)  # [S, B]
        if step.depth > 1:
            assert state is not None
            unlikely += np.take_along_axis(state, step.parent, 1)
        return step.alive & (unlikely < self.chances), unlikely
