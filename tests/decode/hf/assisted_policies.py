"""Policies for assisted generation: what they answer tells whether they are shown the right tokens and paths."""

from __future__ import annotations

import numpy as np
from specstop.policies.contract import Array, DraftStep, State, StopPolicy


class ByTokens(StopPolicy):
    """Decides by which tokens there are."""

    name, first, max_depth = "by-tokens", 1, 6
    features = ("anchor_token", "before_token", "drawn_token", "above_token")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features @ np.array([1, 2, 3, 5], dtype=np.float32) % 4 > 0), state


class ByPath(StopPolicy):
    """Is not asked about the first token, through which the path leads all the same."""

    name, first, max_depth, features = "by-path", 2, 6, ("path_logprob",)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[:, :, 0] > -2.0), state
