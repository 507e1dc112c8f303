"""Policies that decide at the start of a round which drafters draft, and then when each of them stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .arguments import validate_number
from .contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from .errors import PolicyError
from .features import Kind, feature
from .fixed import FixedLength
from .heads.base import Head
from .learned import TrainingMetadata


class RoutingPolicy(StopPolicy):
    """Chooses drafters at depth 0. Each drafter has a separate stop policy.

    Subclasses implement `route`.

    Args:
        stops: the stop policy of each drafter. They observe the rounds in which their drafter drafted alone.
        features: that `route` reads.

    Raises:
        PolicyError: a stop policy selects, trims, reads hidden states, or weighs streams against each other.

    Attributes:
        metadata: of the training; empty for rules.
    """

    routes = True
    metadata = TrainingMetadata()

    def __init__(self, stops: Sequence[StopPolicy], features: Sequence[str] = ()) -> None:
        for stop in stops:
            selects = type(stop).select is not StopPolicy.select
            if selects or stop.trims or stop.joint or stop.hidden or stop.routes or stop.unasked:
                raise PolicyError(f"{self.name}: {stop.name} cannot be the stop policy of one of several drafters")
        self.first = 0
        self.stops = self.parts = tuple(stops)
        self.features = tuple(dict.fromkeys([*features, *(name for stop in stops for name in stop.features)]))
        self.max_depth = max(stop.max_depth for stop in stops)
        observed = [stop for stop in stops if type(stop).observe is not StopPolicy.observe]
        self.reads_seconds = any(stop.reads_seconds for stop in observed)  # type: ignore[misc]
        self._observes = bool(observed)
        if all(type(stop) is FixedLength for stop in stops):
            self.lengths = np.array([stop.max_depth for stop in stops])
        self._routed = slice(len(dict.fromkeys(features)))  # they come first
        self._read = [[self.features.index(name) for name in stop.features] for stop in stops]

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        """Return which drafters draft, [S, D] bool, and the new state.

        Args:
            features: [S, D, F] float32, the declared features of each drafter.
            state: of the route, see `start_route`.
        """
        raise TypeError(f"{type(self).__name__} does not implement route()")

    def describe(self) -> dict[str, Any]:
        """Return facts for display: what it reads, stop policies, conditions of the training, provenance and metrics."""
        return {
            "kind": "policy that routes",
            "name": self.name,
            "features": ", ".join(self.features),
            "stop policies of the drafters": ", ".join(stop.name for stop in self.stops),
            "max depth": self.max_depth,
            **self.metadata.describe(),
        }

    def start_route(self, streams: int, keys: Array) -> State:
        """Return the state of `route` for new texts."""
        return None

    def start(self, streams: int, keys: Array) -> State:
        """See `StopPolicy`."""
        return self.start_route(streams, keys), *(stop.start(streams, keys) for stop in self.stops)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """See `StopPolicy`."""
        owner = np.zeros(step.alive.shape[1], dtype=np.int64) if step.drafter is None else step.drafter
        if owner[-1] >= len(self.stops):  # in ascending order
            raise PolicyError(f"{self.name}: expected at most {len(self.stops)} drafters, got {owner[-1] + 1}")
        kept, parts = step.alive.copy(), list(state)
        if step.depth == 0:
            routed, parts[0] = self.route(step.features[..., self._routed], state[0])
            kept &= routed
        if self.lengths is not None:
            return kept & (step.depth < self.lengths[owner]), tuple(parts)
        for index, stop in enumerate(self.stops):
            branches = np.flatnonzero(owner == index)
            if not len(branches) or not kept[:, branches].any():
                continue
            if step.depth >= stop.max_depth:
                kept[:, branches] = False
            elif step.depth >= stop.first:
                part = self._drafter_step(step, index, branches, kept)
                kept[:, branches], parts[index + 1] = stop.keep(part, state[index + 1])
        return kept, tuple(parts)

    def _drafter_step(self, step: DraftStep, index: int, branches: Array, alive: Array) -> DraftStep:
        """Return the step of one drafter as its stop policy receives it."""
        offset = 0 if step.parent_drafter is None else int(np.searchsorted(step.parent_drafter, index))
        features = np.ascontiguousarray(step.features[:, branches][..., self._read[index]])
        parent, alive = (np.ascontiguousarray(each[:, branches]) for each in (step.parent, alive))
        parent = parent - offset if step.depth else parent
        return replace(step, alive=alive, parent=parent, features=features, drafter=None, parent_drafter=None)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """See `StopPolicy`."""
        if not self._observes:
            return state
        drafting = np.ones((len(outcome.active), 1), dtype=bool) if outcome.drafting is None else outcome.drafting
        alone = outcome.active & (drafting.sum(1) == 1)
        parts = [state[0]]
        for index, stop in enumerate(self.stops):
            active = alone & (drafting[:, index] if index < drafting.shape[1] else False)
            parts.append(stop.observe(replace(outcome, active=active, drafting=None), state[index + 1]))
        return tuple(parts)


class OneDrafter(StopPolicy):
    """Drafts a fixed length with one drafter. It has no state, so it can replace a policy that fails in a round.

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
        self.feature = feature
        super().__init__(stops, [feature])

    def describe(self) -> dict[str, Any]:
        """See `RoutingPolicy`."""
        return {**super().describe(), "rule": f"{self.feature} of at least {self.level:g}"}

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        """See `RoutingPolicy`."""
        passes = features[..., 0] >= self.level  # [S, D]
        passes[:, -1] = True
        return np.arange(passes.shape[1]) == passes.argmax(1)[:, None], state


