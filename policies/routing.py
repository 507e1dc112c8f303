"""Policies that decide at the start of a round which drafters draft, and then when each of them stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from .errors import PolicyError


class RoutingPolicy(StopPolicy):
    """Chooses drafters at depth 0. Each drafter then has a stop policy of its own.

    Subclasses implement `route`.

    Args:
        stops: the stop policy of each drafter. They observe the rounds in which their drafter drafted alone.
        features: that `route` reads.

    Raises:
        PolicyError: a stop policy selects, trims, reads hidden states, or weighs streams against each other.
    """

    routes = True

    def __init__(self, stops: Sequence[StopPolicy], features: Sequence[str] = ()) -> None:
        for stop in stops:
            selects = type(stop).select is not StopPolicy.select
            if selects or stop.trims or stop.joint or stop.hidden or stop.routes or stop.unasked:
                raise PolicyError(f"{self.name}: {stop.name} cannot be the stop policy of one of several drafters")
        self.first = 0
        self.stops = self.parts = tuple(stops)
        self.features = tuple(dict.fromkeys([*features, *(name for stop in stops for name in stop.features)]))
        self.max_depth = max(stop.max_depth for stop in stops)
        self._routed = [self.features.index(name) for name in features]
        self._read = [[self.features.index(name) for name in stop.features] for stop in stops]

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        """Return which drafters draft, [S, D] bool, and the new state.

        Args:
            features: [S, D, F] float32, the declared features of each drafter.
            state: of the route, see `start_route`.
        """
        raise TypeError(f"{type(self).__name__} does not implement route()")

    def start_route(self, streams: int, keys: Array) -> State:
        """Return the state of `route` for new texts."""
        return None

    def start(self, streams: int, keys: Array) -> State:
        """See `StopPolicy`."""
        return self.start_route(streams, keys), *(stop.start(streams, keys) for stop in self.stops)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """See `StopPolicy`."""
        owner = np.zeros(step.alive.shape[1], dtype=np.int64) if step.drafter is None else step.drafter
        if (count := int(owner.max()) + 1) > len(self.stops):
            raise PolicyError(f"{self.name}: expected at most {len(self.stops)} drafters, got {count}")
        kept, parts = step.alive.copy(), list(state)
        if step.depth == 0:
            routed, parts[0] = self.route(step.features[..., self._routed], state[0])
            kept &= routed
        for index, stop in enumerate(self.stops):
            branches = np.flatnonzero(owner == index)
            if not len(branches) or not kept[:, branches].any():
                continue
            if step.depth >= stop.max_depth:
                kept[:, branches] = False
            elif step.depth >= stop.first:
                own = self._own_step(step, index, branches, kept)
                kept[:, branches], parts[index + 1] = stop.keep(own, state[index + 1])
        return kept, tuple(parts)

    def _own_step(self, step: DraftStep, index: int, branches: Array, alive: Array) -> DraftStep:
        """Return the step of one drafter as its stop policy receives it."""
        offset = 0 if step.parent_drafter is None else int(np.searchsorted(step.parent_drafter, index))
        features = np.ascontiguousarray(step.features[:, branches][..., self._read[index]])
        parent, own = (np.ascontiguousarray(each[:, branches]) for each in (step.parent, alive))
        parent = parent - offset if step.depth else parent
        return replace(step, alive=own, parent=parent, features=features, drafter=None, parent_drafter=None)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """See `StopPolicy`."""
        drafting = np.ones((len(outcome.active), 1), dtype=bool) if outcome.drafting is None else outcome.drafting
        alone = outcome.active & (drafting.sum(1) == 1)
        parts = [state[0]]
        for index, stop in enumerate(self.stops):
            active = alone & (drafting[:, index] if index < drafting.shape[1] else False)
            parts.append(stop.observe(replace(outcome, active=active, drafting=None), state[index + 1]))
        return tuple(parts)


class OneDrafter(StopPolicy):
    """Uses one drafter in every round, with a stop policy that reads no features, such as a fixed length.

    Args:
        length: tokens to draft.
        index: of the drafter.
    """

    routes = True

    def __init__(self, length: int, index: int = 0) -> None:
        self.name, self.max_depth, self.first, self.index = f"fixed:{length}", length, 0, index

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """See `StopPolicy`."""
        kept = step.alive & (step.depth < self.max_depth)
        return kept if step.drafter is None else kept & (step.drafter == self.index), state


class ThresholdRoute(RoutingPolicy):
    """Uses the first drafter with a feature of at least a level, and the last drafter if there is none.

    With `agreement_run` and level 1, a drafter is used while it would have predicted the last token. With `match_prob`, it is
    used while its best continuation is likely enough, as engines decide.

    Args:
        feature: its name.
        level: see above.
        stops: the stop policy of each drafter.
    """

    def __init__(self, feature: str, level: float, stops: Sequence[StopPolicy]) -> None:
        self.name, self.level = f"route-{feature.replace('_', '-')}:{level:g}", np.float32(level)
        super().__init__(stops, [feature])

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        """See `RoutingPolicy`."""
        passes = features[..., 0] >= self.level  # [S, D]
        passes[:, -1] = True
        return np.arange(passes.shape[1]) == passes.argmax(1)[:, None], state
