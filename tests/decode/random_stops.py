"""Random stop rules that look at nothing but what has been drafted: by a hash of what they are shown."""

from __future__ import annotations

import numpy as np
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.counter_rng import mix


class ByTokens(StopPolicy):
    """Stops by chance, which the tokens drafted so far decide.

    Args:
        seed: of the rule.
        depth: the most that it drafts.
        first: the first depth at which it is called.
        stops: its chance to stop.
    """

    features = ("drawn_token", "depth", "top1")

    def __init__(self, seed: int, depth: int, first: int = 1, stops: float = 0.35) -> None:
        self.name, self._seed, self.first, self.max_depth, self._stops = f"by-tokens-{seed}", seed, first, depth, stops

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros((streams, 1), dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        state = state * (step.depth > 1)
        seen = mix(
            np.ascontiguousarray(step.features[..., :1], dtype=np.float32).view(np.int32).astype(np.int64)[..., 0]
        )
        state = (
            np.broadcast_to(state, seen.shape)
            if state.shape[1] == 1
            else state[np.arange(len(state))[:, None], step.parent]
        )
        state = mix(state + seen + step.depth * 77 + self._seed * 7919)
        return step.alive & ((state & 1023) >= self._stops * 1024), state


class TrimmingByRows(ByTokens):
    """Stops and leaves the last token out by what the draft's rows say, the tokens unseen."""

    features, trims = ("top1", "depth", "entropy"), True
