"""A bandit over stop policies: each round one of them decides, and what counts is tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .baselines_adaptive import tells
from .baselines_scores import check_number
from .contract import DraftStep, RoundOutcome, State, StopPolicy, checked_keep, checked_observe, checked_start
from .draws import keyed_normal
from .errors import PolicyError

KINDS = ("ucb", "thompson")
NOMINAL = 0.1
"""Without a profile rounds have no seconds: a drafted token then counts this share of a round."""


@dataclass(frozen=True)
class BanditState:
    """Of `Bandit`.

    Attributes:
        key: [S] of the noise.
        choice: [S] the arm of this round.
        pulls: [S, A] rounds of each arm.
        sums: [S, A, 5] sums over its rounds of tokens t, seconds s, t t, t s and s s.
        arms: the arms' own states.
    """

    key: Tensor
    choice: Tensor
    pulls: Tensor
    sums: Tensor
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
            if arm.trims or arm.vectors or arm.reads_clock or type(arm).select is not StopPolicy.select:
                raise PolicyError(f"bandit: the arm {arm.name} trims, selects, or reads hidden states or the clock")
        self.arms, self.kind = tuple(arms), kind
        self.explore = check_number("bandit", "explore", explore, 0.0)
        self.features = tuple(dict.fromkeys(name for arm in arms for name in arm.features))
        self._columns = [[self.features.index(name) for name in arm.features] for arm in arms]
        self.max_depth = max(arm.max_depth for arm in arms)
        self.first = min(arm.first for arm in arms)
        self.name = f"bandit:{kind}"

    def limited(self, depth: int) -> StopPolicy:
        """Return this policy with every arm limited; see `StopPolicy.limited`."""
        return Bandit([arm.limited(depth) for arm in self.arms], self.kind, self.explore)

    def start(self, streams: int, key: Tensor) -> State:
        """Return the state of streams that have tried nothing."""
        like = torch.zeros(streams, len(self.arms), dtype=torch.float64, device=key.device)
        states = tuple(checked_start(arm, streams, key) for arm in self.arms)
        return BanditState(key, torch.zeros_like(key), like, like.new_zeros(*like.shape, 5), states)

    def keep(self, step: DraftStep, state: State) -> tuple[Tensor, State]:
        """Keep what the round's arm keeps."""
        kept, states = torch.zeros_like(step.alive), list(state.arms)
        for at, arm in enumerate(self.arms):
            mine = step.alive & (state.choice == at)[:, None]
            if step.depth >= arm.max_depth or not bool(mine.any()):
                continue
            if step.depth < arm.first:
                kept = kept | mine
                continue
            features = torch.where(mine[..., None], step.features[..., self._columns[at]], 0.0)
            own = DraftStep(step.depth, mine, step.parent, features)
            answer, states[at] = checked_keep(arm, own, state.arms[at])
            kept = kept | (answer & mine)
        return kept, replace(state, arms=tuple(states))

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Return the state with the round's reward, and the next round's arm."""
        chosen = torch.nn.functional.one_hot(state.choice, len(self.arms)).bool()
        states = tuple(
            checked_observe(arm, replace(outcome, active=outcome.active & chosen[:, at]), state.arms[at])
            for at, arm in enumerate(self.arms)
        )
        counts = (tells(outcome) | (outcome.active & ~outcome.cut & (outcome.drafted == 0)))[:, None] & chosen
        tokens = outcome.accepted.double() + 1.0
        nominal = 1.0 + NOMINAL * outcome.drafted.double()
        seconds = torch.where(outcome.seconds > 0, outcome.seconds.double(), nominal)
        news = torch.stack([tokens, seconds, tokens * tokens, tokens * seconds, seconds * seconds], -1)
        sums = state.sums + counts[..., None] * news[:, None]
        pulls = state.pulls + counts
        choice = self._choice(state.key, pulls, sums)
        return BanditState(state.key, torch.where(outcome.active, choice, state.choice), pulls, sums, states)

    def _choice(self, key: Tensor, pulls: Tensor, sums: Tensor) -> Tensor:
        """Return [S], the arm to try next."""
        n = pulls.clamp_min(1.0)
        tokens, seconds, tt, ts, ss = sums.unbind(-1)
        rate = tokens / seconds.clamp_min(1e-30)
        total = pulls.sum(1, keepdim=True)
        if self.kind == "ucb":
            worth = rate / rate.amax(1, keepdim=True).clamp_min(1e-30)
            worth = worth + self.explore * (total.clamp_min(1.0).log() / n).sqrt()
        else:
            # The variance of tokens - rate x seconds, with one round's worth of a token squared before any is seen.
            spread = (tt - 2.0 * rate * ts + rate * rate * ss).clamp_min(0.0) + 1.0
            width = spread.sqrt() / seconds.clamp_min(1e-30)
            worth = rate + self.explore * width * keyed_normal(key, total[:, 0].long(), len(self.arms))
        return torch.where(pulls > 0, worth, torch.inf).argmax(1)
