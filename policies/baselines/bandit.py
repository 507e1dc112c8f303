"""A bandit over stop policies: each round one of them decides, and what counts is tokens per second."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..contract import (
    Array,
    DraftStep,
    RoundOutcome,
    State,
    StopPolicy,
)
from ..counter_rng import keyed_normal
from ..errors import PolicyError
from ..kernels import on_first_use
from .scores import check_number

KINDS = ("ucb", "thompson")
NOMINAL = 0.1
"""Without a profile rounds have no seconds: a drafted token then counts this share of a round."""


kernels = on_first_use("baselines.bandit")


@dataclass(frozen=True, slots=True)
class BanditState:
    """Of `Bandit`.

    Attributes:
        key: [S] of the noise.
        choice: [S] int64, the arm of this round.
        pulls: [S, A] rounds of each arm.
        sums: [S, A, 5] sums over its rounds of tokens t, seconds s, t t, t s and s s.
        arms: the arms' own states.
    """

    key: Array
    choice: Array
    pulls: Array
    sums: Array
    arms: tuple[State, ...]


class Bandit(StopPolicy):
    """Let one of several policies decide each round: the one that looks best by throughput, or is not known well enough.

    An arm's worth is its rate, the tokens of its rounds over their modelled seconds: a ratio of sums, since a mean of
    ratios, as of accepted over drafted tokens, rewards short rounds or long drafts. Each arm is tried once, in order; then

    * `ucb`: the largest rate / best rate + explore sqrt(ln t / n) (UCB1, Auer et al. 2002, explore = sqrt 2; so BanditSpec,
      arXiv 2505.15141, and TapOut, arXiv 2511.02017, with rewards of acceptance);
    * `thompson`: the largest draw from a normal around each rate, `explore` times as wide as the rate is uncertain.

    What is learned passes from text to text, and so does each arm's own state. An arm sees and observes the rounds that it
    decides, and no others. Rounds that an end of text or a limit cut do not count.

    Args:
        arms: policies that neither trim nor select, on scalar features.
        kind: `ucb` or `thompson`.
        explore: see above.
    """

    carries: ClassVar[bool] = True

    def __init__(self, arms: Sequence[StopPolicy], kind: str = "ucb", explore: float = 2.0**0.5) -> None:
        if not arms:
            raise PolicyError("bandit: expected one arm or more")
        if kind not in KINDS:
            raise PolicyError(f"bandit: expected for kind one of {', '.join(KINDS)}, not {kind!r}")
        for arm in arms:
            # Who runs the bandit asks it for these once, and cannot follow an arm that differs in them from round to round.
            if arm.trims or arm.hidden or arm.reads_clock or arm.joint or type(arm).select is not StopPolicy.select:
                raise PolicyError(
                    f"bandit: the arm {arm.name} trims, selects, reads hidden states or the clock, or weighs streams"
                )
        self.parts, self.kind = tuple(arms), kind
        self.explore = check_number("bandit", "explore", explore, 0.0)
        self.features = tuple(dict.fromkeys(name for arm in arms for name in arm.features))
        self._columns = [[self.features.index(name) for name in arm.features] for arm in arms]
        self._learns = [type(arm).observe is not StopPolicy.observe for arm in arms]
        self.max_depth = max(arm.max_depth for arm in arms)
        self.first = min(arm.first for arm in arms)
        self.name = f"bandit:{kind}"

    @property
    def arms(self) -> tuple[StopPolicy, ...]:
        """The policies."""
        return self.parts

    def limited(self, depth: int) -> StopPolicy:
        """Return this policy with every arm limited; see `StopPolicy.limited`."""
        if self.max_depth <= depth:
            return self
        other = copy.copy(self)  # with the name that the user gave it
        other.parts = tuple(arm.limited(depth) for arm in self.arms)
        other.max_depth = max(arm.max_depth for arm in other.parts)
        return other

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams that have tried nothing."""
        arms, states = len(self.arms), tuple(arm.start(streams, keys) for arm in self.arms)
        choice = np.zeros(streams, dtype=np.int64)
        return BanditState(keys, choice, np.zeros((streams, arms)), np.zeros((streams, arms, 5)), states)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep what the round's arm keeps."""
        kept, states, chosen = np.zeros_like(step.alive), list(state.arms), set(state.choice.tolist())
        for at in chosen:
            arm = self.arms[at]
            mine = step.alive if len(chosen) == 1 else step.alive & (state.choice == at)[:, None]
            # Towards its arms the bandit stands for the loop, which asks no policy at its `max_depth` nor before its `first`.
            if step.depth >= arm.max_depth or (mine is not step.alive and not mine.any()):
                continue
            if step.depth < arm.first:
                kept |= mine
                continue
            answer, states[at] = arm.keep(self._shown(step, at, mine), state.arms[at])
            kept |= answer
        return kept, BanditState(state.key, state.choice, state.pulls, state.sums, tuple(states))

    def _shown(self, step: DraftStep, at: int, mine: Array) -> DraftStep:
        """Return the step as an arm sees it: its own features, and only the streams that it decides."""
        features = step.features
        if self.arms[at].features != self.features:
            # `take`, since kernels want C order, which indexing by a list need not give.
            features = features.take(self._columns[at], 2)
        if mine is not step.alive:
            features = np.where(mine[..., None], features, np.float32(0.0))  # as `DraftStep` promises of rows not alive
        return DraftStep(step.depth, mine, step.parent, features, step.hidden, step.batch)

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with the round's reward, and the next round's arm."""
        states = list(state.arms)
        for at in set(state.choice.tolist()):
            if self._learns[at]:
                heard = outcome.active & (state.choice == at)
                states[at] = self.arms[at].observe(replace(outcome, active=heard), state.arms[at])
        choice, pulls, sums = state.choice.copy(), state.pulls.copy(), state.sums.copy()
        told = outcome.active, outcome.cut, outcome.accepted, outcome.drafted, outcome.verified, outcome.seconds
        kernels().add_reward(*told, NOMINAL, choice, pulls, sums)
        normals = np.empty((len(choice), 0))
        if self.kind == "thompson":
            # Numbered by the rounds that have counted: live and in replay the same.
            normals = keyed_normal(state.key, pulls.sum(1).astype(np.int64), len(self.arms))
        kernels().choose(outcome.active, pulls, sums, self.explore, normals, choice)
        return BanditState(state.key, choice, pulls, sums, tuple(states))
