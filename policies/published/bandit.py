"""BanditSpec and TapOut: a bandit over stop policies, rewarded by tokens per second."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..arguments import validate_number
from ..contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from ..counter_rng import keyed_normal
from ..errors import PolicyError
from ..kernels.compiled import kernel
from ..registry import load_policy

KINDS = ("ucb", "thompson")
ARMS = "fixed:2,fixed:4,fixed:8,confidence:0.4,entropy:0.6,maxprob:0.6"
DRAFT_COST = 0.1  # seconds of a drafted token as a share of a round, if there is no profile
TINY = 1e-30  # replaces 0 in a denominator


@kernel("void(b1[::1], b1[::1], i8[::1], i8[::1], f8[::1], f8, f8[:,::1], f8[:,:,::1], i8[::1])")
def learn_and_choose(
    active: Any, counted: Any, drafted: Any, accepted: Any, seconds: Any, explore: float, normals: Any, sums: Any, choice: Any
) -> None:  # fmt: skip
    """Add the rounds [S] to the sums of their arms, and write the next arms: by normals [S, A], or UCB if they are empty."""
    for s in range(choice.shape[0]):
        if counted[s]:
            t, spent = accepted[s] + 1.0, seconds[s] if seconds[s] > 0.0 else 1.0 + DRAFT_COST * drafted[s]
            for i, value in enumerate((1.0, t, spent, t * t, t * spent, spent * spent)):
                sums[s, choice[s], i] += value
        rounds, best_rate, best = 0.0, TINY, -np.inf
        for a in range(sums.shape[1]):
            rounds += sums[s, a, 0]
            best_rate = max(best_rate, sums[s, a, 1] / max(sums[s, a, 2], TINY))
        for a in range(sums.shape[1] if active[s] else 0):
            if sums[s, a, 0] == 0.0:  # not tried yet
                choice[s] = a
                break
            total = max(sums[s, a, 2], TINY)
            rate = sums[s, a, 1] / total
            # UCB is relative to the best rate, because its bonus is that of rewards between 0 and 1.
            value = rate / best_rate + explore * np.sqrt(np.log(max(rounds, 1.0)) / sums[s, a, 0])
            if normals.shape[1]:
                # The variance of tokens - rate x seconds, plus that of one token before any is observed; the deviation of
                # a ratio of sums by the delta method.
                spread = max(sums[s, a, 3] - 2.0 * rate * sums[s, a, 4] + rate * rate * sums[s, a, 5], 0.0) + 1.0
                value = rate + explore * (np.sqrt(spread) / total) * normals[s, a]
            if value > best:
                choice[s], best = a, value


@dataclass(slots=True)  # not frozen, like `DraftStep`
class BanditState:
    """State of `Bandit`."""

    key: Array  # [S] of the random numbers
    choice: Array  # [S] int64, the arm of this round
    sums: Array  # [S, A, 6] rounds of each arm, and sums over them of tokens t, seconds s, t t, t s and s s
    arms: tuple[State, ...]


class Bandit(StopPolicy):
    """Let one of several policies decide each round: the one with the best throughput, or one with few rounds so far.

    The rate of an arm is the tokens of its rounds over their modelled seconds. It is a ratio of sums: a mean of ratios, as of
    accepted over drafted tokens, rewards short rounds or long drafts. Each arm is tried once, in order. After that the choice
    is, by `kind`:

    * `ucb`: the largest rate / best rate + explore sqrt(ln t / n) (UCB1, Auer et al. 2002, explore = sqrt 2; so BanditSpec,
      arXiv 2505.15141, and TapOut, arXiv 2511.02017, with rewards of acceptance);
    * `thompson`: the largest sample from a normal around each rate, with `explore` times its standard deviation.

    Rates and the states of the arms pass from text to text. An arm is called only in the rounds that it decides. Rounds that
    are cut by an end of text or a limit do not count.

    Args:
        kind: `ucb` or `thompson`.
        arms: policies that neither trim nor select, on scalar features; or their specs, separated by commas.
    """

    carries: ClassVar[bool] = True

    def __init__(self, explore: float = 2.0**0.5, kind: str = "ucb", arms: str | Sequence[StopPolicy] = ARMS) -> None:
        if not isinstance(arms, list | tuple):
            arms = [load_policy(arm) for arm in str(arms).split(",") if arm]
        if not arms:
            raise PolicyError("bandit: expected one arm or more")
        if kind not in KINDS:
            raise PolicyError(f"bandit: expected for kind one of {', '.join(KINDS)}, not {kind!r}")
        for arm in arms:
            # A host reads these attributes once, so they must not differ from round to round.
            if arm.trims or arm.hidden or arm.reads_clock or arm.joint or type(arm).select is not StopPolicy.select:
                raise PolicyError(
                    f"bandit: the arm {arm.name} trims, selects, reads hidden states or the clock, or weighs streams"
                )
        self.parts, self.kind = tuple(arms), kind
        self.explore = validate_number("bandit", "explore", explore, 0.0)
        self.features = tuple(dict.fromkeys(name for arm in arms for name in arm.features))
        self._columns = [[self.features.index(name) for name in arm.features] for arm in arms]
        self.max_depth = max(arm.max_depth for arm in arms)
        self.first = min(arm.first for arm in arms)
        self.name = f"bandit:{kind}"

    def limited(self, depth: int) -> StopPolicy:
        """Return this policy with each arm limited; see `StopPolicy.limited`."""
        if self.max_depth <= depth:
            return self
        other = copy.copy(self)
        other.max_depth, other.parts = depth, tuple(arm.limited(depth) for arm in self.parts)
        return other

    def start(self, streams: int, keys: Array) -> State:
        """Return the state of streams without rounds."""
        states = tuple(arm.start(streams, keys) for arm in self.parts)
        return BanditState(keys, np.zeros(streams, np.int64), np.zeros((streams, len(states), 6)), states)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep what the round's arm keeps."""
        kept, states, chosen = np.zeros_like(step.alive), list(state.arms), set(state.choice.tolist())
        for index in chosen:
            arm = self.parts[index]
            alive = step.alive if len(chosen) == 1 else step.alive & (state.choice == index)[:, None]
            # The bandit is the arm's host: an arm is not called at its `max_depth` nor before its `first`.
            if step.depth >= arm.max_depth or (len(chosen) > 1 and not alive.any()):
                continue
            if step.depth < arm.first:
                kept |= alive
                continue
            features = step.features
            if arm.features != self.features:
                features = features.take(self._columns[index], 2)  # indexing by a list need not give C order
            if len(chosen) > 1:  # an arm sees only the streams that it decides
                features = np.where(alive[..., None], features, np.float32(0.0))
            # A copy, as an arm may write into it.
            part = DraftStep(step.depth, alive.copy(), step.parent, features, step.hidden, step.batch)
            answer, states[index] = arm.keep(part, state.arms[index])
            kept |= answer & alive
        return kept, BanditState(state.key, state.choice, state.sums, tuple(states))

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with the round's reward, and the next round's arm."""
        states = list(state.arms)
        for index in set(state.choice.tolist()):
            if type(self.parts[index]).observe is not StopPolicy.observe:
                part = replace(outcome, active=outcome.active & (state.choice == index))
                states[index] = self.parts[index].observe(part, state.arms[index])
        # A round of which no drafted token was verified says nothing about the arm.
        counted = outcome.active & ~outcome.cut & ((outcome.verified > 0) | (outcome.drafted == 0))
        choice, sums, normals = state.choice.copy(), state.sums.copy(), np.empty((len(state.choice), 0))
        if self.kind == "thompson":  # numbered by the rounds that count, so that replay equals the live loop
            rounds = (sums[:, :, 0].sum(1) + counted).astype(np.int64)
            normals = keyed_normal(state.key, rounds, len(self.parts))
        tokens = outcome.drafted, outcome.accepted
        learn_and_choose(outcome.active, counted, *tokens, outcome.seconds, self.explore, normals, sums, choice)
        return BanditState(state.key, choice, sums, tuple(states))