def agreement(level: float = 1, lengths: int | str = "8+4") -> ThresholdRoute:
    """Use the first drafter while it would have predicted the last tokens of the text, and else the last drafter.

    Args:
        level: number of such tokens.
        lengths: draft length of each drafter, separated by +.
    """
    return _rule("agreement", "agreement_run", validate_number("agreement", "level", level, 0.0), lengths)


def match(level: float = 0.5, lengths: int | str = "8+4") -> ThresholdRoute:
    """Use the first drafter while its best continuation is likely enough, and else the last drafter.

    Args:
        level: smallest probability of that continuation.
        lengths: draft length of each drafter, separated by +.
    """
    return _rule("match", "match_prob", validate_number("match", "level", level, 0.0, 1.0), lengths)


def _rule(name: str, feature: str, level: float, lengths: int | str) -> ThresholdRoute:
    words = str(lengths).split("+")
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise PolicyError(f"{name}: lengths: expected one for each drafter, such as 8+4, not {lengths!r:.80}")
    rule = ThresholdRoute(feature, level, [FixedLength(int(word)) for word in words])
    rule.name = f"{name}:{level:g}"
    return rule


class ValueRoute(RoutingPolicy):
    """Chooses the drafter, or plain decoding, with the largest predicted value of the round and of what follows it.

    The options are the D drafters and, last, plain decoding. One option is the reference. Each other one has a head, which
    predicts its gain over the reference in tokens, with seconds counted as tokens at the rate rho: gain g is the probability
    0.5 + g / (2 span), so that an option is better than the reference if its logit is positive.

    Args:
        name: of the policy.
        features: known before drafting. Heads read those of all drafters (`input_features`).
        heads: of each option but the reference, in their order. Without any, the reference is always chosen.
        reference: index of the reference.
        stops: the stop policy of each drafter.
        metadata: of the training.
    """

    def __init__(
        self,
        name: str,
        features: Sequence[str],
        heads: Sequence[Head],
        reference: int,
        stops: Sequence[StopPolicy],
        metadata: TrainingMetadata | None = None,
    ) -> None:
        self.name, self.heads, self.reference = name, tuple(heads), reference
        self.route_features, self.metadata = tuple(features), metadata or TrainingMetadata()
        super().__init__(stops, self.route_features)
        if len(self.heads) not in (0, len(self.stops)) or not 0 <= reference <= len(self.stops):
            raise PolicyError(f"{name}: expected as many heads as drafters, and a reference among the options")
        self._inputs, _ = input_features(self.route_features, len(self.stops))
        if not heads and not features and self.lengths is not None:  # nothing is to be decided
            self.first = self.max_depth
            self.lengths = np.where(np.arange(len(self.stops)) == reference, self.lengths, 0)

    def describe(self) -> dict[str, Any]:
        """See `RoutingPolicy`."""
        return {**super().describe(), "heads": ", ".join(dict.fromkeys(head.kind for head in self.heads)) or "none"}

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        """See `RoutingPolicy`."""
        streams, drafters, width = features.shape
        flat = features.reshape(streams, drafters * width)
        options = self.options(np.ascontiguousarray(flat[:, self._inputs]))
        return np.arange(drafters) == options[:, None], state

    def options(self, inputs: Array) -> Array:
        """Return [S] int64, the option that is chosen, given the inputs [S, F'] of the heads."""
        if not self.heads:
            return np.full(len(inputs), self.reference)
        gains = np.stack([head.scores(inputs, 1)[:, 0] for head in self.heads], 1)
        gains = np.insert(gains, self.reference, 0.0, axis=1)  # [S, D + 1]
        out: Array = gains.argmax(1)
        return out


def input_features(features: Sequence[str], drafters: int) -> tuple[Array, tuple[str, ...]]:
    """Return what the heads of a `ValueRoute` read of features [S, D, F]: ANCHOR ones once, the others of all drafters.

    Returns:
        [F'] int64 columns of the features as [S, D * F], and the F' names.
    """
    columns, names = [], []
    for at, name in enumerate(features):
        once = feature(name).kind is Kind.ANCHOR or name == "prompt_tokens"
        for drafter in range(1 if once else drafters):
            columns.append(drafter * len(features) + at)
            names.append(name)
    return np.array(columns, dtype=np.int64), tuple(names)
