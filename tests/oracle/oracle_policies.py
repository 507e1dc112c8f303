"""Policies of the oracle's own, each using a part of the contract; they import public names only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from specstop.policies import DraftStep, DraftTree, RoundOutcome, StopPolicy

Array = np.ndarray[Any, Any]
State = Any

DEPTH = 5
FEATURES = (
    *("anchor_entropy", "anchor_top1", "anchor_margin", "anchor_prob", "anchor_token", "before_token", "temperature"),
    *(f"top{rank}" for rank in range(1, 11)),
    *("margin", "top1_logit", "entropy", "drawn_prob", "path_logprob", "noisy_margin", "noisy_score", "noisy_lead"),
    *("drawn_token", "above_token", "depth", "branch_rank"),
    *("mean_accepted", "mean_full", "last_accepted", "last_verified"),
)
"""Every scalar feature."""
QUIET = tuple(name for name in FEATURES if not name.startswith("noisy_"))
"""Those that every verification has."""


class FromAnchor(StopPolicy):
    """Asked at depth 0, where it sometimes stops."""

    name, features, first, max_depth = "from-anchor", ("top2", "anchor_top1", "drawn_prob"), 0, DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        keep = step.features[..., 1] < 0.6 if step.depth == 0 else step.features[..., 2] > 0.3
        return step.alive & keep, state


class Trimming(StopPolicy):
    """Drops the token just drawn where it stops."""

    name, features, trims, max_depth = "trimming", ("top1", "entropy"), True, DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[..., 0] > 0.2) & (step.features[..., 1] < 2.4), state


class Selecting(StopPolicy):
    """Drafts all it may, then verifies one level less from round to round, down to none."""

    name, max_depth = "selecting", DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.depth <= (DEPTH - state % (DEPTH + 1))[:, None]

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + outcome.active


class Randomised(StopPolicy):
    """Decides by a number made of the stream's key and the number of its decisions."""

    name, first, max_depth = "randomised", 0, DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return keys, np.zeros_like(keys)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        key, count = state
        keep = ((key >> 7) + 977 * count) % 5 != 0
        return step.alive & keep[:, None], (key, count + step.alive[:, 0])


class Adaptive(StopPolicy):
    """Its length follows what rounds brought and the seconds they are modelled to take."""

    name, max_depth = "adaptive", DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.ones(streams, dtype=np.int64), np.zeros(streams)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        length, seconds = state
        bonus = np.floor(seconds * 1e5 + 1e-3).astype(np.int64) % 2
        return step.alive & (step.depth < length + bonus)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        length, seconds = state
        moved = np.clip(length + np.where(outcome.accepted == outcome.verified, 2, -1), 1, DEPTH)
        length = np.where(outcome.active & ~outcome.cut, moved, length)
        return length, seconds + outcome.seconds


class Raising(StopPolicy):
    """Fails in its third round."""

    name, max_depth = "raising", DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        if (state > 2).any():
            raise RuntimeError("made to fail")
        return step.alive, state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + outcome.active


@dataclass
class Seen:
    """What a policy was shown: steps, trees and outcomes, in order."""

    steps: list[DraftStep] = field(default_factory=list)
    trees: list[DraftTree] = field(default_factory=list)
    outcomes: list[RoundOutcome] = field(default_factory=list)


class Watching(StopPolicy):
    """Notes all that it is shown; drafts on where a third of the probability lies on one token."""

    name, first, max_depth = "watching", 0, DEPTH

    def __init__(self, features: tuple[str, ...], hidden: tuple[str, ...] = (), selects: bool = False) -> None:
        self.features, self.hidden, self.seen, self.selects = features, hidden, Seen(), selects
        self.at = features.index("top1")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        self.seen.steps.append(step)
        return step.alive & ((step.features[..., self.at] > 0.33) | (step.depth < 2)), state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        self.seen.outcomes.append(outcome)
        return state


class WatchingTrees(Watching):
    """Notes the trees that it may select from as well, and leaves every fourth node and what is below it out."""

    name = "watching-trees"

    def select(self, tree: DraftTree, state: State) -> Array:
        self.seen.trees.append(tree)
        sent = tree.drawn & (np.arange(tree.depth.shape[1]) % 4 != 3)
        for node in range(tree.depth.shape[1]):
            parent = tree.parent[:, node]
            above = np.where(parent < 0, True, sent[np.arange(len(sent)), np.maximum(parent, 0)])
            sent[:, node] &= above
        return sent


OWN = {made.name: made for made in (FromAnchor, Trimming, Selecting, Randomised, Adaptive)}
"""By name, those that decide by what every verification has."""
